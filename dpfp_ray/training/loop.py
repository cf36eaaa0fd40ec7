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
from dpfp_ray.methods.parts.base import make_method
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import make_sampler, run_seed
from dpfp_ray.privacy.spending import Spending
from dpfp_ray.training.dev_scores import Select, best_epoch
from dpfp_ray.training.evaluate import evaluate
from dpfp_ray.training.learning_checks import LEAST_RATE, PROBE_ROWS, Still, check_all_learn
from dpfp_ray.training.machine import Comm, keep_freed_memory
from dpfp_ray.training.step import Steps, make_optimizer, take

State = dict[str, Any]
# How a run's draws and noise follow from its seed. Raised when that changes: an unfinished run of
# another number would go on with noise that its repeated steps did not have.
KEYING = 4


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
    before_draws: Callable[[], None] = lambda: None,
) -> Progress:
    """Train `model` in place from the start, or from `state`, to the last step of `plan`.

    It ends with the weights of the last epoch, or with `select` those of the best on dev.
    `before_draws` is called once, when all is set up and the first batch is about to be drawn.

    The training loss of a private run is computed from private records without noise: it leaves
    this function only if `show_training_loss` asks for it.
    """
    device = next(model.parameters()).device
    if device.type == "cpu":
        keep_freed_memory()
    shows_loss = show_training_loss or not plan.private
    # A plan names an encoder, and other weights can have the same name.
    content = f"{data.train.content()} {weights_hash(model)}"
    seed = run_seed(seed, plan, noise_multiplier, content)
    sampler = make_sampler(plan, seed)
    method = make_method(plan, model, noise_multiplier * plan.C, seed)
    optimizer = make_optimizer(plan, method)
    steps = Steps(plan, method, optimizer, data.train, sampler, comm, seed)
    spending = Spending(plan, noise_multiplier)
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
            "keying": KEYING,
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

    fast = (plan.learning_rate or 0.0) > LEAST_RATE
    still = Still(model) if progress.step == 0 and fast else None
    if progress.step == 0 and (public := [table for table in data.dev.values() if len(table)]):
        rows = np.arange(min(PROBE_ROWS, len(public[0])))
        check_all_learn(method, take(public[0], rows, rows, device))
    model.train()
    if progress.step < plan.steps:
        before_draws()
    while progress.step < plan.steps:
        started = time.perf_counter()
        taken = steps.take(progress.step)
        if still and taken.rows and still.all_moved():
            still = None

        loss_sum += taken.loss
        loss_rows += taken.units
        progress.rows += taken.rows
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
