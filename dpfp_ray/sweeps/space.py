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
from pathlib import Path
from typing import Any

import numpy as np

from dpfp_ray.plan.method_spec import DEFAULT_METHOD, is_private, uses
from dpfp_ray.plan.plan import FIELDS, Plan
from dpfp_ray.plan.values import field_name, make_plan, read_plan_file
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.whole_files import shipped

# Draws of search spaces are public, and the same when a sweep is resumed.
PUBLIC_SEED = 0
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


KEYS = ("name", "method", "metric", "samples", "seeds", "scheduler", "budget", "plan", "parameters")
SEARCHES = ("grid", "random", "tpe")
SCHEDULERS = ("none", "asha")
DISTRIBUTIONS = ("uniform", "log_uniform", "int_uniform", "power_of_two")
METRICS = ("accuracy", "train_seconds", "epsilon")
DEFAULTS = {"name": "", "method": "random", "samples": 16, "seeds": 1, "scheduler": "none"}
SETTABLE = ("name", "search", "samples", "seeds", "scheduler")
MOST_TRIALS = 100_000  # more are a mistake: planning them alone would take hours

SPACES = shipped("search_spaces")


def space_path(name: str) -> Path:
    """`search_spaces/NAME.yaml`, in a checkout or in an installed package."""
    if not has_space(name):
        raise UserError(f"there is no search space named {name!r}")
    return SPACES / f"{name}.yaml"


def has_space(name: str) -> bool:
    return (SPACES / f"{name}.yaml").exists()


def read_search_space(path: str | Path, changes: dict[str, str]) -> SearchSpace:
    """Parse and check a search space.

    `changes` are `--set key=value`: samples, seeds, scheduler, name, search (the space's `method`),
    or any field of the plan.
    """
    content = read_plan_file(path)
    try:
        space = _parse(content, changes, Path(path).stem)
        _check_plans(space)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return space


def _parse(content: dict[str, Any], changes: dict[str, str], stem: str) -> SearchSpace:
    for key in content:
        if key not in KEYS:
            raise UserError(unknown("key", str(key), KEYS))
    budget, plan = _budget(content), _mapping("plan", content)
    for name in budget:
        if name in plan:
            raise UserError(f"{name} is in both plan and budget; drop one")
    fixed = {**plan, **budget}
    parameters = _parameters(content)
    top: dict[str, Any] = {**DEFAULTS, "name": stem}
    top |= {key: content[key] for key in top if content.get(key) is not None}
    for key, text in changes.items():
        name = field_name(key)
        if key in SETTABLE:
            top["method" if key == "search" else key] = text
        elif name in FIELDS or name == DERIVED:
            parameters.pop(name, None)
            fixed[name] = text
        else:
            raise UserError(f"--set {key}: {unknown('key', key, (*SETTABLE, *FIELDS))}")
    search, scheduler = _choice("method", top, SEARCHES), _choice("scheduler", top, SCHEDULERS)
    metrics = _metrics(content.get("metric"))
    if len(metrics) > 1 and (search != "tpe" or scheduler != "none"):
        raise UserError("two metrics need method: tpe and scheduler: none")
    for name, parameter in parameters.items():
        if search == "grid" and not parameter.values:
            raise UserError(f"a grid needs values for {name}; give values: […], or method: random")
        if name in fixed:
            raise UserError(f"{name} is both fixed and varied; drop one")
        if name == DERIVED and "micro_batches" in {*fixed, *parameters}:
            raise UserError(f"micro_batches is both fixed and varied: {DERIVED} stands for it")
    seeds, samples = _count("seeds", top), _count("samples", top)
    points = math.prod(len(p.values) for p in parameters.values()) if search == "grid" else samples
    if points * seeds > MOST_TRIALS:
        raise UserError(f"these are {points * seeds:,} trials; at most {MOST_TRIALS:,} are run")
    if search == "tpe" and seeds > 1:
        raise UserError("seeds repeat the trials of method grid or random; tpe has none to repeat")
    return SearchSpace(
        _name(top["name"]),
        search,
        metrics,
        samples,
        seeds,
        scheduler,
        fixed,
        tuple(parameters.values()),
    )


def _check_plans(space: SearchSpace) -> None:
    """A space of which no trial is a valid plan is wrong; one with a few bad corners is not."""
    error: UserError | None = None
    for chosen in itertools.islice(space.choices(np.random.default_rng(0)), 50):
        try:
            make_plan(space.plan_values(chosen))
            return
        except UserError as found:
            error = error or found
    if error is not None:
        raise error


def _choice(key: str, top: dict[str, Any], valid: tuple[str, ...]) -> str:
    value = str(top[key])
    if value not in valid:
        raise UserError(unknown(key, value, valid))
    return value


