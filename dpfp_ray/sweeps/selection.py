"""`dpfp sweep --selection KIND:N`: the best of a random number of random trials, and nothing else.

Papernot & Steinke 2022 (theorems 2 and 6) price one output: the best of K trials that are
independent and identically distributed given the data, K drawn from a known distribution and never
told. So here

- K, each trial's settings, its noise and how ties are broken follow from the sweep's secret seed;
- equal draws are trials of their own, with noise of their own;
- trials are named by a keyed hash, which shows neither their settings nor their place in the list;
- all files of the unfinished selection, its seed included, are in STORE/sealed (owner-only), which
  no reader of a store looks into; it is deleted at the end;
- what becomes a record is the winner, without clocks, machines or memory: a process that has run
  many trials differs in these from one that has run none.

STORE/sealed/               records, states and seed of an unfinished selection
STORE/records/ID.json       the winner
STORE/selection-KEY.json    that the selection is finished, so that the same command does not pay
                            for it twice; KEY names what was selected from, and how
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

from dp_accounting import NeighboringRelation

from dpfp_ray.plan.method_spec import MARKS
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_entries import GUARANTEES, Use
from dpfp_ray.privacy.sampling import derived_seed, keyed_generator
from dpfp_ray.privacy.selection import Selection, draw_trials, selection_curve, selection_epsilon
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.sweeps.driver import Runner
from dpfp_ray.sweeps.space import SearchSpace
from dpfp_ray.sweeps.trial import SweepState, Trial, bind_trial, settled_record
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.lease import held_unless
from dpfp_ray.system.storage import SEALED, below, open_files
from dpfp_ray.system.terminal import stderr
from dpfp_ray.system.whole_files import PRIVATE_FOLDER, private_folder
from dpfp_ray.training.charged import register
from dpfp_ray.training.prepare import Inputs
from dpfp_ray.training.record import Record, make_record, plan_of
from dpfp_ray.training.run_folder import data_mark

# Fields that change no mechanism, whatever their value; all others must take finitely many values.
FREE_OF_COST = (
    "learning_rate", "weight_decay", "clip", "dropout", "ridge", "shrinkage", "rank",
    "power_iterations", "max_length", "max_dev", "max_physical_batch", "cache_gb",
)  # fmt: skip
# Fields that only matter to what is computed from a release that has been paid for.
POST_PROCESSING = {"ridge", "shrinkage", "prior"}
Bind = Callable[[dict[str, Any]], Trial]


@dataclass(frozen=True)
class SelectionCost:
    """What a selection costs as a whole, in the trials' own adjacency; `entry` says the same in a
    ledger's (zero-out), without people and run."""

    selection: str
    task: str
    epsilon: float
    entry: Use
    accountant: str = "rdp"

    @property
    def nominal(self) -> bool:
        return self.entry.guarantee in MARKS

    def sentence(self) -> str:
        return (
            f"the best of a random number of trials on {self.task} ({self.selection}, "
            f"{self.entry.adjacency}), all others and their number secret: "
            f"ε = {self.epsilon:.3g}{MARKS.get(self.entry.guarantee, '')} ({self.accountant}), "
            f"δ = {self.entry.delta:.3g}"
        )

    def lines(self) -> list[str]:
        return [self.sentence()]

    def statement(self) -> dict[str, Any]:
        """For the winner's statement, under `tuning`."""
        entry = self.entry
        facts: dict[str, Any] = {"selection": self.selection, "task": self.task}
        facts |= {"adjacency": entry.adjacency, "epsilon": self.epsilon, "delta": entry.delta}
        facts |= {"accountant": self.accountant, "nominal": self.nominal}
        return {**facts, "text": self.sentence()}

    def use(self, *, key: str, people: str, run: str, loss_shown: bool = False) -> Use:
        """The selection as *one* entry of a ledger, to be begun before its first trial.

        Its trials must have no entries of their own: these would add up to composition, and count
        K. It has one step, and is charged in full however many trials were run. `key` names what is
        selected from, and how; `run` must be equal for equal seeds (`Ledger.mark` of the secret
        seed) on equal data.
        """
        return replace(self.entry, plan_hash=key, people=people, run=run, loss_shown=loss_shown)


