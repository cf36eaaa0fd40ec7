"""Search spaces: YAML that says what is varied, what is fixed, and the one budget of all trials.

    name: my-sweep
    method: grid | random | qmc | tpe | gp | cmaes  # how trials are chosen
    metric: {name: accuracy, goal: maximize}  # a list for several, by tpe or gp
    samples: 16                             # how many trials (a grid has its own number)
    seeds: 1                                # repetitions of each trial (grid, random, qmc)
    scheduler: none | asha | hyperband | median  # which poor trials are stopped early
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
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
DERIVED = "rows_per_micro_batch"
# What Optuna's samplers propose as other trials end; the other methods fix their list beforehand.
SEARCHERS = ("tpe", "gp", "cmaes")
FOR_SEVERAL = ("tpe", "gp")  # searchers for several metrics
CHOICES = {
    "method": ("grid", "random", "qmc", *SEARCHERS),
    "scheduler": ("none", "asha", "hyperband", "median"),
}
DEFAULTS = {"name": "", "method": "random", "samples": 16, "seeds": 1, "scheduler": "none"}
KEYS = (*DEFAULTS, "metric", "budget", "plan", "parameters")
DISTRIBUTIONS = ("uniform", "log_uniform", "int_uniform", "power_of_two")
METRICS = {"accuracy": "maximize", "train_seconds": "minimize", "epsilon": "minimize"}
MOST_TRIALS = 100_000  # more are a mistake: planning them alone would take hours
SPACES = shipped("search_spaces")


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

    @property
    def powers(self) -> tuple[int, int]:
        """The exponents of a power of two."""
        return int(math.log2(self.low)), int(math.log2(self.high))

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
        lowest, highest = self.powers
        return 2 ** int(rng.integers(lowest, highest + 1))

    def at(self, share: float) -> Any:
        """The value at this share, from 0 to 1, of all that it may be."""
        if self.values:
            return self.values[int(share * len(self.values))]
        if self.distribution == "log_uniform":
            return self.low * (self.high / self.low) ** share
        if self.distribution == "uniform":
            return self.low + share * (self.high - self.low)
        if self.distribution == "int_uniform":
            return int(self.low) + int(share * (self.high - self.low + 1))
        low, high = math.log2(self.low), math.log2(self.high)
        return 2 ** (int(low) + int(share * (high - low + 1)))

    def for_optuna(self) -> tuple[str, Any]:
        """The name and distribution under which Optuna knows it: an index into `values`, an
        exponent of two, or the number itself."""
        from optuna import distributions as optuna

        if self.values:
            return self.name, optuna.CategoricalDistribution(list(range(len(self.values))))
        if self.distribution == "power_of_two":
            return f"log2_{self.name}", optuna.IntDistribution(*self.powers)
        if self.distribution == "int_uniform":
            return self.name, optuna.IntDistribution(int(self.low), int(self.high))
        log = self.distribution == "log_uniform"
        return self.name, optuna.FloatDistribution(self.low, self.high, log=log)

    def from_optuna(self, params: dict[str, Any]) -> Any:
        """The plan's value for what Optuna has suggested."""
        if self.values:
            return self.values[params[self.name]]
        if self.distribution == "power_of_two":
            return 2 ** int(params[f"log2_{self.name}"])
        return params[self.name]


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
        for name, value in chosen.items():
            values.update(value if isinstance(value, dict) else {name: value})
        rows = values.pop(DERIVED, None)
        method = values.get("method", DEFAULT_METHOD)
        if not is_private(method, values.get("teacher")):
            values = {name: value for name, value in values.items() if name not in BUDGET_KEYS}
        if rows is not None and uses(method, "micro_batches"):
            rows = whole_number(DERIVED, rows)
            batch = values.get("batch_size") or make_plan(values).batch_size
            if batch is None:
                raise UserError(f"{DERIVED} needs a batch_size, fixed or varied")
            values["micro_batches"] = max(1, whole_number("batch_size", batch) // rows)
        return values

    @property
    def trials(self) -> int:
        """How many it asks for; a space may turn out to have fewer that can run."""
        points = math.prod(len(p.values) for p in self.parameters)
        return (points if self.search == "grid" else self.samples) * self.seeds

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        return {parameter.name: parameter.draw(rng) for parameter in self.parameters}

    def choices(self, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        """All grid points, or `samples` random ones or ones of a Sobol sequence."""
        if self.search == "grid":
            for combination in itertools.product(*(p.values for p in self.parameters)):
                yield dict(zip((p.name for p in self.parameters), combination, strict=True))
        elif self.search == "qmc":
            # Drawn in powers of two, so that a longer sequence begins with the shorter one.
            from scipy.stats.qmc import Sobol

            sequence = Sobol(len(self.parameters), scramble=True, rng=PUBLIC_SEED)
            for shares in sequence.random_base2(math.ceil(math.log2(self.samples)))[: self.samples]:
                yield {p.name: p.at(x) for p, x in zip(self.parameters, shares, strict=True)}
        else:
            yield from (self.draw(rng) for _ in range(self.samples))

    def some_plans(self, most: int = 200) -> list[Plan]:
        """Plans of some trials, to see what they are about; values that are no plan, which a sweep
        refuses, are left out."""
        plans = []
        for chosen in itertools.islice(self.choices(np.random.default_rng(0)), most):
            with suppress(UserError):
                plans.append(make_plan(self.plan_values(chosen)))
        return plans


def whole_number(name: str, value: Any) -> int:
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        if number >= 1 and number.is_integer() and not isinstance(value, bool):
            return int(number)
    raise UserError(f"{name} is {value!r}; give a whole number of 1 or more")


@contextmanager
def about(subject: object) -> Iterator[None]:
    """Errors inside name their subject."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{subject}: {error}") from None


def uniform(low: float, high: float) -> dict[str, Any]:
    """For spaces in Python: `sweep({"clip": uniform(0.5, 4)}, plan=…)`."""
    return {"distribution": "uniform", "min": low, "max": high}


def log_uniform(low: float, high: float) -> dict[str, Any]:
    return {"distribution": "log_uniform", "min": low, "max": high}


def int_uniform(low: int, high: int) -> dict[str, Any]:
    return {"distribution": "int_uniform", "min": low, "max": high}


def power_of_two(low: int, high: int) -> dict[str, Any]:
    return {"distribution": "power_of_two", "min": low, "max": high}


def space_of(parameters: Mapping[str, Any], plan: Any, **options: Any) -> SearchSpace:
    """A space from Python: parameters as lists of values or distributions; `plan` fixes the rest.

    options   name, search (tpe unless said), metric, samples, seeds, scheduler, as in a file
    """
    varied = {
        name: spec if isinstance(spec, Mapping) else {"values": list(spec)}
        for name, spec in parameters.items()
    }
    if isinstance(plan, Plan):  # what it leaves at its default is the method's to choose
        plan = {n: v for n, v in plan.to_dict().items() if v != FIELDS[n].default}
    taken = {*map(field_name, varied), *(["micro_batches"] if DERIVED in varied else [])}
    fixed = {n: v for n, v in (plan or {}).items() if v is not None and field_name(n) not in taken}
    options["method"] = options.pop("search", "tpe")
    content = {"plan": fixed, "parameters": varied, **options}
    return _checked(_parse(content, {}, "sweep"))


def find_space(name: str | Path) -> Path:
    """A file, or the shipped space of this name, wherever the package is installed."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped_path = SPACES / f"{path.stem}.yaml"
    if shipped_path.is_file():
        return shipped_path
    names = tuple(sorted(p.stem for p in SPACES.glob("*.yaml")))
    raise UserError(f"there is no file {path}; {unknown('search space', path.stem, names)}")


@dataclass(frozen=True)
class ShippedSpace:
    """One line of `dpfp sweep --list`; question and cost are the file's own comments."""

    name: str
    question: str
    costs: str
    varied: tuple[str, ...]
    trials: int


def shipped_spaces() -> list[ShippedSpace]:
    spaces = []
    for path in sorted(SPACES.glob("*.yaml")):
        comments = re.findall(r"^# ?(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        said = " ".join(" ".join(comments).split())
        answers, _, costs = said.removeprefix("Answers: ").partition(" Costs: ")
        space = read_search_space(path, {})
        spaces.append(ShippedSpace(path.stem, answers, costs, tuple(space.varied), space.trials))
    return spaces


def read_search_space(path: str | Path, changes: dict[str, str]) -> SearchSpace:
    """Parse and check a search space: a file, or the name of a shipped one.

    `changes` are `--set key=value`: samples, seeds, scheduler, name, search (the space's `method`),
    or any field of the plan.
    """
    path = find_space(path)
    content = read_plan_file(path)
    with about(path):
        return _checked(_parse(content, changes, path.stem))


def _checked(space: SearchSpace) -> SearchSpace:
    """A space of which no trial is a valid plan is wrong; one with a few bad corners is not."""
    if not space.some_plans(50):
        make_plan(space.plan_values(next(space.choices(np.random.default_rng(0)))))
    return space


def _parse(content: dict[str, Any], changes: dict[str, str], stem: str) -> SearchSpace:
    for key in content:
        if key not in KEYS:
            raise UserError(unknown("key", str(key), KEYS))
    budget, plan = _fields("budget", content, BUDGET_KEYS), _fields("plan", content)
    if twice := set(budget) & set(plan):
        raise UserError(f"{min(twice)} is in both plan and budget; drop one")
    fixed = {**plan, **budget}
    parameters = _parameters(content.get("parameters"))
    top: dict[str, Any] = {**DEFAULTS, "name": stem}
    top |= {key: content[key] for key in top if content.get(key) is not None}
    for key, text in changes.items():
        name, settable = field_name(key), ("search", *DEFAULTS)
        if key in settable and key != "method":
            top["method" if key == "search" else key] = text
        elif name in FIELDS or name == DERIVED:
            parameters.pop(name, None)
            fixed[name] = text
        else:
            raise UserError(f"--set {key}: {unknown('key', key, (*settable, *FIELDS))}")
    for key, valid in CHOICES.items():
        if str(top[key]) not in valid:
            raise UserError(unknown(key, str(top[key]), valid))
    if not (name := str(top["name"])).isprintable():  # half of a character, too
        raise UserError(f"name is {name!r}; give letters, digits and signs that can be printed")
    search, scheduler = str(top["method"]), str(top["scheduler"])
    metrics = _metrics(content.get("metric"))
    if len(metrics) > 1 and (search not in FOR_SEVERAL or scheduler != "none"):
        raise UserError(
            f"several metrics need method: {' or '.join(FOR_SEVERAL)}, and scheduler: none"
        )
    for name_varied, parameter in parameters.items():
        if search == "grid" and not parameter.values:
            raise UserError(
                f"a grid needs values for {name_varied}; give values: […], or method: random"
            )
        if name_varied in fixed:
            raise UserError(f"{name_varied} is both fixed and varied; drop one")
        if name_varied == DERIVED and "micro_batches" in {*fixed, *parameters}:
            raise UserError(f"micro_batches is both fixed and varied: {DERIVED} stands for it")
    seeds, samples = (whole_number(key, top[key]) for key in ("seeds", "samples"))
    if search in SEARCHERS and seeds > 1:
        raise UserError(
            f"seeds repeat the trials of method grid or random; {search} has none to repeat"
        )
    varied = tuple(parameters.values())
    space = SearchSpace(name, search, metrics, samples, seeds, scheduler, fixed, varied)
    if space.trials > MOST_TRIALS:
        raise UserError(f"these are {space.trials:,} trials; at most {MOST_TRIALS:,} are run")
    return space


def _fields(
    title: str, content: dict[str, Any], valid: tuple[str, ...] = tuple(FIELDS)
) -> dict[str, Any]:
    """The mapping of plan fields under the key `title`, by the fields' own names."""
    mapping = content.get(title) or {}
    if not isinstance(mapping, dict):
        raise UserError(f"{title} must be a mapping, not {mapping!r}")
    fields: dict[str, Any] = {}
    for key, value in mapping.items():
        name = field_name(key)
        if name not in valid:
            raise UserError(f"{title}: {unknown('key', str(key), valid)}")
        if name in fields:
            raise UserError(f"{title}: {name} is given twice")
        fields[name] = value
    return fields


def _parameters(mapping: Any) -> dict[str, Parameter]:
    if not isinstance(mapping, dict) or not mapping:
        raise UserError("parameters must name at least one field to vary")
    parameters: dict[str, Parameter] = {}
    for key, spec in mapping.items():
        name = field_name(key)
        with about("parameters"):
            if name in parameters:
                raise UserError(f"{name} is given twice")
            parameters[name] = _parameter(name, spec)
    return parameters


def _parameter(name: str, spec: Any) -> Parameter:
    if not isinstance(spec, dict):
        raise UserError(f"{name}: give {{values: […]}} or {{distribution: …, min: …, max: …}}")
    values: Any = [spec["value"]] if set(spec) == {"value"} else spec.get("values")
    mappings = [isinstance(value, dict) for value in values] if isinstance(values, list) else []
    if name not in (*FIELDS, DERIVED) and not (mappings and all(mappings)):
        raise UserError(unknown("key", name, (*FIELDS, DERIVED)))
    if "value" not in spec and "values" not in spec:
        with about(name):
            return _distribution(name, spec)
    if not mappings or len(spec) > 1:
        raise UserError(f"{name}: values must be a list of at least one value, and stand alone")
    if any(mappings) and not all(mappings):
        raise UserError(f"{name}: values must be mappings, all of them or none")
    if all(mappings):
        values = [_fields(name, {name: value}) for value in values]
    return Parameter(name, tuple(values))


def _distribution(name: str, spec: dict[str, Any]) -> Parameter:
    kind = str(spec.get("distribution", "uniform"))
    if kind not in DISTRIBUTIONS:
        raise UserError(unknown("distribution", kind, DISTRIBUTIONS))
    if extra := set(spec) - {"distribution", "min", "max"}:
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
        v >= 1 and math.log2(v).is_integer() for v in (low, high)
    ):
        raise UserError("power_of_two needs powers of 2 as min and max")
    if kind == "int_uniform" and not (low.is_integer() and high.is_integer()):
        raise UserError("int_uniform needs whole numbers as min and max")
    return Parameter(name, (), kind, low, high)


def _metrics(given: Any) -> tuple[tuple[str, str], ...]:
    """(name, max | min) pairs."""
    entries = "accuracy" if given is None else given
    metrics: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        entry = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or set(entry) - {"name", "goal"}:
            raise UserError("metric must be {name: accuracy, goal: maximize}")
        name = str(entry.get("name", "accuracy"))
        if name not in METRICS:
            raise UserError(unknown("metric", name, tuple(METRICS)))
        goal = str(entry.get("goal", METRICS[name]))
        if goal not in ("maximize", "minimize"):
            raise UserError(unknown("goal", goal, ("maximize", "minimize")))
        if name in metrics:
            raise UserError(f"metric {name} is given twice")
        metrics[name] = goal[:3]
    if not metrics:
        raise UserError(f"give one metric or several of {', '.join(METRICS)}")
    return tuple(metrics.items())
