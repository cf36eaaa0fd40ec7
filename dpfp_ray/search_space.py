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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfp_ray.errors import UserError
from dpfp_ray.plan import ALIASES, FIELDS, make_plan, read_plan_file, unknown

KEYS = ("name", "method", "metric", "samples", "seeds", "scheduler", "budget", "plan", "parameters")
SEARCHES = ("grid", "random", "tpe")
SCHEDULERS = ("none", "asha")
DISTRIBUTIONS = ("uniform", "log_uniform", "int_uniform", "power_of_two")
BUDGET_KEYS = ("epsilon", "delta", "accountant", "adjacency")
METRICS = ("accuracy", "train_seconds", "epsilon")
DERIVED = "rows_per_micro_batch"


@dataclass(frozen=True)
class Parameter:
    """One varied field: either `values`, or a distribution between `low` and `high`."""

    name: str
    values: tuple[Any, ...] = ()
    distribution: str = ""
    low: float = 0.0
    high: float = 0.0

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

    def suggest(self, trial: Any) -> Any:
        """One value, as an Optuna trial suggests it."""
        if self.values:
            index = trial.suggest_categorical(self.name, list(range(len(self.values))))
            return self.values[index]
        if self.distribution in ("uniform", "log_uniform"):
            log = self.distribution == "log_uniform"
            return trial.suggest_float(self.name, self.low, self.high, log=log)
        if self.distribution == "int_uniform":
            return trial.suggest_int(self.name, int(self.low), int(self.high))
        low, high = int(math.log2(self.low)), int(math.log2(self.high))
        return 2 ** trial.suggest_int(f"log2_{self.name}", low, high)


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
    def varied(self) -> list[str]:
        """Plan fields that differ between trials, for tables."""
        names: list[str] = []
        for parameter in self.parameters:
            if parameter.values and isinstance(parameter.values[0], dict):
                names += [key for key in parameter.values[0] if key not in names]
            else:
                names.append("micro_batches" if parameter.name == DERIVED else parameter.name)
        return names

    def plan_values(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """A plan's fields from the fixed ones and one choice of the varied ones."""
        values = dict(self.fixed)
        rows = None
        for name, value in chosen.items():
            if name == DERIVED:
                rows = int(value)
            elif isinstance(value, dict):
                values.update(value)
            else:
                values[name] = value
        if values.get("method") == "non_private":
            for key in BUDGET_KEYS:
                values.pop(key, None)
        if rows is not None:
            batch = values.get("batch_size") or make_plan(values).batch_size
            if batch is None:
                raise UserError(f"{DERIVED} needs a batch_size, fixed or varied")
            values["micro_batches"] = max(1, int(batch) // rows)
        return values

    def choices(self, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        """All grid points, or `samples` random ones."""
        if self.search == "grid":
            for combination in itertools.product(*(p.values for p in self.parameters)):
                yield dict(zip((p.name for p in self.parameters), combination, strict=True))
        else:
            for _ in range(self.samples):
                yield {parameter.name: parameter.draw(rng) for parameter in self.parameters}


def read_search_space(path: str | Path, changes: dict[str, str]) -> SearchSpace:
    """Parse and check a search space; `changes` are `--set key=value` on plan or top-level keys."""
    content = read_plan_file(path)
    where = str(path)
    for key in content:
        if key not in KEYS:
            raise UserError(f"{where}: {unknown('key', str(key), KEYS)}")
    fixed = {**_mapping(where, "plan", content), **_budget(where, content)}
    parameters = {p.name: p for p in _parameters(where, content)}
    top: dict[str, Any] = {
        key: content[key]
        for key in ("name", "method", "samples", "seeds", "scheduler")
        if key in content
    }
    for key, text in changes.items():
        name = ALIASES.get(key, key)
        if name in top or name in ("samples", "seeds", "scheduler", "search"):
            top["method" if name == "search" else name] = text
        elif name in FIELDS or name == DERIVED:
            parameters.pop(name, None)
            fixed[name] = text
        else:
            raise UserError(f"--set {key}: {unknown('key', key, tuple(FIELDS))}")
    search = str(top.get("method", "random"))
    if search not in SEARCHES:
        raise UserError(f"{where}: {unknown('method', search, SEARCHES)}")
    for parameter in parameters.values():
        if search == "grid" and not parameter.values:
            raise UserError(
                f"{where}: a grid needs values for {parameter.name}; give values: […], "
                "or method: random"
            )
        if parameter.name in fixed:
            raise UserError(f"{where}: {parameter.name} is both fixed and varied; drop one")
    scheduler = str(top.get("scheduler", "none"))
    if scheduler not in SCHEDULERS:
        raise UserError(f"{where}: {unknown('scheduler', scheduler, SCHEDULERS)}")
    metrics = _metrics(where, content.get("metric"))
    if len(metrics) > 1 and (search != "tpe" or scheduler != "none"):
        raise UserError(f"{where}: two metrics need method: tpe and scheduler: none")
    return SearchSpace(
        str(top.get("name", Path(path).stem)),
        search,
        metrics,
        _count(where, "samples", top.get("samples", 16)),
        _count(where, "seeds", top.get("seeds", 1)),
        scheduler,
        fixed,
        tuple(parameters.values()),
    )


def _mapping(where: str, key: str, content: dict[str, Any]) -> dict[str, Any]:
    found = content.get(key) or {}
    if not isinstance(found, dict):
        raise UserError(f"{where}: {key} must be a mapping, not {found!r}")
    clean: dict[str, Any] = {
        ALIASES.get(str(name), str(name)): value for name, value in found.items()
    }
    for name in clean:
        if name not in FIELDS:
            raise UserError(f"{where}: {key}: {unknown('key', str(name), tuple(FIELDS))}")
    return clean


def _budget(where: str, content: dict[str, Any]) -> dict[str, Any]:
    found = _mapping(where, "budget", content)
    for name in found:
        if name not in BUDGET_KEYS:
            raise UserError(f"{where}: budget: {unknown('key', str(name), BUDGET_KEYS)}")
    return found


def _parameters(where: str, content: dict[str, Any]) -> list[Parameter]:
    found = content.get("parameters")
    if not isinstance(found, dict) or not found:
        raise UserError(f"{where}: parameters must name at least one field to vary")
    return [_parameter(where, str(name), spec) for name, spec in found.items()]


def _parameter(where: str, name: str, spec: Any) -> Parameter:
    name = ALIASES.get(name, name)
    here = f"{where}: parameters: {name}"
    if not isinstance(spec, dict):
        raise UserError(f"{here}: give {{values: […]}} or {{distribution: …, min: …, max: …}}")
    grouped = isinstance(spec.get("values"), list) and all(
        isinstance(value, dict) for value in spec["values"]
    )
    if name not in FIELDS and name != DERIVED and not grouped:
        raise UserError(f"{where}: parameters: {unknown('key', name, (*FIELDS, DERIVED))}")
    if "value" in spec:
        spec = {"values": [spec["value"]]}
    if "values" in spec:
        values = spec["values"]
        if not isinstance(values, list) or not values or set(spec) != {"values"}:
            raise UserError(f"{here}: values must be a list of at least one value, and stand alone")
        if grouped:
            values = [_mapping(here, "values", {"values": value}) for value in values]
        return Parameter(name, tuple(values))
    distribution = str(spec.get("distribution", "uniform"))
    if distribution not in DISTRIBUTIONS:
        raise UserError(f"{here}: {unknown('distribution', distribution, DISTRIBUTIONS)}")
    extra = set(spec) - {"distribution", "min", "max"}
    if extra:
        raise UserError(f"{here}: {unknown('key', min(extra), ('distribution', 'min', 'max'))}")
    try:
        low, high = float(spec["min"]), float(spec["max"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{here}: {distribution} needs numbers min and max") from None
    if not low < high:
        raise UserError(f"{here}: min {low:g} must be below max {high:g}")
    if distribution in ("log_uniform", "power_of_two") and low <= 0:
        raise UserError(f"{here}: {distribution} needs a min above 0, not {low:g}")
    if distribution == "power_of_two" and not all(math.log2(v).is_integer() for v in (low, high)):
        raise UserError(f"{here}: power_of_two needs powers of 2 as min and max")
    return Parameter(name, (), distribution, low, high)


def _metrics(where: str, found: Any) -> tuple[tuple[str, str], ...]:
    """(name, max | min) pairs."""
    entries = found if isinstance(found, list) else [found or {"name": "accuracy"}]
    metrics = []
    for entry in entries:
        entry = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or set(entry) - {"name", "goal"}:
            raise UserError(f"{where}: metric must be {{name: accuracy, goal: maximize}}")
        name = str(entry.get("name", "accuracy"))
        if name not in METRICS:
            raise UserError(f"{where}: {unknown('metric', name, METRICS)}")
        goal = str(entry.get("goal", "maximize" if name == "accuracy" else "minimize"))
        if goal not in ("maximize", "minimize"):
            raise UserError(f"{where}: {unknown('goal', goal, ('maximize', 'minimize'))}")
        metrics.append((name, goal[:3]))
    if not 1 <= len(metrics) <= 2:
        raise UserError(f"{where}: give one metric, or two")
    return tuple(metrics)


def _count(where: str, name: str, value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or isinstance(value, bool):
        raise UserError(f"{where}: {name} is {value!r}; give a whole number of 1 or more")
    return count
