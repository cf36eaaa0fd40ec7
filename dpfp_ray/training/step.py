"""One step of training: draw, forward and backward part by part, sum, noise, optimizer.

A part that does not fit the memory is halved, and the step begins again: with the same draws and,
since noise comes after the sum, as if nothing had happened. Later steps keep the size that fits.

Before the first step, and in the first few: does every weight that should train also learn? A part
of an encoder that gets no gradient, or that the optimizer does not have, shows nowhere else: the
run would end with a score that is only a little lower.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dpfp_ray.data import Table
from dpfp_ray.data.batches import PART_COST, packed, parts_in_order, split_rows
from dpfp_ray.data.split import Units
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.methods.parts.base import Method, Rows
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.scopes import woken
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import Sampler, keyed_integer
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.machine import Comm, free_memory, share, token_budget

Indices = NDArray[Any]
PROBE_ROWS = 8  # dev rows that show whether all weights learn
LEAST_RATE = 1e-6  # AdamW moves a weight by about the rate: much below, rounding undoes it
PATIENCE = 3  # steps until every weight must have moved; LoRA's A waits for B, which starts at zero


@dataclass(frozen=True)
class Taken:
    loss: Tensor  # the sum over its rows, in fp64 on the device
    units: int  # records that were drawn, or persons
    rows: int


class Steps:
    """Takes the steps of a plan; the method's model and the optimizer change in place."""

    def __init__(
        self,
        plan: Plan,
        method: Method,
        optimizer: torch.optim.Optimizer,
        table: Table,
        sampler: Sampler,
        comm: Comm,
        seed: int,
    ) -> None:
        assert not (plan.private and plan.dropout), "masks depend on parts and workers"
        self.plan, self.method, self.optimizer = plan, method, optimizer
        self.table, self.sampler, self.comm, self.seed = table, sampler, comm, seed
        self.learner, self.noise_coordinates = method, method.noise_coordinates
        self.lengths, self.units = table.lengths, Units(table)
        self.packs = (
            method.takes_packed
            and method.model.packs
            and (method.device.type == "cpu" or method.gpu_takes_packed)
            and isinstance(table, TokenTable)
            and table.persons is None
        )
        # Most of a part in memory: rows and, on a GPU, tokens with their padding.
        self.rows, self.tokens = method.max_rows, token_budget(method.model, plan)
        self.halved = False
        self.part: Indices = np.arange(0)  # what is in memory, as places among a step's records

    def take(self, step: int) -> Taken:
        drawn = self.sampler.draw(step)
        records, owners = self.units.expand(drawn)
        while (loss := self.summed(step, records, owners, len(drawn))) is None:
            free_memory(self.method.device)  # here no traceback holds the part any more
        self.method.finish(step)
        set_learning_rate(self.optimizer, self.plan, step)
        self.optimizer.step()
        return Taken(loss, len(drawn), len(records))

    def summed(
        self, step: int, records: Indices, owners: Indices | None, units: int
    ) -> Tensor | None:
        """The step's loss, its gradients being summed over parts and workers; None if a part did
        not fit, and a smaller one may."""
        self.part = np.arange(0)
        try:
            return self.sum_parts(step, records, owners, units)
        except torch.OutOfMemoryError as error:
            self.halve(step, self.lengths[records], owners, str(error).splitlines()[0])
            return None

    def sum_parts(self, step: int, records: Indices, owners: Indices | None, units: int) -> Tensor:
        method, comm, device = self.method, self.comm, self.method.device
        self.optimizer.zero_grad(set_to_none=True)
        method.begin(step, len(records))
        own = share(units, comm)  # of the units, whose rows lie side by side
        if owners is not None:
            own = slice(*np.searchsorted(owners, [own.start, own.stop]))
        mine = np.arange(len(records))[own]
        loss = torch.zeros((), dtype=torch.float64, device=device)
        # A record that an audit left out has no token to pack; its step is padded.
        packs = self.packs and bool(self.lengths[records].all())
        parts = self.parts(records[mine], owners, mine, packs)
        for number, part in enumerate(parts):
            self.part = mine[part]
            if self.plan.dropout:
                torch.manual_seed(keyed_integer(self.seed, f"dropout {comm.rank} {number}", step))
            rows = take(self.table, records, mine[part], device, owners, packs)
            loss += method.backward(rows)
        self.part = mine[max(parts, key=len, default=np.arange(0))]
        method.add_noise_share(step, comm.rank, comm.world_size)
        comm.sum_([*method.gradients(), loss])
        return loss

    def halve(self, step: int, lengths: Indices, owners: Indices | None, said: str) -> None:
        """Later parts are at most half as large as the one that did not fit."""
        count = len(self.part)
        whole = count > 1 and owners is not None and len(np.unique(owners[self.part])) == 1
        if count < 2 or whole:
            what = f"a person's {count} rows do" if whole else "one row does"
            less = "max-per-user" if whole else "max-length"
            raise UserError(
                f"{what if count else 'the model does'} not fit the memory of {self.method.device} "
                f"({said}); use a smaller --{less}, a smaller model or a smaller --scope"
            )
        if self.tokens is None:
            self.rows = (count + 1) // 2
        else:
            self.tokens = (min(self.tokens, count * int(lengths[self.part].max())) + 1) // 2
        self.halved = True
        warnings.warn(
            f"out of memory at step {step + 1} with {count} rows at once: the step begins again, "
            f"and later ones keep to {self.fits()}",
            stacklevel=2,
        )

    def fits(self) -> dict[str, int]:
        """The most that a part of a step may have; empty on a CPU that never ran out of memory."""
        if self.tokens is not None:
            return {"tokens": self.tokens}
        return {"rows": self.rows} if self.halved else {}

    def keep_to(self, fits: dict[str, int]) -> None:
        """Begin with what an earlier process of this run has found to fit."""
        self.rows, self.halved = min(self.rows, fits.get("rows", self.rows)), "rows" in fits
        if self.tokens is not None:
            self.tokens = min(self.tokens, fits.get("tokens", self.tokens))

    def state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def claim(self) -> dict[str, Any]:
        return {}  # of other libraries' steps (`training/contest.py`)

    def close(self) -> None: ...

    def parts(
        self, records: Indices, owners: Indices | None, mine: Indices, packs: bool
    ) -> list[Indices]:
        most = self.rows
        if packs:
            return parts_in_order(self.lengths[records], most, self.tokens)
        cost, own = PART_COST[self.method.device.type], None if owners is None else owners[mine]
        return split_rows(self.lengths[records], most, cost, own, self.tokens)


