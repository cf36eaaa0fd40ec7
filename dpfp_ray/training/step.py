"""One step of training: draw, forward and backward part by part, sum, noise, optimizer.

Before the first step, and in the first few: does every weight that should train also learn? A part
of an encoder that gets no gradient, or that the optimizer does not have, shows nowhere else: the
run would end with a score that is only a little lower.
"""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dpfp_ray.data import Table
from dpfp_ray.data.batches import PART_COST, packed, split_rows
from dpfp_ray.data.split import Units
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.methods.parts.base import Method, Rows
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.scopes import woken
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import Sampler, keyed_integer
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.machine import Comm, share

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

    def take(self, step: int) -> Taken:
        method, comm, device = self.method, self.comm, self.method.device
        drawn = self.sampler.draw(step)
        records, owners = self.units.expand(drawn)
        method.begin(step, len(records))
        own = share(len(drawn), comm)  # of the units, whose rows lie side by side
        if owners is not None:
            own = slice(*np.searchsorted(owners, [own.start, own.stop]))
        mine = np.arange(len(records))[own]
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        # A record that an audit left out has no token to pack; its step is padded.
        packs = self.packs and bool(self.lengths[records].all())
        for number, part in enumerate(self.parts(records[mine], owners, mine, packs)):
            if self.plan.dropout:
                torch.manual_seed(keyed_integer(self.seed, f"dropout {comm.rank} {number}", step))
            rows = take(self.table, records, mine[part], device, owners, packs)
            loss += method.backward(rows)
        method.add_noise_share(step, comm.rank, comm.world_size)
        comm.sum_([*method.gradients(), loss])
        method.finish(step)
        set_learning_rate(self.optimizer, self.plan, step)
        self.optimizer.step()
        return Taken(loss, len(drawn), len(records))

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
        most, count = self.method.max_rows, len(records)
        if packs:
            return [np.arange(i, min(i + most, count)) for i in range(0, count, most)]
        cost, own = PART_COST[self.method.device.type], None if owners is None else owners[mine]
        return split_rows(self.lengths[records], most, cost, own)


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