def _mapping(key: str, content: dict[str, Any]) -> dict[str, Any]:
    found = content.get(key) or {}
    if not isinstance(found, dict):
        raise UserError(f"{key} must be a mapping, not {found!r}")
    clean: dict[str, Any] = {}
    for given, value in found.items():
        name = field_name(given)
        if name not in FIELDS:
            raise UserError(f"{key}: {unknown('key', str(given), tuple(FIELDS))}")
        if name in clean:
            raise UserError(f"{key}: {name} is given twice")
        clean[name] = value
    return clean


def _budget(content: dict[str, Any]) -> dict[str, Any]:
    found = content.get("budget") or {}
    for name in found if isinstance(found, dict) else ():
        if name not in BUDGET_KEYS:
            raise UserError(f"budget: {unknown('key', str(name), BUDGET_KEYS)}")
    return _mapping("budget", content)


def _parameters(content: dict[str, Any]) -> dict[str, Parameter]:
    found = content.get("parameters")
    if not isinstance(found, dict) or not found:
        raise UserError("parameters must name at least one field to vary")
    parameters: dict[str, Parameter] = {}
    for given, spec in found.items():
        try:
            parameter = _parameter(field_name(given), spec)
        except UserError as error:
            raise UserError(f"parameters: {error}") from None
        if parameter.name in parameters:
            raise UserError(f"parameters: {parameter.name} is given twice")
        parameters[parameter.name] = parameter
    return parameters


def _name(given: Any) -> str:
    if not (name := str(given)).isprintable():  # half of a character, too: no file can hold it
        raise UserError(f"name is {name!r}; give letters, digits and signs that can be printed")
    return name


def _parameter(name: str, spec: Any) -> Parameter:
    if not isinstance(spec, dict):
        raise UserError(f"{name}: give {{values: […]}} or {{distribution: …, min: …, max: …}}")
    values = [spec["value"]] if set(spec) == {"value"} else spec.get("values")
    grouped = isinstance(values, list) and all(isinstance(value, dict) for value in values)
    if name not in FIELDS and name != DERIVED and not (grouped and values):
        raise UserError(unknown("key", name, (*FIELDS, DERIVED)))
    if "value" in spec or "values" in spec:
        if not isinstance(values, list) or not values or len(spec) > 1:
            raise UserError(f"{name}: values must be a list of at least one value, and stand alone")
        if not grouped and any(isinstance(value, dict) for value in values):
            raise UserError(f"{name}: values must be mappings, all of them or none")
        if grouped:
            values = [_mapping(name, {name: value}) for value in values]
        return Parameter(name, tuple(values))
    try:
        return _distribution(name, spec)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _distribution(name: str, spec: dict[str, Any]) -> Parameter:
    kind = str(spec.get("distribution", "uniform"))
    if kind not in DISTRIBUTIONS:
        raise UserError(unknown("distribution", kind, DISTRIBUTIONS))
    extra = set(spec) - {"distribution", "min", "max"}
    if extra:
        raise UserError(unknown("key", min(extra), ("distribution", "min", "max")))
    try:
        low, high = float(spec["min"]), float(spec["max"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{kind} needs numbers min and max") from None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{kind} needs finite numbers min and max")
    if not low < high:
        raise UserError(f"min {low:g} must be below max {high:g}")
    if kind in ("log_uniform", "power_of_two") and low <= 0:
        raise UserError(f"{kind} needs a min above 0, not {low:g}")
    if kind == "power_of_two" and not all(
        math.log2(v).is_integer() and v >= 1 for v in (low, high)
    ):
        raise UserError("power_of_two needs powers of 2 as min and max")
    if kind == "int_uniform" and not (low.is_integer() and high.is_integer()):
        raise UserError("int_uniform needs whole numbers as min and max")
    return Parameter(name, (), kind, low, high)


def _metrics(found: Any) -> tuple[tuple[str, str], ...]:
    """(name, max | min) pairs."""
    entries = [{"name": "accuracy"}] if found is None else found
    metrics: list[tuple[str, str]] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        entry = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or set(entry) - {"name", "goal"}:
            raise UserError("metric must be {name: accuracy, goal: maximize}")
        name = str(entry.get("name", "accuracy"))
        if name not in METRICS:
            raise UserError(unknown("metric", name, METRICS))
        goal = str(entry.get("goal", "maximize" if name == "accuracy" else "minimize"))
        if goal not in ("maximize", "minimize"):
            raise UserError(unknown("goal", goal, ("maximize", "minimize")))
        metrics.append((name, goal[:3]))
    if not 1 <= len(metrics) <= 2:
        raise UserError("give one metric, or two")
    if len({name for name, _ in metrics}) < len(metrics):
        raise UserError(f"metric {metrics[0][0]} is given twice")
    return tuple(metrics)


def _count(name: str, top: dict[str, Any]) -> int:
    value = top[name]
    try:
        count = int(value)
        valid = count >= 1 and not isinstance(value, bool) and float(value) == count
    except (TypeError, ValueError, OverflowError):
        valid = False
    if not valid:
        raise UserError(f"{name} is {value!r}; give a whole number of 1 or more")
    return count