def selection_cost(space: SearchSpace, chosen: Selection, bind: Bind) -> SelectionCost:
    """ε of releasing only the best of a random number of random trials.

    The theorem wants every mechanism that the space can draw, not only those that it drew.
    """
    trials = [bind(choice) for choice in privacy_choices(space)]
    plans = [trial.plan for trial in trials]
    check_chargeable(space, plans)
    mechanisms = dict.fromkeys(accounting.mechanism(t.plan, t.noise_multiplier) for t in trials)
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if plans[0].adjacency == "replace_one":
        relation = NeighboringRelation.REPLACE_ONE
    events: list[Any] = [accounting.dp_event(mechanism) for mechanism in mechanisms]
    zeroed: list[Any] = [
        accounting.dp_event(replace(mechanism, adjacency="zero_out")) for mechanism in mechanisms
    ]
    delta = min(plan.delta for plan in plans if plan.delta is not None)
    titles = ", ".join(dict.fromkeys(plan.spec.title for plan in plans))
    kinds = {plan.spec.guarantee for plan in plans}
    entry = Use(
        purpose="trial",
        plan_hash="",
        method=f"{titles}, {chosen}",
        people="",
        records=max(plan.D for plan in plans),
        steps=1,
        parts=(selection_curve(zeroed, chosen),),
        adjacency=str(plans[0].adjacency),
        labels_protected=all(plan.spec.labels_protected for plan in plans),
        guarantee=max(kinds, key=GUARANTEES.index),
        delta=delta,
        run="",
        unit="person" if all(plan.unit == "person" for plan in plans) else "record",
    )
    tasks = ", ".join(dict.fromkeys(plan.task for plan in plans))
    return SelectionCost(
        str(chosen), tasks, selection_epsilon(events, chosen, delta, relation), entry
    )


def check_chargeable(space: SearchSpace, plans: Sequence[Plan]) -> None:
    """Refuse spaces for which the theorem has no price, or that pay one for nothing."""
    if plain := [plan.method for plan in plans if not plan.private]:
        raise UserError(
            f"--selection cannot promise anything for method {plain[0]}; take it out of the space"
        )
    if any(plan.label_epsilon for plan in plans):
        raise UserError("--selection cannot charge for label_epsilon; use composition, or drop it")
    if any(plan.allocates for plan in plans):
        raise UserError(
            "--selection cannot charge for sampling allocation; use poisson, or drop --selection"
        )
    adjacencies = sorted({str(plan.adjacency) for plan in plans})
    if len(adjacencies) > 1:
        raise UserError(
            f"--selection needs one adjacency for all trials, and this space has "
            f"{' and '.join(adjacencies)}; fix adjacency, or the method"
        )
    if all(plan.one_release for plan in plans) and set(space.varied) <= POST_PROCESSING:
        raise UserError(
            f"{plans[0].spec.title} uses the records once, and choosing {', '.join(space.varied)} "
            "on that release is free: a selection would only cost more; drop --selection"
        )


def privacy_choices(space: SearchSpace) -> list[dict[str, Any]]:
    """One choice for each combination of values that makes a difference to privacy."""
    options: list[list[tuple[str, Any]]] = []
    for parameter in space.parameters:
        values: Sequence[Any] = parameter.values
        if not values and parameter.distribution == "power_of_two":
            values = [
                2**power for power in range(64) if parameter.low <= 2**power <= parameter.high
            ]
        elif not values and parameter.name not in FREE_OF_COST:
            raise UserError(
                f"--selection charges for every {parameter.name} that could be drawn; "
                "give it values: […] or distribution: power_of_two"
            )
        # Parameters without a privacy cost: one representative value is enough.
        whole = int(parameter.low) if parameter.distribution == "int_uniform" else parameter.low
        options.append([(parameter.name, value) for value in values or [whole]])
    return [dict(combination) for combination in product(*options)]


