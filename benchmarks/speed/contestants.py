"""Contestants that take the ordinary steps of the loop, each on the same rows in the same round."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from dpfp_ray.methods.parts.base import make_method
from dpfp_ray.models.activations import with_activations
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.sampling import ShuffleSampler
from dpfp_ray.training.machine import Comm, SoloComm, keep_freed_memory
from dpfp_ray.training.prepare import Prepared, build_model, prepare
from dpfp_ray.training.step import Steps, make_optimizer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Where:
    """The rows that are trained on, and how long a bar may take."""

    data_dir: str | None = None
    quick: bool = False

    @property
    def rows(self) -> str:
        return "SST-2" if self.data_dir else "the demo's sentences (no SST-2 at hand)"

    def values(self, batch_size: int, records: int, **more: Any) -> dict[str, Any]:
        """Of a plan on a part of the rows."""
        task = {"task": "sst2", "data_dir": self.data_dir} if self.data_dir else {"task": "demo"}
        size = {"batch_size": batch_size, "max_train": records, "max_dev": 64, "epochs": 3}
        return {"model": "minilm", **task, **size, **more}


class Ours:
    """`name` is a method with its scope: dpsgd, dpsgd:bias, dpsgd:top:2, non_private."""

    def __init__(
        self,
        name: str,
        where: Where,
        batch_size: int,
        records: int = 2000,
        comm: Comm | None = None,
        **more: Any,
    ) -> None:
        keep_freed_memory()  # as the loop does; rivals in this process gain from it, too
        method, _, scope = name.partition(":")
        values = where.values(batch_size, records, method=method, scope=scope or "all", **more)
        self.prepared: Prepared = prepare(make_plan(values))
        plan = self.plan = self.prepared.plan
        self.model = build_model(self.prepared, 0, CPU)
        started = time.perf_counter()
        self.table = with_activations(self.prepared.data.train, self.model, plan)
        self.once = time.perf_counter() - started  # the outputs of frozen layers
        sigma = self.prepared.noise_multiplier * plan.C
        self.method = make_method(plan, self.model, sigma, seed=0)
        self.optimizer = make_optimizer(plan, self.method)
        sampler = same_rows(self.prepared)
        comm = comm or SoloComm()
        self.steps = Steps(plan, self.method, self.optimizer, self.table, sampler, comm, seed=0)
        self.model.train()

    def __call__(self, number: int) -> float | None:
        # The same records for all, but the learning rate of a step within the plan.
        self.steps.take(number % self.plan.steps)
        return None  # the time of all of it counts


def same_rows(prepared: Prepared) -> ShuffleSampler:
    """Batches of exactly B, the same for every method."""
    return ShuffleSampler(prepared.plan.D, prepared.plan.B, seed=1)
