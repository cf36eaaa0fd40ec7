"""The training loop: one process's view of a run, the same on a laptop and on a cluster.

It knows neither Ray nor files. What it needs from outside comes in as arguments: the secret seed,
how workers add up (`Comm`), and who listens (`Reporter`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpfp_ray.data import Table, content_hash
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.data.split import Units
from dpfp_ray.methods.parts.base import Rows, make_method
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import keyed_integer, make_sampler, run_seed
from dpfp_ray.privacy.spending import Spending
from dpfp_ray.training.dev_scores import Select, best_epoch
from dpfp_ray.training.evaluate import evaluate
from dpfp_ray.training.learning_checks import LEAST_RATE, PROBE_ROWS, Still, check_all_learn
from dpfp_ray.training.machine import Comm, share

State = dict[str, Any]
# What a run's draws and noise are keyed by: 2 is `run_seed` of plan and records, 3 of the initial
# weights, too. Unfinished runs are continued as they began; those without the mark are of the
# version that used the seed as it is.
KEYING = 3


class Reporter(Protocol):
    """Who listens to a run. `checkpoint()` gives the state to resume from, when it is asked for."""

    def step(
        self, done: int, loss: Callable[[], float | None], checkpoint: Callable[[], State]
    ) -> None:
        """After every step; `loss()` is the mean loss of a row (of a person, if those are drawn)
        since the last epoch's end: None if there was none, or if it is not to be shown."""
        ...

    def epoch(self, record: dict[str, Any], checkpoint: Callable[[], State]) -> None:
        """After every epoch, with that epoch's entry of the history."""
        ...


@dataclass
class Data:
    """The task as tables; `dev` maps a split's name to its table."""

    train: Table
    dev: dict[str, Table]


@dataclass
class Progress:
    """What a resumed run must not forget, besides the weights."""

    step: int = 0
    rows: int = 0
    noise_coordinates: int = 0
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def train(
    plan: Plan,
    noise_multiplier: float,
    model: Classifier,
    data: Data,
    *,
    seed: int,
    comm: Comm,
    reporter: Reporter,
    state: State | None = None,
    show_training_loss: bool = False,
    select: Select = "last",
) -> Progress:
    """Train `model` in place from the start, or from `state`, to the last step of `plan`.

    It ends with the weights of the last epoch, or with `select` those of the best on dev.

    The training loss of a private run is computed from private records without noise: it leaves
    this function only if `show_training_loss` asks for it.
    """
    device = next(model.parameters()).device
    shows_loss = show_training_loss or not plan.private
    keying = KEYING if state is None else state.get("keying", 1)
    if keying >= 2:
        content = data.train.content()
        if keying >= 3:  # a plan names an encoder, and other weights can have the same name
            content += f" {weights_hash(model)}"
        seed = run_seed(seed, plan, noise_multiplier, content)
    sampler = make_sampler(plan, seed)
    method = make_method(plan, model, noise_multiplier * plan.C, seed)
    assert plan.learning_rate is not None
    assert plan.weight_decay is not None
    optimizer = torch.optim.AdamW(
        method.parameters, lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=True
    )
    spending = Spending(plan, noise_multiplier)
    lengths, units = data.train.lengths, Units(data.train)
    progress = Progress()
    epoch_ends = plan.epoch_ends()
    best: dict[str, Tensor] = {}  # the weights of the best epoch so far, if they are asked for
    loss_sum, loss_rows = torch.zeros((), dtype=torch.float64, device=device), 0

    if state is not None:
        refuse_other_weights(state, model)
        progress, loss_rows = Progress(**state["progress"]), state["loss_rows"]
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        loss_sum += state["loss_sum"]
        best = state.get("best", {})
    progress.noise_coordinates = method.noise_coordinates

    def checkpoint() -> State:
        return {
            "plan_hash": plan.hash,
            "noise_multiplier": noise_multiplier,
            "epsilon": spending.spent(progress.step),
            "keying": keying,
            "progress": vars(progress).copy(),
            "loss_sum": loss_sum.item() if shows_loss else 0.0,
            "loss_rows": loss_rows if shows_loss else 0,
            "model": {name: p.detach() for name, p in trainable_parameters(model)},
            "optimizer": optimizer.state_dict(),
            "select": select,
            "best": best,
        }

    def mean_loss() -> float | None:
        return loss_sum.item() / loss_rows if shows_loss and loss_rows else None

    still = Still(model) if progress.step == 0 and plan.learning_rate > LEAST_RATE else None
    if progress.step == 0 and (public := [table for table in data.dev.values() if len(table)]):
        rows = np.arange(min(PROBE_ROWS, len(public[0])))
        check_all_learn(method, take(public[0], rows, rows, device))
    model.train()
    while progress.step < plan.steps:
        started = time.perf_counter()
        step = progress.step
        drawn = sampler.draw(step)
        records, owners = units.expand(drawn)
        method.begin(step, len(records))
        mine = np.arange(len(records))[whole_units(share(len(drawn), comm), owners)]
        optimizer.zero_grad(set_to_none=True)
        step_loss = torch.zeros((), dtype=torch.float64, device=device)
        for number, part in enumerate(
            split_rows(
                lengths[records[mine]],
                method.max_rows,
                PART_COST[device.type],
                None if owners is None else owners[mine],
            )
        ):
            if plan.dropout:
                torch.manual_seed(keyed_integer(seed, f"dropout {comm.rank} {number}", step))
            step_loss += method.backward(take(data.train, records, mine[part], device, owners))
        comm.sum_([*method.gradients(), step_loss])
        method.finish(step)
        set_learning_rate(optimizer, plan, step)
        optimizer.step()
        if still and len(records) and still.all_moved():
            still = None

        loss_sum += step_loss
        loss_rows += len(drawn)
        progress.rows += len(records)
        progress.step += 1
        progress.train_seconds += time.perf_counter() - started
        if progress.step in epoch_ends:
            started = time.perf_counter()
            scores = {
                name: evaluate(model, table, comm, plan.precision)
                for name, table in data.dev.items()
            }
            progress.eval_seconds += time.perf_counter() - started
            record = {
                "epoch": epoch_ends.index(progress.step) + 1,
                "step": progress.step,
                "train_loss": mean_loss(),
                "dev": scores,
                "epsilon": spending.spent(progress.step),
                "train_seconds": progress.train_seconds,
            }
            progress.history.append(record)
            if select == "best" and best_epoch(progress.history) is record:
                best = {name: p.detach().clone() for name, p in trainable_parameters(model)}
            loss_sum.zero_()
            loss_rows = 0
            reporter.epoch(record, checkpoint)
        reporter.step(progress.step, mean_loss, checkpoint)
    model.load_state_dict(best, strict=False)
    return progress


