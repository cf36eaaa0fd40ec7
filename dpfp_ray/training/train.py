"""One run: one method, one budget, one task. Stopped at any time, the same call continues it and
ends with the same weights and the same ε as a run that was never stopped.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpfp_ray.data import Task
from dpfp_ray.data.memory import in_memory
from dpfp_ray.models.own_encoder import OwnEncoder
from dpfp_ray.models.predictor import Predictor
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import from_data
from dpfp_ray.privacy.ledger import Ledger, open_ledger
from dpfp_ray.privacy.sampling import fresh_seed
from dpfp_ray.privacy.statement_text import brief
from dpfp_ray.training import LEAST_SECONDS, run_folder
from dpfp_ray.training.charged import charged, enter_past, register
from dpfp_ray.training.checkpoints import (
    ask_for_room,
    keep_seed,
    load_seed,
    load_state,
    save_seconds,
)
from dpfp_ray.training.console import Keeper, choose_display
from dpfp_ray.training.dev_scores import Select
from dpfp_ray.training.load_model import predictor_of, weights_of
from dpfp_ray.training.loop import Finished, State
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.prepare import Run, build_model, load_inputs, prepare
from dpfp_ray.training.run import run_events


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A finished run. `record` holds all facts, as in result.json; there is no secret in it.

    `folder` is where it was written, None if it was not. `model.predict(texts)` asks the trained
    model; None if the result was found finished in `folder`, which `load_model` reads.
    """

    record: dict[str, Any]
    folder: Path | None = None
    model: Predictor | None = field(default=None, compare=False)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan's fields, with all that the data filled in."""
        return dict(self.record["plan"])

    @property
    def accuracy(self) -> float:
        return float(self.record["metrics"]["accuracy"])

    @property
    def epsilon(self) -> float | None:
        """What was spent, by the accountant that the noise was calibrated by."""
        spent = self.record["privacy"]["epsilon"].get(self.plan["accountant"])
        return None if spent is None else float(spent)  # JSON has an infinite ε as "inf"

    @property
    def examples_per_second(self) -> float | None:
        """None if the training was too short to tell."""
        cost = self.record["cost"]
        short = cost["train_seconds"] < LEAST_SECONDS
        return None if short else float(cost["examples_per_second"])

    @property
    def guarantee(self) -> str:
        """proved, nominal or none."""
        return str(self.record["privacy"]["guarantee"])

    @property
    def statement(self) -> str:
        """What may be said about the run's privacy, in a few lines; "" in records without it."""
        return brief(self.record["statement"]) if "statement" in self.record else ""

    def __repr__(self) -> str:
        mode = "" if self.plan["mode"] == "paper" else f" {self.plan['mode']}"
        budget = "" if self.epsilon is None else f", ε = {self.epsilon:.3f} ({self.guarantee})"
        place = "" if self.folder is None else f", in {self.folder}"
        name = f"{self.plan['method']}{mode} on {self.plan['task']}"
        return f"<{name}: accuracy {self.accuracy:.4f}{budget}{place}>"


