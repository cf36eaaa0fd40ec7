"""From a search space to trials on one budget, run on Ray, and a record of every one of them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dpfp_ray.data.split import count_units
from dpfp_ray.plan.plan import INPUT_FIELDS, Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.runner import Runner
from dpfp_ray.sweeps.search_space import SearchSpace
from dpfp_ray.sweeps.shared import input_key
from dpfp_ray.sweeps.trial import SETTLED, Trial
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import stderr
from dpfp_ray.training.dev_scores import quote
from dpfp_ray.training.prepare import (
    Inputs,
    TaskFacts,
    choose_representation,
    load_inputs,
    possible_representations,
    prepare,
)
from dpfp_ray.training.record import Record, make_record

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler

# Random search must draw the same trials when it is resumed; what it draws is public.
PUBLIC_SEED = 0
# More epochs than any trial has: Tune's ASHA stops every trial at its limit, good ones too.
NO_EPOCH_LIMIT = 10_000


class InputsOnce:
    """Loads each distinct task and model once, for binding plans on the driver."""

    def __init__(self, load: Callable[[Plan], Inputs] = load_inputs) -> None:
        self._load = load
        self._known: dict[tuple[object, ...], Inputs] = {}
        self._facts: dict[tuple[object, ...], TaskFacts] = {}

    def __call__(self, plan: Plan) -> Inputs:
        asked = input_key(plan)
        if asked in self._known and plan.representation != "auto":
            return self._known[asked]  # checked when it was loaded; a thousand trials ask for it
        if asked in self._facts:  # "auto" may be another one for another budget
            chosen = choose_representation(plan, self._facts[asked])
            plan = replace(plan, representation=chosen)
        key = input_key(plan)
        if key not in self._known:
            found = self._load(plan)
            paired, classes = found.paired, len(found.label_names)
            self._facts[asked] = TaskFacts(count_units(found.data.train), classes, paired)
            key = input_key(replace(plan, representation=found.representation))
            self._known.setdefault(key, found)
        return self._known[key]


def bind_trial(
    values: dict[str, Any],
    inputs_of: Callable[[Plan], Inputs],
    seed_index: int = 0,
    group: str = "",
) -> Trial:
    """A trial that meets its budget, or a UserError that says why it cannot."""
    plan = make_plan(values)
    prepared = prepare(plan, inputs_of(plan))
    return Trial(prepared.plan, prepared.noise_multiplier, seed_index, group)


def run_sweep(space: SearchSpace, runner: Runner) -> None:
    """Run what is left of a sweep. Nothing is started for one that is finished, or wrong."""
    if space.search != "tpe":
        trials = plan_trials(space, runner)
        scheduler = make_scheduler(space, runner.storage)
        runner.run(trials, varied=space.varied, scheduler=scheduler)
        return
    from dpfp_ray.sweeps.tpe import Tpe

    bind_trial(space.plan_values(first_choice(space)), runner.inputs_of)  # wrong spaces fail now
    plans = input_variants(space, runner.inputs_of)
    searcher = Tpe(
        space,
        runner.storage,
        bind=lambda chosen: bind_trial(space.plan_values(chosen), runner.inputs_of),
        refuse=lambda chosen, error: refuse(space, runner.storage, chosen, error),
    )
    scheduler = make_scheduler(space, runner.storage)
    runner.search(searcher, plans, varied=space.varied, scheduler=scheduler)


def plan_trials(space: SearchSpace, runner: Runner) -> list[Trial]:
    """All trials of a grid or a random search, calibrated; what cannot meet the budget is refused.

    Repetition by repetition, so that a sweep which is stopped has treated all points alike.
    """
    rng = keyed_generator(PUBLIC_SEED, f"search {space.name}", 0)
    chosen = list(space.choices(rng))
    trials: dict[str, Trial] = {}
    for index in range(space.seeds):
        for one in list(chosen):
            try:
                trial = bind_trial(space.plan_values(one), runner.inputs_of, index)
                trials[trial.id] = trial
            except UserError as error:
                refuse(space, runner.storage, one, error)
                chosen.remove(one)
    if not trials:
        raise UserError("every trial of this space was refused; see the reasons above")
    return list(trials.values())


def input_variants(space: SearchSpace, inputs_of: Callable[[Plan], Inputs]) -> list[Plan]:
    """Plans that between them need all data and models which the space's trials may need."""
    variants = [first_choice(space)]
    for parameter in space.parameters:
        if parameter.grouped or parameter.name in ("method", "mode", *INPUT_FIELDS):
            if not parameter.values:
                raise UserError(
                    f"{parameter.name} is a distribution; with method: tpe give it {{values: …}}, "
                    "because what trials load is prepared before the first of them"
                )
            variants = [{**one, parameter.name: v} for one in variants for v in parameter.values]
    plans = []
    for one in variants:
        with suppress(UserError):  # no plan, or none for these data: such a trial is refused
            plan = make_plan(space.plan_values(one))
            names = possible_representations(plan, inputs_of(plan).paired)
            plans += [replace(plan, representation=name) for name in names]
    return plans


def first_choice(space: SearchSpace) -> dict[str, Any]:
    rng = keyed_generator(PUBLIC_SEED, "first", 0)
    return {parameter.name: parameter.draw(rng) for parameter in space.parameters}


def make_scheduler(space: SearchSpace, storage: str) -> "TrialScheduler | None":
    """ASHA, told what the trials of an interrupted sweep had reached; None for no scheduler."""
    if space.scheduler == "none":
        return None
    from ray.tune.schedulers import ASHAScheduler

    metric, mode = space.metrics[0]
    scheduler = ASHAScheduler(time_attr="epoch", metric=metric, mode=mode, max_t=NO_EPOCH_LIMIT)
    for record in Store(storage).records():
        if record["trial"].get("status") in SETTLED and record["history"]:
            replay(scheduler, record)
    return scheduler


def replay(scheduler: "TrialScheduler", record: Record) -> None:
    """Report a finished trial's epochs to `scheduler` again."""
    from dpfp_ray.sweeps.trial_process import trial_metrics

    trial: Any = SimpleNamespace(trial_id=record["trial"]["id"])
    controller: Any = None
    scheduler.on_trial_add(controller, trial)
    for end in range(1, len(record["history"]) + 1):
        history = record["history"][:end]
        told = trial_metrics({**record, "history": history, "metrics": quote(history)})
        scheduler.on_trial_result(controller, trial, told)


def refuse(space: SearchSpace, storage: str, chosen: dict[str, Any], error: Exception) -> None:
    """Say why a trial is not run, and keep it on record."""
    shown = ", ".join(f"{name} {value}" for name, value in chosen.items())
    stderr.print(f"refused: {shown}: {error}", markup=False)
    values = space.plan_values(chosen)
    mark = blake2b(repr([space.name, sorted(values.items())]).encode(), digest_size=6).hexdigest()
    trial = {"id": f"refused-{mark}", "sweep": space.name, "status": "refused", "error": str(error)}
    Store(storage).put(make_record(plan=values, trial=trial))