def weights_hash(model: Classifier) -> str:
    """Of all weights, frozen ones included; they are public before the first step."""
    weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    return content_hash({name: p.view(torch.uint8).numpy() for name, p in weights.items()})


def take(
    table: Table,
    records: "np.ndarray[Any, Any]",
    positions: "np.ndarray[Any, Any]",
    device: torch.device,
    owners: "np.ndarray[Any, Any] | None" = None,
) -> Rows:
    """The rows at `positions` of a step's `records`, padded together, on `device`."""
    chosen = records[positions]
    example = None
    if owners is not None:
        numbers = np.unique(owners[positions], return_inverse=True)[1]
        example = move(torch.from_numpy(numbers.astype(np.int64)), device)
    return Rows(
        positions,
        {name: move(tensor, device) for name, tensor in table.collate(chosen).items()},
        move(torch.from_numpy(np.asarray(table.labels[chosen])), device),
        example,
    )


def whole_units(part: slice, owners: "np.ndarray[Any, Any] | None") -> slice:
    """The rows of the units in `part`: those of a unit lie side by side."""
    if owners is None:
        return part
    return slice(*np.searchsorted(owners, [part.start, part.stop]))


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """To a GPU through pinned memory, so that the copy overlaps with the previous part's work."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def refuse_other_weights(state: State, model: Classifier) -> None:
    """A state that leaves some weights as they were would train another model without a word."""
    saved = {name: tensor.shape for name, tensor in state["model"].items()}
    wanted = {name: p.shape for name, p in trainable_parameters(model)}
    if saved != wanted:
        wrong = sorted(set(saved.items()) ^ set(wanted.items()))[0][0]
        raise UserError(
            f"the saved state does not fit the model at {wrong!r}; is the encoder still the one "
            f"that the run began with? --overwrite starts again"
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, plan: Plan, step: int) -> None:
    left = 1 - step / plan.steps if plan.schedule == "linear" else 1.0
    for group in optimizer.param_groups:
        group["lr"] = (plan.learning_rate or 0.0) * left