def make_optimizer(plan: Plan, method: Method) -> torch.optim.Optimizer:
    assert plan.learning_rate is not None
    assert plan.weight_decay is not None
    return torch.optim.AdamW(
        method.parameters, lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=True
    )


def take(
    table: Table,
    records: Indices,
    positions: Indices,
    device: torch.device,
    owners: Indices | None = None,
    packs: bool = False,
) -> Rows:
    """The rows at `positions` of a step's `records`, padded together or packed, on `device`."""
    chosen = records[positions]
    batch = packed(cast(TokenTable, table), chosen) if packs else table.collate(chosen)
    example = None
    if owners is not None:
        numbers = np.unique(owners[positions], return_inverse=True)[1]
        example = move(torch.from_numpy(numbers.astype(np.int64)), device)
    return Rows(
        positions,
        {name: move(tensor, device) for name, tensor in batch.items()},
        move(torch.from_numpy(np.asarray(table.labels[chosen])), device),
        example,
    )


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """To a GPU through pinned memory, so that the copy overlaps with the previous part's work."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, plan: Plan, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = plan.learning_rate_at(step)


class Still:
    """Weights that should train and have not moved yet; after `PATIENCE` steps there may be none.

    A wrapper that trains copies, or an optimizer without some weights, shows nowhere else
    (opacus#820). Weights are looked at after the noise is in, so this tells no more than they do.
    """

    def __init__(self, model: Classifier) -> None:
        self.model, self.steps = model, 0
        self.start = {name: p.detach().clone() for name, p in trainable_parameters(model)}

    def all_moved(self) -> bool:
        self.steps += 1
        now = dict(self.model.named_parameters())
        self.start = {n: value for n, value in self.start.items() if torch.equal(now[n], value)}
        if self.start and self.steps == PATIENCE:
            raise cannot_learn(f"have not moved in {PATIENCE} steps", list(self.start))
        return not self.start


class Learner(Protocol):
    @property
    def model(self) -> Classifier: ...

    def represent(self, inputs: dict[str, Tensor]) -> Tensor: ...


def check_all_learn(method: Learner, probe: Rows) -> None:
    """Refuse to train when weights that should learn get nothing from the rows of `probe`.

    Those are of dev, which is public: whether a run starts must not tell of private rows.
    """
    model = method.model
    was_training = model.training
    model.eval()  # no dropout
    with woken(model):  # a matrix that starts at zero (LoRA's B) hides the ones below it
        logits = model.head(method.represent(probe.inputs))
        functional.cross_entropy(logits, probe.labels).backward()
    stuck = [name for name, p in trainable_parameters(model) if p.grad is None or not p.grad.any()]
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    if stuck:
        raise cannot_learn("got no gradient from the first rows and would never train", stuck)


def cannot_learn(why: str, names: list[str]) -> UserError:
    shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
    advice = "use another model or scope head"
    return UserError(f"{len(names)} trainable tensors {why}: {shown}; {advice}")
