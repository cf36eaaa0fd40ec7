"""One run from plan to record: one method, one budget, one task. Stopped at any time, the same call
continues it and ends with the same weights and the same ε as a run that was never stopped.
"""

import platform
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from dpfp_ray.data import Task
from dpfp_ray.data.tasks import in_memory
from dpfp_ray.methods.parts.one_release import release_id
from dpfp_ray.models.activations import with_activations
from dpfp_ray.models.classifier import Classifier, count_parameters
from dpfp_ray.models.export import Predictor
from dpfp_ray.models.representations import OwnEncoder, RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import from_data
from dpfp_ray.privacy.ledger import Ledger, open_ledger
from dpfp_ray.privacy.sampling import fresh_seed
from dpfp_ray.privacy.statement import brief, guarantee, statement
from dpfp_ray.system.cache import version
from dpfp_ray.system.errors import UserError
from dpfp_ray.training import LEAST_SECONDS, machine, run_folder
from dpfp_ray.training.charged import Charge, charged, enter_past, register
from dpfp_ray.training.console import Keeper, Silent, choose_display
from dpfp_ray.training.dev_scores import kept_predictions, quote, without_answers
from dpfp_ray.training.distil import distil
from dpfp_ray.training.load_model import predictor_of, weights_of
from dpfp_ray.training.loop import (
    Event,
    Finished,
    Progress,
    State,
    Training,
    make_release,
    refuse_other_device,
    train_steps,
)
from dpfp_ray.training.machine import Comm, SoloComm
from dpfp_ray.training.prepare import Run, build_model, load_inputs, prepare
from dpfp_ray.training.record import Record, Select, make_record
from dpfp_ray.training.run_folder import EXIT


def run_events(run: Run, model: Classifier, comm: Comm | None = None) -> Generator[Event]:
    """Train `model` in place as planned. The last event is `Finished`, with the result's record.

    `model` is what `build_model` gives for the run's seed. `comm` says which of several workers
    this process is.
    """
    prepared, plan = run.prepared, run.plan
    if run.state is not None:
        run_folder.refuse_earlier_version(run.state, plan)
    device = next(model.parameters()).device
    machine.reset_peak_memory(device)
    started = time.perf_counter()
    data = replace(prepared.data, train=with_activations(prepared.data.train, model, plan))
    prepared.build_seconds += time.perf_counter() - started
    with machine.repeatable(plan.private and not plan.spec.by_library, device):
        progress = yield from training_of(plan)(run, model, data, comm or SoloComm())
    record = result_record(run, progress, model)
    train_table = prepared.data.train
    if progress.claim:
        record["privacy"]["claim"] = record["statement"]["claim"] = cast(Any, progress.claim)
    if plan.private_part.one_release and isinstance(train_table, RepresentationTable):
        release = release_id(plan.private_part, prepared.noise_multiplier, train_table, run.seed)
        record["privacy"]["release_id"] = release
    yield Finished(record)


def training_of(plan: Plan) -> Callable[..., Training]:
    if plan.teacher is not None:
        return distil
    return make_release if plan.one_release else train_steps