def train(
    plan: Plan,
    *,
    output: str | Path | None = None,
    data: Any = None,
    dev: Any = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    users: Any = None,
    encoder: Any = None,
    tokenizer: Any = None,
    seed: int | None = None,
    overwrite: bool = False,
    weights: bool = True,
    threads: int | None = None,
    reporter: str = "auto",
    save_every: float | None = None,
    show_training_loss: bool = False,
    select: Select = "last",
    ledger: str | Path | Ledger | None = None,
    total_epsilon: float | None = None,
    total_delta: float | None = None,
) -> TrainedRun:
    """Train as planned.

    output     folder for the result, the weights and, while unfinished, what continues it; without
               one nothing is written
    data, dev  in place of files: a DataFrame, a datasets.Dataset or dict of its splits,
               (texts, labels), or a dict of columns; text, pair and label name its columns
    users      the column that says whose a row is, or such a column itself: ε is then for persons
    encoder    your own torch.nn.Module from input_ids and attention_mask to hidden states, with its
               tokenizer; the run trains a copy
    seed       fixes the secret seed; a known seed makes the noise known: for tests, not for release
    overwrite  discards what is in output
    weights    whether to write the trained weights
    threads    CPU threads (default: all cores)
    reporter   auto, terminal, notebook or silent
    save_every seconds between two saves of the unfinished run (default: 30)
    show_training_loss  show and keep the training loss of a private run too: it is computed from
               private records without noise, and is not covered by ε
    select     the epoch whose score is quoted and whose weights are saved: last, or best on dev,
               which flatters
    ledger     folder or URI of the privacy ledger that the run is entered in before its first step
               (default: $DPFP_LEDGER, else the user's data folder)
    total_epsilon, total_delta   set what these people may ever pay in this ledger, once; a run that
               would pass the total is refused
    """
    display = choose_display(reporter)
    save_every = save_seconds(save_every)
    use_threads(threads)
    book = open_ledger(ledger, total_epsilon, total_delta)
    folder = None if output is None else run_folder.make_folder(output)
    task: Task | None = None
    if data is not None:
        plan, task = in_memory(plan, data, dev=dev, text=text, pair=pair, label=label, users=users)
    own = own_encoder(encoder, tokenizer)
    if own is not None:
        plan = replace(plan, model=own.name)
    prepared = prepare(plan, load_inputs(plan, task, own))
    display.say(from_data(plan, prepared.plan))
    plan = prepared.plan

    with nullcontext() if folder is None else run_folder.held(folder, overwrite):
        state = begun = None
        if folder is not None:
            if overwrite:
                run_folder.discard(folder)
            record = run_folder.finished_result(folder, plan)
            if record is not None:
                refuse_other_epoch(record, select, folder)
                if weights:
                    weights_of(folder, record)  # refuses weights that are missing or damaged
                doubt = "" if task is None else " (perhaps of other data: none are kept to compare)"
                display.say(
                    f"{folder} already holds this plan's result{doubt}; --overwrite runs it again"
                )
                enter_past(book, record, register(book, prepared.inputs))
                return TrainedRun(record, folder)
            state = load_state(folder, plan)
            begun = state or load_seed(folder, plan)
        seed, seed_known = settle_seed(seed, begun, folder)
        run = Run(prepared, seed, state, seed_known, show_training_loss, select)
        in_files = task is None and own is None
        mark = None if in_files else run_folder.data_mark(prepared.data, own, seed)
        if state is not None:
            refuse_other_data(state, mark, folder)
            refuse_other_epoch(state, select, folder)
            display.say(f"continuing after step {state['progress']['step']:,} of {plan.steps:,}")
        elif begun is not None:
            display.say(
                "starting again with the same noise: the run here was killed before its first save"
            )
        model = build_model(run.prepared, seed)
        if folder is not None:
            ask_for_room(folder, model, plan, weights)
            keep_seed(folder, plan, seed, seed_known)
        where = "" if folder is None else str(folder.resolve())
        keeper = Keeper(run, display, folder, save_every, mark)
        with (
            charged(book, run, where=where, resumed=begun is not None, mark=mark) as charge,
            display(run, plan.method) as shown,
            keeper.on_signals(),
        ):
            for event in run_events(run, model):
                charge.count(event)
                shown.show(event)
                keeper.follow(event)
                if isinstance(event, Finished):
                    record = {**event.record, "ledger_entry": charge.entry_id}
        if folder is not None:
            run_folder.write_result(folder, record, model if weights else None, plan)
        answers = predictor_of(plan, prepared.inputs.label_names, model, own)
        return TrainedRun(record, folder, answers)


def own_encoder(encoder: Any, tokenizer: Any) -> OwnEncoder | None:
    if (encoder is None) != (tokenizer is None):
        missing = "tokenizer" if tokenizer is None else "encoder"
        raise UserError(f"encoder and tokenizer belong together; give {missing}= too")
    return None if encoder is None else OwnEncoder(encoder, tokenizer)


def settle_seed(given: int | None, begun: State | None, folder: Path | None) -> tuple[int, bool]:
    """The run's seed (given, or of the unfinished run, or new), and whether anybody knows it."""
    if begun is None:
        return (fresh_seed(), False) if given is None else (given, True)
    if given not in (None, begun["seed"]):
        raise UserError(
            f"{folder} holds an unfinished run with another seed; drop --seed to continue it, "
            f"or use --overwrite"
        )
    return begun["seed"], given is not None or begun["seed_known"]


def refuse_other_epoch(saved: Mapping[str, Any], select: Select, folder: Path | None) -> None:
    """Weights of another epoch than the one asked for are another result."""
    there = saved.get("select", "last")
    if there != select:
        raise UserError(
            f"{folder} holds a run with --select {there}, this is {select}; use another --output, "
            f"or --overwrite"
        )


def refuse_other_data(state: State, mark: str | None, folder: Path | None) -> None:
    """Files tell by their times (`refuse_changed_files`), what is in memory by its mark."""
    if mark is not None and state.get("data_mark") != mark:
        raise UserError(
            f"{folder} holds an unfinished run on other data, or from another encoder; use another "
            f"--output, or --overwrite"
        )
