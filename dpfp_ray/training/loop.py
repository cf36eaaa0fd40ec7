"""The training loop: one process's view of a run, the same on a laptop and on a cluster.

`train_steps` (and `make_release`, for methods of one release) yields events. The caller saves,
charges, watches and shows. The loop knows neither Ray nor files; `Comm` says how workers add up.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dpfp_ray.data import Table, content_hash
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.methods.parts.base import make_method
from dpfp_ray.methods.parts.one_release import (
    ClassStatistics,
    LinearHead,
    bounded_rows,
    choose_ridge,
    discriminant,
    release_id,
)
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import Spending
from dpfp_ray.privacy.sampling import keyed_generator, make_sampler, run_seed
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.contest import Contest
from dpfp_ray.training.dev_scores import ANSWERS, best_epoch, measure, pack
from dpfp_ray.training.machine import Comm, await_device, keep_freed_memory, share
from dpfp_ray.training.prepare import Data, Run, put_head
from dpfp_ray.training.record import Record
from dpfp_ray.training.step import (
    LEAST_RATE,
    PROBE_ROWS,
    Steps,
    Still,
    check_all_learn,
    make_optimizer,
    take,
)

State = dict[str, Any]
Scores = dict[str, dict[str, Any]]  # by dev set
# How a run's draws and noise follow from its seed. Raised when that changes: an unfinished run of
# another number would go on with noise that its repeated steps did not have.
KEYING = 4
EVAL_ROWS = 256


@dataclass
class Progress:
    """What a resumed run must not forget, besides the weights."""

    step: int = 0
    rows: int = 0
    noise_coordinates: int = 0
    fits: dict[str, int] = field(default_factory=dict)  # of a step in memory at once
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    claim: dict[str, Any] = field(default_factory=dict)  # of another library's steps, at the end


@dataclass(frozen=True)
class Drawing:
    """The set-up is complete. What comes next uses private records, and must be paid for.

    `ahead` is how many steps may have been drawn, at most, beyond the last `Step` that was seen.
    """

    ahead: int = 1


@dataclass(frozen=True)
class Released:
    """A method of one release has made its release: what an auditor may look at."""

    release: Any


@dataclass(frozen=True)
class Epoch:
    """An epoch has ended; the `Step` of its last step follows. `record` is its history entry."""

    record: dict[str, Any]
    progress: Progress
    checkpoint: Callable[[], State]


@dataclass(frozen=True)
class Step:
    """`done` steps are done. Until the next event, `checkpoint()` gives the state to resume from.

    `loss()` is the mean loss of a row (of a person, if persons are drawn) since the last epoch's
    end: None if there was no row, or if it is not to be shown.
    """

    done: int
    loss: Callable[[], float | None]
    checkpoint: Callable[[], State]


@dataclass(frozen=True)
class Finished:
    record: Record


Event = Drawing | Released | Epoch | Step | Finished
Training = Generator[Event, None, Progress]


def train_steps(run: Run, model: Classifier, data: Data, comm: Comm) -> Training:
    """Train `model` in place, from the start or from `run.state`, to the last step of the plan.

    It ends with the weights of the last epoch, or of the best on dev, as `run.select` says.
    """
    plan, noise_multiplier, state = run.plan.trained_part, run.prepared.noise_multiplier, run.state
    device = next(model.parameters()).device
    if device.type == "cpu":
        keep_freed_memory()
    shows_loss = run.show_training_loss or not plan.private
    # A plan names an encoder, and other weights can have the same name.
    content = f"{data.train.content()} {weights_hash(model)}"
    if plan.gradient_checkpointing:
        model.recompute_layers()
    seed = run_seed(run.seed, plan, noise_multiplier, content)
    steps = make_steps(plan, noise_multiplier, model, data.train, comm, seed)
    spending = Spending(run.plan, noise_multiplier)
    progress = Progress()
    epoch_ends = plan.epoch_ends()
    best: dict[str, Tensor] = {}  # the weights of the best epoch so far, if they are asked for
    loss_sum, loss_rows = torch.zeros((), dtype=torch.float64, device=device), 0

    if state is not None:
        refuse_other_weights(state, model)
        refuse_other_device(state, plan, device.type)
        progress, loss_rows = Progress(**state["progress"]), state["loss_rows"]
        model.load_state_dict(state["model"], strict=False)
        steps.load_state(state["optimizer"])
        steps.keep_to(progress.fits)
        loss_sum += state["loss_sum"]
        best = state.get("best", {})
    progress.noise_coordinates = steps.noise_coordinates

    def checkpoint() -> State:
        return {
            **resume_facts(run, progress, spending.spent(progress.step)),
            "device": device.type,
            "loss_sum": loss_sum.item() if shows_loss else 0.0,
            "loss_rows": loss_rows if shows_loss else 0,
            "model": {name: p.detach() for name, p in trainable_parameters(model)},
            "optimizer": steps.state(),
            "select": run.select,
            "best": best,
        }

    def mean_loss() -> float | None:
        return loss_sum.item() / loss_rows if shows_loss and loss_rows else None

    fast = (plan.learning_rate or 0.0) > LEAST_RATE
    still = Still(model) if progress.step == 0 and fast else None
    if progress.step == 0 and (public := [table for table in data.dev.values() if len(table)]):
        rows = np.arange(min(PROBE_ROWS, len(public[0])))
        check_all_learn(steps.learner, take(public[0], rows, rows, device))
    model.train()
    if progress.step < plan.steps:
        yield Drawing()
    while progress.step < plan.steps:
        started = time.perf_counter()
        taken = steps.take(progress.step)
        if still and taken.rows and still.all_moved():
            still = None

        progress.fits = steps.fits()
        loss_sum += taken.loss
        loss_rows += taken.units
        progress.rows += taken.rows
        progress.step += 1
        if progress.step in epoch_ends:
            await_device(device)
        progress.train_seconds += time.perf_counter() - started
        if progress.step in epoch_ends:
            record = {
                "epoch": epoch_ends.index(progress.step) + 1,
                "step": progress.step,
                "train_loss": mean_loss(),
                "dev": score_dev(model, data, comm, plan, progress),
                "epsilon": spending.spent(progress.step),
                "train_seconds": progress.train_seconds,
            }
            progress.history.append(record)
            if run.select == "best" and best_epoch(progress.history) is record:
                best = {name: p.detach().clone() for name, p in trainable_parameters(model)}
            loss_sum.zero_()
            loss_rows = 0
            yield Epoch(record, progress, checkpoint)
        yield Step(progress.step, mean_loss, checkpoint)
    progress.claim = steps.claim()
    steps.close()
    model.load_state_dict(best, strict=False)
    return progress


def make_steps(
    plan: Plan, noise_multiplier: float, model: Classifier, table: Table, comm: Comm, seed: int
) -> Steps | Contest:
    """Ours, or those of the library that the plan's method is made by; `seed` is the run's own."""
    if plan.spec.by_library:
        return Contest(plan, noise_multiplier, model, table, comm, seed)
    method = make_method(plan, model, noise_multiplier * plan.C, seed)
    sampler = make_sampler(plan, seed)
    return Steps(plan, method, make_optimizer(plan, method), table, sampler, comm, seed)


def score_dev(model: Classifier, data: Data, comm: Comm, plan: Plan, progress: Progress) -> Scores:
    started = time.perf_counter()
    scores = {name: evaluate(model, dev, comm, plan.precision) for name, dev in data.dev.items()}
    progress.eval_seconds += time.perf_counter() - started
    return scores


@torch.no_grad()
def evaluate(
    model: Classifier, table: Table, comm: Comm, precision: str = "fp32"
) -> dict[str, Any]:
    """`record.Scores` and every row's answer, packed.

    Without noise and, as the paper evaluates, without clipping; heads that were solved for bounded
    rows (`release_once`, `moments`) get bounded rows here too. Each worker takes its share of the
    rows; all end with the same scores.
    """
    device = next(model.parameters()).device
    rows = np.arange(len(table))[share(len(table), comm)]
    # On the device: NCCL cannot add up what lies in the CPU's memory. Others' rows stay 0.
    loss = torch.zeros((), dtype=torch.float64, device=device)
    answers = torch.zeros(len(table), dtype=torch.float64, device=device)
    probabilities = torch.zeros(len(table), model.classes, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    for part in split_rows(table.lengths[rows], EVAL_ROWS, PART_COST[device.type]):
        labels = torch.from_numpy(np.asarray(table.labels[rows[part]])).to(device)
        # In fp32: bf16's 8 bits would make ties of close scores.
        logits = model.classify(model.represent_rows(table, rows[part], precision))
        where = torch.from_numpy(rows[part]).to(device)
        answers[where] = logits.argmax(1).double()
        probabilities[where] = logits.double().softmax(1)
        loss += functional.cross_entropy(logits, labels, reduction="sum")
    model.train(was_training)
    comm.sum_([loss, answers, probabilities])
    answered, shares = answers.cpu().numpy().astype(np.int64), probabilities.cpu().numpy()
    # A model that has diverged still has answers, but no probabilities.
    sound = shares if np.isfinite(shares).all() else None
    metrics = measure(answered, table.labels, classes=model.classes, probabilities=sound)
    return {**metrics, ANSWERS: pack(answered, model.classes), "loss": loss.item() / len(table)}


def resume_facts(run: Run, progress: Progress, spent: dict[str, float | None]) -> State:
    """What every saved state holds, besides weights; not the seed."""
    return {
        "plan_hash": run.plan.hash,
        "noise_multiplier": run.prepared.noise_multiplier,
        "epsilon": spent,
        "keying": KEYING,
        "progress": vars(progress).copy(),
    }


def weights_hash(model: Classifier) -> str:
    """Of all weights, frozen ones included; they are public before the first step."""
    weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    return content_hash({name: p.view(torch.uint8).numpy() for name, p in weights.items()})


def refuse_other_weights(state: State, model: Classifier) -> None:
    """A state that leaves some weights as they were would train another model without a word."""
    saved = {(name, tensor.shape) for name, tensor in state["model"].items()}
    wanted = {(name, p.shape) for name, p in trainable_parameters(model)}
    if saved != wanted:
        wrong = min(saved ^ wanted)[0]
        raise UserError(
            f"the saved state does not fit the model at {wrong!r}; is the encoder still the one "
            f"that the run began with? --overwrite starts again"
        )


def refuse_other_device(state: State, plan: Plan, device: str) -> None:
    """GPUs make other noise of a seed than CPUs do: repeated steps would be released twice."""
    begun = state.get("device", "cpu")
    if plan.private and not plan.one_release and begun != device:
        raise UserError(
            f"the unfinished run was begun on device {begun}, and this is {device}, which "
            f"makes other noise of the same seed; finish it on {begun}, or start again with "
            f"--overwrite (the ledger keeps what was spent)"
        )


def make_release(run: Run, model: Classifier, data: Data, comm: Comm) -> Training:
    """The counterpart of `train_steps` for methods of one release: release, solve, evaluate.

    Every worker makes the same release from the same seed; only the evaluation is shared out.
    A resumed run does it all again, with the same result.
    """
    started = time.perf_counter()
    plan, noise_multiplier, table = run.plan, run.prepared.noise_multiplier, data.train
    assert isinstance(table, RepresentationTable), "these methods read cached representations"
    method = plan.spec.one_release
    assert method is not None, "methods that train in steps have a loop"
    if plan.spec.reads_records:
        yield Drawing()
    release = method.release(plan, noise_multiplier, table, model.classes, run.seed)
    yield Released(release)
    ridge: float | None = None
    if method.head:
        head = method.head(release)
    else:
        name = release_id(plan, noise_multiplier, table, run.seed)
        head, ridge = solve(plan, release, data, keyed_generator(run.seed, f"ridge {name}", 0))
    put_head(model, head, plan.C)
    progress = Progress(
        step=1,
        rows=len(table),
        noise_coordinates=method.coordinates(model.width, model.classes),
        train_seconds=time.perf_counter() - started,
    )
    record: dict[str, Any] = {
        "epoch": 1,
        "step": 1,
        "train_loss": None,  # a loss on private rows would be a second, unpaid look at them
        "dev": score_dev(model, data, comm, plan, progress),
        "epsilon": Spending(plan, noise_multiplier).spent(1),
        "train_seconds": progress.train_seconds,
    }
    if plan.ridge == "auto":
        record["ridge"] = ridge
    progress.history.append(record)

    def checkpoint() -> State:
        weights = {name: p.detach() for name, p in model.head.named_parameters("head")}
        return {**resume_facts(run, progress, record["epsilon"]), "model": weights}

    yield Epoch(record, progress, checkpoint)
    yield Step(1, lambda: None, checkpoint)
    return progress


def solve(
    plan: Plan, statistics: ClassStatistics, data: Data, rng: np.random.Generator
) -> tuple[LinearHead, float]:
    """The head that class statistics give, by the plan's shrinkage and prior, and its ridge.

    `rng` is for choosing a ridge (`ridge: auto`); it has nothing to do with the records.
    """
    assert plan.shrinkage is not None
    public: NDArray[np.float64] | None = None
    if plan.prior == "dev":  # the plan counts dev rows as public; their labels play no part
        tables = [table for table in data.dev.values() if isinstance(table, RepresentationTable)]
        rows = np.concatenate([u for table in tables for u, _ in bounded_rows(table, plan)])
        centred = rows - rows.mean(0)
        public = centred.T @ centred / len(rows)
    if isinstance(plan.ridge, float):
        ridge = plan.ridge
    else:
        ridge = choose_ridge(statistics, plan.shrinkage, rng, public)
    return discriminant(statistics, ridge, plan.shrinkage, public), ridge