def result_record(run: Run, progress: Progress, model: Classifier) -> Record:
    """Everything a reader of the result may know, finished or so far; the seed is not among it."""
    prepared, plan, select = run.prepared, run.plan, run.select
    private = plan.private_part
    steps = min(progress.step, private.steps)  # all of a student follow one release
    inputs, history = prepared.inputs, progress.history
    device = next(model.parameters()).device
    return make_record(
        plan=plan.to_dict(),
        plan_hash=plan.hash,
        finished=progress.step == plan.steps,
        labels=list(inputs.label_names),
        columns=dict(inputs.columns),
        dev_records={name: len(table) for name, table in prepared.data.dev.items()},
        select=select,
        metrics=quote(history, select),
        history=without_answers(history),
        predictions=kept_predictions(
            history,
            {name: table.labels for name, table in prepared.data.dev.items()},
            inputs.fingerprints,
            len(inputs.label_names),
        ),
        privacy={
            "guarantee": guarantee(plan),
            "epsilon": history[-1]["epsilon"] if history else {},
            "delta": plan.delta,
            "noise_multiplier": prepared.noise_multiplier,
            "sigma": prepared.noise_multiplier * private.C,
            "p": private.p,
            "steps": steps,
            "draws": private.draws_after(steps),
            "noise_coordinates": progress.noise_coordinates,
        },
        statement=statement(
            plan,
            prepared.noise_multiplier,
            steps=steps,
            seed_known=run.seed_known,
            loss_shown=any(entry["train_loss"] is not None for entry in history),
        ),
        cost={
            "prepare_seconds": inputs.seconds + prepared.build_seconds,
            "train_seconds": progress.train_seconds,
            "eval_seconds": progress.eval_seconds,
            "examples_per_second": progress.rows / max(progress.train_seconds, 1e-9),
            "peak_memory_bytes": machine.peak_memory(device),
            "parameters": count_parameters(model),
            "trainable_parameters": count_parameters(model, trainable_only=True),
            **({"part": progress.fits} if progress.fits else {}),
        },
        environment={
            "device": str(device),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
            "dpfp_ray": version("dpfp-ray"),
        },
    )


UNPROVED = {
    "nominal": "† the ε of this method is nominal: its accounting assumes what does not hold for "
    "it, so it is no guarantee (dpfp glossary nominal)",
    "claimed": "§ the ε of this method is claimed: it holds if another library, whose code trains, "
    "does what it says (dpfp glossary claimed)",
}


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A finished run. `record` holds all facts, as in result.json; there is no secret in it.

    `folder` is where it was written, None if it was not. `model.predict(texts)` asks the trained
    model; None if the result was found finished in `folder`, which `load_model` reads.
    """

    record: Record
    folder: Path | None = None
    model: Predictor | None = field(default=None, compare=False)

    @property
    def plan(self) -> dict[str, Any]:
        return dict(self.record["plan"])

    @property
    def accuracy(self) -> float:
        return float(self.record["metrics"]["accuracy"])

    @property
    def epsilon(self) -> float | None:
        """What was spent, by the accountant that the noise was calibrated by."""
        return self.record["privacy"]["epsilon"].get(self.plan["accountant"])

    @property
    def examples_per_second(self) -> float | None:
        """None if the training was too short to tell."""
        cost = self.record["cost"]
        short = (cost["train_seconds"] or 0.0) < LEAST_SECONDS
        return None if short else cost["examples_per_second"]

    @property
    def guarantee(self) -> str:
        return self.record["privacy"]["guarantee"]

    @property
    def statement(self) -> str:
        """What may be said about the run's privacy, in a few lines."""
        return brief(self.record["statement"])

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
    workers: int = 1,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    address: str = "",
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
    workers    Ray workers that share the rows of each step; cpus_per_worker and gpus_per_worker say
               what each one gets, address where they are, as for `sweep`
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
    save_every = run_folder.save_seconds(save_every)
    machine.use_threads(threads)
    book = open_ledger(ledger, total_epsilon, total_delta)
    folder = None if output is None else run_folder.make_folder(output)
    task: Task | None = None
    if data is not None:
        plan, task = in_memory(plan, data, dev=dev, text=text, pair=pair, label=label, users=users)
    if (encoder is None) != (tokenizer is None):
        missing = "tokenizer" if tokenizer is None else "encoder"
        raise UserError(f"encoder and tokenizer belong together; give {missing}= too")
    own = None if encoder is None else OwnEncoder(encoder, tokenizer)
    on_ray = workers > 1 or bool(address) or gpus_per_worker is not None
    if on_ray and own is not None:
        raise UserError(
            "encoder is a module in memory, which other workers do not have; save it to a folder "
            "with save_pretrained and give that as model"
        )
    if own is not None:
        plan = replace(plan, model=own.name)
    prepared = prepare(plan, load_inputs(plan, task, own))
    display.say(from_data(plan, prepared.plan))
    plan = prepared.plan
    if plan.spec.guarantee in UNPROVED:
        display.say(UNPROVED[plan.spec.guarantee])

    with nullcontext() if folder is None else run_folder.held(folder, overwrite):
        state = begun = None
        if folder is not None:
            if overwrite:
                run_folder.discard(folder)
            saved_record = run_folder.finished_result(folder, plan)
            if saved_record is not None:
                refuse_other_epoch(saved_record, select, folder)
                if weights:
                    weights_of(folder, saved_record)  # refuses weights that are missing or damaged
                doubt = "" if task is None else " (perhaps of other data: none are kept to compare)"
                display.say(
                    f"{folder} already holds this plan's result{doubt}; --overwrite runs it again"
                )
                enter_past(book, saved_record, register(book, prepared.inputs))
                return TrainedRun(saved_record, folder)
            state = run_folder.load_state(folder, plan)
            begun = state or run_folder.load_seed(folder, plan)
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
        model = build_model(run.prepared, seed, torch.device("cpu") if on_ray else None)
        # Workers may have other devices than this process; they look at a saved state themselves.
        device = "workers" if on_ray else next(model.parameters()).device.type
        if begun is not None and not (on_ray and state is not None):
            refuse_other_device(begun, plan.trained_part, device)
        if folder is not None:
            run_folder.ask_for_room(folder, model, plan, weights)
            run_folder.keep_seed(folder, plan, seed, seed_known, device)
        where = "" if folder is None else str(folder.resolve())
        charge = charged(book, run, where=where, resumed=begun is not None, mark=mark)
        keeper = Keeper(run, display, folder, save_every, mark)
        events: Generator[Event] = run_events(run, model)
        if on_ray:
            events = ray_events(run, model, workers, cpus_per_worker, gpus_per_worker, address)
        with closing(events):
            record = follow(events, charge, display(run, plan.method), keeper).record
        if folder is not None:
            run_folder.write_result(folder, record, model if weights else None, plan)
        answers = predictor_of(plan, prepared.inputs.label_names, model, own)
        return TrainedRun(record, folder, answers)