# What stays in a winner's record: what its own run made, and nothing of where and when.
TRIAL_FACTS = ("id", "sweep", "group", "seed_index", "status", "error")
COST_FACTS = ("parameters", "trainable_parameters")
MARK = "selection.json"


@dataclass(frozen=True)
class Draw:
    """One trial of a selection before it is bound to data."""

    name: str
    settings: dict[str, Any]


def run_selection(
    space: SearchSpace,
    chosen: Selection,
    storage: str,
    options: RayOptions,
    inputs_of: Callable[[Plan], Inputs],
    ledger: Ledger,
) -> tuple[list[Record], list[Any]]:
    """Run what is left of a selection: its winner's record, and what it costs.

    Both lists are empty if the draw says that there is no trial. Stopped or killed, the same call
    continues to the same winner.
    """
    check_choosing(space, options)

    def bind(settings: dict[str, Any]) -> Trial:
        return bind_trial(space.plan_values(settings), inputs_of)

    store = Store(storage)
    # Names what is selected from, and how.
    key = blake2b(f"{space.key} {chosen}".encode(), digest_size=6).hexdigest()
    done = read_json(store, f"selection-{key}.json") is not None
    with held_unless(done, store.files, "use another --storage"):
        charge = selection_cost(space, chosen, bind)
        finished = read_json(store, f"selection-{key}.json")
        if finished is None:
            sealed = open_sealed(storage, key)
            seed = SweepState(sealed).seed(options.seed)
            trials = bind_all(draw_all(space, chosen, seed), bind, sealed, storage)
            # One entry for each data set that the space can draw, whichever it drew; the same
            # again for the same seed on the same rows, labels included.
            marks: dict[str, list[str]] = {}
            all_inputs = [inputs_of(bind(choice).plan) for choice in privacy_choices(space)]
            for inputs in {id(inputs): inputs for inputs in all_inputs}.values():
                mark = data_mark(inputs.data, None, seed)
                marks.setdefault(register(ledger, inputs), []).append(mark)
            run, shows = f"{storage} {key} {ledger.mark(seed)}", options.show_training_loss
            uses = [
                charge.use(key=key, people=people, run=" ".join([run, *rows]), loss_shown=shows)
                for people, rows in marks.items()
            ]
            entries = ledger.begin_all(uses, resumed=True)
            stderr.print("selection in progress; only its winner will be shown")
            with Runner(space.name, sealed, options, inputs_of, ledger, sealed=True) as runner:
                runner.run(trials, varied=[])
                # Before the seed goes: whoever is killed here finds the same winner again.
                winner = best_record(Store(sealed), trials, seed)
                finished = {"selection": str(chosen), "winner": None}
                if winner is not None:
                    people = register(ledger, inputs_of(plan_of(winner)))
                    paid_by = next(entry.id for entry in entries if entry.use.people == people)
                    store.put(shown(winner, chosen, charge, paid_by))
                    finished["winner"] = winner["trial"]["id"]
                store.files.write(f"selection-{key}.json", json.dumps(finished).encode())
            for entry in entries:
                ledger.end(entry.id, 1, "finished")
        else:
            stderr.print("this selection is finished; for another one, use another --storage")
        store.files.delete_folder(SEALED)
        if finished["winner"] is None:
            stderr.print("the draw says no trial at all: nothing is run, nothing is released")
            return [], []
        store.export()
        record = store.get(finished["winner"])
        return ([] if record is None else [record]), [charge]


def check_choosing(space: SearchSpace, options: RayOptions) -> None:
    """Refuse what would show, or choose by, something else than the theorem allows."""
    if options.tracker:
        raise UserError(
            f"--tracker {options.tracker} would show every trial, and a selection may show only "
            "its winner; drop --tracker, or use --selection composition"
        )
    if space.metrics != (("accuracy", "max"),):
        named = ", ".join(f"{name} {goal}" for name, goal in space.metrics)
        raise UserError(
            f"--selection chooses by dev accuracy, and the space's metric is {named}; remove "
            "`metric` from it, or use --selection composition"
        )


