"""Search spaces: YAML that says what is varied, what is fixed, and the one budget of all trials.

    name: my-sweep
    method: grid | random | tpe             # how trials are chosen
    metric: {name: accuracy, goal: maximize}  # a list of two for tpe with two objectives
    samples: 16                             # random, tpe: how many trials
    seeds: 1                                # repetitions of each trial (grid, random)
    scheduler: none | asha                  # asha stops poor trials after an epoch
    budget: {epsilon: 3, accountant: pld}   # the same for every trial
    plan: {task: demo, method: dpfp}        # fixed fields of the plan
    parameters:                             # varied fields of the plan
      batch_size: {values: [16, 32, 64]}
      learning_rate: {distribution: log_uniform, min: 1e-6, max: 1e-3}
      rows_per_micro_batch: {distribution: power_of_two, min: 1, max: 32}

`rows_per_micro_batch` stands for B/M: M is derived from it, so every trial is valid. Values of a
parameter may also be mappings of several plan fields at once, for settings that belong together.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from dpfp_ray.plan.method_spec import DEFAULT_METHOD, is_private, uses
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.system.errors import UserError

BUDGET_KEYS = ("epsilon", "delta", "accountant", "adjacency")
# Stands for B/M; see above.
DERIVED = "rows_per_micro_batch"


@dataclass(frozen=True)
class Parameter:
    """One varied field: either `values`, or a distribution between `low` and `high`."""

    name: str
    values: tuple[Any, ...] = ()
    distribution: str = ""
    low: float = 0.0
    high: float = 0.0

    @property
    def grouped(self) -> bool:
        """Whether its values are mappings of several fields at once."""
        return any(isinstance(value, dict) for value in self.values)

    def draw(self, rng: np.random.Generator) -> Any:
        """One value, as random search draws it."""
        if self.values:
            return self.values[int(rng.integers(len(self.values)))]
        if self.distribution == "uniform":
            return float(rng.uniform(self.low, self.high))
        if self.distribution == "log_uniform":
            return float(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        if self.distribution == "int_uniform":
            return int(rng.integers(int(self.low), int(self.high) + 1))
        return 2 ** int(rng.integers(int(math.log2(self.low)), int(math.log2(self.high)) + 1))

    def for_optuna(self) -> tuple[str, Any]:
        """The name and distribution under which Optuna knows it: an index into `values`, an
        exponent of two, or the number itself."""
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )

        if self.values:
            return self.name, CategoricalDistribution(list(range(len(self.values))))
        if self.distribution in ("uniform", "log_uniform"):
            log = self.distribution == "log_uniform"
            return self.name, FloatDistribution(self.low, self.high, log=log)
        if self.distribution == "int_uniform":
            return self.name, IntDistribution(int(self.low), int(self.high))
        low, high = int(math.log2(self.low)), int(math.log2(self.high))
        return f"log2_{self.name}", IntDistribution(low, high)

    def from_optuna(self, params: dict[str, Any]) -> Any:
        """The plan's value for what Optuna has suggested."""
        if self.values:
            return self.values[params[self.name]]
        if self.distribution == "power_of_two":
            return 2 ** int(params[f"log2_{self.name}"])
        return params[self.name]


def whole_number(name: str, value: Any) -> int:
    try:
        if 1 <= (number := float(value)) < math.inf:
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"{name} is {value!r}; give a whole number of 1 or more")


@dataclass(frozen=True)
class SearchSpace:
    name: str
    search: str
    metrics: tuple[tuple[str, str], ...]
    samples: int
    seeds: int
    scheduler: str
    fixed: dict[str, Any]
    parameters: tuple[Parameter, ...]

    @property
    def key(self) -> str:
        """Names what is searched, whatever the number of samples."""
        facts = [self.search, self.metrics, self.fixed, [astuple(p) for p in self.parameters]]
        return blake2b(repr(facts).encode(), digest_size=6).hexdigest()

    @property
    def varied(self) -> list[str]:
        """Plan fields that differ between trials, for tables."""
        names: list[str] = []
        for parameter in self.parameters:
            if parameter.grouped:
                names += [key for value in parameter.values for key in value]
            else:
                names.append("micro_batches" if parameter.name == DERIVED else parameter.name)
        return list(dict.fromkeys(names))

    def plan_values(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """A plan's fields from the fixed ones and one choice of the varied ones."""
        values = dict(self.fixed)
        rows = None
        for name, value in chosen.items():
            if name == DERIVED:
                rows = whole_number(name, value)
            elif isinstance(value, dict):
                values.update(value)
            else:
                values[name] = value
        if not is_private(values.get("method", DEFAULT_METHOD)):
            for key in BUDGET_KEYS:
                values.pop(key, None)
        if rows is not None and uses(values.get("method", DEFAULT_METHOD), "micro_batches"):
            batch = values.get("batch_size") or make_plan(values).batch_size
            if batch is None:
                raise UserError(f"{DERIVED} needs a batch_size, fixed or varied")
            values["micro_batches"] = max(1, whole_number("batch_size", batch) // rows)
        return values

    def choices(self, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        """All grid points, or `samples` random ones."""
        if self.search == "grid":
            for combination in itertools.product(*(p.values for p in self.parameters)):
                yield dict(zip((p.name for p in self.parameters), combination, strict=True))
        else:
            for _ in range(self.samples):
                yield {parameter.name: parameter.draw(rng) for parameter in self.parameters}

    def some_plans(self, most: int = 200) -> list[Plan]:
        """Plans of some trials, to see what they are about; values that are no plan, which a sweep
        refuses, are left out."""
        plans = []
        for chosen in itertools.islice(self.choices(np.random.default_rng(0)), most):
            with suppress(UserError):
                plans.append(make_plan(self.plan_values(chosen)))
        return plans