def ray_events(run: Run, model: Classifier, workers: int, *rest: Any) -> Generator[Event]:
    """As `run_events`, on Ray: the one place where this room asks one above it."""
    from dpfp_ray.sweeps.cluster import RayOptions, connected, settings

    cpus, gpus, address = rest
    options = RayOptions(address, workers, cpus, gpus)
    if options.address.startswith("ray://"):
        raise UserError(
            "the workers of one run cannot be followed through Ray Client; use dpfp submit, or "
            "--address auto on a machine of the cluster"
        )
    with settings(), connected(options.address):
        from dpfp_ray.sweeps.workers import group_events

        yield from group_events(run, model, options)


def follow(
    events: Iterator[Event], charged: AbstractContextManager[Charge], shown: Silent, keeper: Keeper
) -> Finished:
    """The last of `events`; each of them is charged, shown and saved as it comes."""
    with charged as charge, shown, keeper.on_signals():
        for event in events:
            charge.count(event)
            shown.show(event)
            keeper.follow(event)
    assert isinstance(event, Finished)
    event.record["ledger_entry"] = charge.entry_id
    return event


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
    there = saved.get("select", "last")  # a state of one release has none
    if there != select:
        raise UserError(f"{folder} holds a run with --select {there}, this is {select}; {EXIT}")


def refuse_other_data(state: State, mark: str | None, folder: Path | None) -> None:
    """Files tell by their times (`refuse_changed_files`), what is in memory by its mark."""
    if mark is not None and state.get("data_mark") != mark:
        other = "on other data, or from another encoder"
        raise UserError(f"{folder} holds an unfinished run {other}; {EXIT}")