# --- the draw -----------------------------------------------------------------------------------


def draw_all(space: SearchSpace, chosen: Selection, seed: int) -> list[Draw]:
    """All trials of the selection: how many, which settings, which names. As secret as `seed`.

    The same for the same seed; drawing again because the number is inconvenient would void the
    theorem.
    """
    count = draw_trials(chosen, keyed_generator(seed, "selection count", 0))
    return [
        Draw(
            f"selected-{derived_seed(seed, f'selection name {index}'):032x}",
            space.draw(keyed_generator(seed, "selection settings", index)),
        )
        for index in range(count)
    ]


def bind_all(draws: Iterable[Draw], bind: Bind, sealed: str, storage: str) -> list[Trial]:
    """The trials; a UserError if one of them cannot run, before any does."""
    try:
        return [replace(bind(draw.settings), name=draw.name) for draw in draws]
    except UserError as error:
        if not Store(sealed).records():
            open_files(storage).delete_folder(SEALED)
        raise UserError(f"this space can draw settings that cannot run: {error}") from None


# --- the winner ---------------------------------------------------------------------------------


def best_name(scores: Mapping[str, float | None], seed: int) -> str | None:
    """The trial with the best score; those that failed have None and lose to all others.

    Ties are broken by the secret seed: the first or the last of equals would show its place.
    """

    def rank(name: str) -> tuple[bool, float, float]:
        score = scores[name]
        tie = float(keyed_generator(seed, f"selection tie {name}", 0).random())
        return score is not None, score or 0.0, tie

    return max(scores, key=rank, default=None)


def best_record(sealed: Store, trials: Iterable[Trial], seed: int) -> Record | None:
    """The winner's record by dev accuracy, which is public; None if there was no trial."""
    records: dict[str, Record] = {}
    for trial in trials:
        record = settled_record(sealed, trial.id)
        if record is None:
            raise RuntimeError("a trial of the selection has no final record")
        records[trial.id] = record
    scores = {
        name: record["metrics"]["accuracy"] if record["trial"]["status"] == "finished" else None
        for name, record in records.items()
    }
    winner = best_name(scores, seed)
    return None if winner is None else records[winner]


def shown(record: Record, chosen: Selection, charge: SelectionCost, entry: str = "") -> Record:
    """A winner's record as readers may have it; `selection` says what a ledger charges for it, and
    `entry` where one did: for the whole selection."""
    trial = {name: record["trial"].get(name) for name in TRIAL_FACTS} | {"ledger_entry": entry}
    public: dict[str, Any] = {
        **record,
        "trial": {**trial, "selection": str(chosen)},
        "selection": {"kind": str(chosen), "part": asdict(charge.entry.parts[0])},
        "cost": {name: record["cost"].get(name) for name in COST_FACTS if name in record["cost"]},
        "history": [{**epoch, "train_seconds": None} for epoch in record["history"]],
    }
    if record["statement"]:
        public["statement"] = {**record["statement"], "tuning": charge.statement()}
    return make_record(**public)


# --- files --------------------------------------------------------------------------------------


def open_sealed(storage: str, key: str) -> str:
    """The place of an unfinished selection, owner-only; a UserError if another one is there."""
    sealed = below(storage, SEALED)
    files = open_files(sealed)
    if files.local:
        folder = Path(files.name)
        try:
            private_folder(folder)
            folder.chmod(PRIVATE_FOLDER)  # whoever made it
        except OSError as error:
            raise UserError(
                f"cannot write to {folder}: {error.strerror}; use another --storage"
            ) from None
    mark = read_json(Store(sealed), MARK)
    if mark is None:
        files.write(MARK, json.dumps({"key": key}).encode())
    elif mark.get("key") != key:
        raise UserError(
            f"{files.name} is an unfinished selection from another space or of another kind; "
            "continue that one, or use another --storage (its trials have been spent)"
        )
    return sealed


def read_json(store: Store, name: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(store.files.read_name(name)))
    except FileNotFoundError:
        return None
