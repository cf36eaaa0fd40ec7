"""Plans as people write and read them: YAML files and flags with every key checked, and defaults in
words.
"""

import math
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpfp_ray.plan.method_spec import (
    LEAST_BATCH,
    METHODS,
    SST2_RECORDS,
    MethodSpec,
    all_specs,
    modes_of,
    scope_kind,
    scopes_of,
)
from dpfp_ray.plan.plan import FIELDS, TYPES, Plan, kinds_of
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.whole_files import LARGEST_YAML, parse_yaml, read_limited

MOST_DIGITS = 30  # of a whole number that is taken as it stands
ALIASES = {
    "B": "batch_size",
    "M": "micro_batches",
    "C": "clip",
    "E": "epochs",
    "lr": "learning_rate",
}


def make_plan(values: Mapping[str, Any]) -> Plan:
    """A plan from untrusted values (YAML, flags): keys checked, numbers in strings accepted.

    YAML 1.1 reads `5e-6` as a string; it is a number here. A key without a value is not given.
    """
    clean: dict[str, Any] = {}
    for key, value in values.items():
        name = field_name(key)
        if name not in FIELDS:
            raise UserError(unknown("key", str(key), tuple(FIELDS)))
        if name in clean:
            raise UserError(f"{name} is given twice (also as {key!r})")
        clean[name] = _coerce(name, value)
    return Plan(**{name: value for name, value in clean.items() if value is not None})


def field_name(key: Any) -> str:
    """The field that a key of a plan file means: `B`, `batch-size` and `batch_size` are one."""
    return ALIASES.get(key, str(key).replace("-", "_"))


def read_plan_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML plan file, or the plan that a run's result.json keeps."""
    try:
        text = read_limited(Path(path), LARGEST_YAML)
    except OSError as error:
        raise UserError(f"cannot read plan {path}: {error.strerror}") from None
    content = parse_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold `key: value` lines, not a {type(content).__name__}")
    recorded = content.get("plan") if "plan_hash" in content else None
    return recorded if isinstance(recorded, dict) else content


def _coerce(name: str, value: Any) -> Any:
    if value is None:
        return None
    kinds = [kind for kind in kinds_of(TYPES[name]) if kind is not type(None)]
    if str in kinds[1:] and value == "auto":
        return value
    wanted = kinds[0]
    if typing.get_origin(wanted) is tuple or wanted is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not items:
            raise UserError(f"{name} is {value!r}; give a list such as negative,positive")
        return tuple(_text(name, item).strip() for item in items)
    if wanted is str:
        return _text(name, value)
    if wanted is bool:
        return _yes_or_no(name, value)
    try:
        number = float(value)
        if isinstance(value, bool) or (wanted is int and number != int(number)):
            raise ValueError
        if wanted is not int:
            return number
        digits = str(value).strip()  # a float would round them, and a message name another number
        return int(digits if digits.isdecimal() and len(digits) <= MOST_DIGITS else number)
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if wanted is int else "a number"
        raise UserError(f"{name} is {value!r}; give {kind}") from None


def _yes_or_no(name: str, value: Any) -> bool:
    words = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise UserError(f"{name} is {value!r}; give yes or no") from None


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):  # YAML 1.1 reads yes, no, on and off so: the word is lost
        raise UserError(f"{name} is the boolean {value} in YAML; put the word in quotes")
    if not isinstance(value, (str, int, float)):
        raise UserError(f"{name} is {value!r}; give one word or path")
    if not str(value).strip():  # of an empty variable of a shell; the default is another thing
        raise UserError(f"{name} is empty; give one word or path, or leave it out")
    return str(value)


BY_METHOD = (
    "batch_size",
    "micro_batches",
    "clip",
    "learning_rate",
    "epochs",
    "schedule",
    "weight_decay",
    "scaling",
    "ridge",
    "shrinkage",
)
FROM_DATA = ("representation", "batch_size", "epochs", "delta")


def by_method(field: str) -> str:
    """`dpsgd 0.1; dpfp, rgp 1`: what each method that uses the field starts from; else empty."""
    if field not in BY_METHOD:
        return ""
    users: dict[str, list[str]] = {}
    for name, spec in all_specs().items():
        if field not in spec.unused:
            users.setdefault(_value(field, spec), []).append(name)
    shown = "; ".join(f"{', '.join(names)} {value}" for value, names in users.items())
    scopes = any(
        field in changes and field not in spec.unused
        for spec in all_specs().values()
        for changes in spec.scope_changes.values()
    )
    return shown + ("; scopes have their own" if scopes else "")


def _value(field: str, spec: MethodSpec) -> str:
    value = getattr(spec.defaults, field)
    shown = value if isinstance(value, str) else f"{value:g}"
    if field == "batch_size" and spec.defaults.scales_batch:
        return f"{shown}·D/{SST2_RECORDS:,}, {LEAST_BATCH} or more"
    if field == "epochs" and spec.defaults.scales_epochs:
        return f"{shown}·D/{SST2_RECORDS:,}, {shown} or more"
    return str(shown)


def from_data(asked: Plan, bound: Plan) -> str:
    """One line of what the data decided in a plan that left it open: D, K, and what follows."""
    parts = [f"D = {bound.D:,} {bound.unit}s", f"K = {bound.classes} classes"]
    for name in FROM_DATA:
        before, after = getattr(asked, name), getattr(bound, name)
        if before in (None, "auto") and after is not None and name not in bound.spec.unused:
            parts.append(f"{name} {after if isinstance(after, str) else format(after, ',.4g')}")
    return "from the data: " + ", ".join(parts)


def usual_methods() -> list[str]:
    """Names of the methods and modes that are compared where nobody names any."""
    modes = {spec.method: modes_of(spec.method) for spec in all_specs().values()}
    return [
        spec.method if spec.mode == modes[spec.method][0] else f"{spec.method}:{spec.mode}"
        for spec in all_specs().values()
        if spec.compared
    ]


def variant(name: str) -> dict[str, str]:
    """The plan fields that `dpfp`, `dpfp:moments`, `dpsgd:head` or `dpsgd:top:2` stand for."""
    method, colon, kind = name.partition(":")
    if method not in METHODS:
        raise UserError(unknown("method", method, METHODS))
    if not colon:
        return {"method": method}
    modes, scopes = modes_of(method), scopes_of(method)
    kinds = (*(modes if len(modes) > 1 else ()), *scopes[1:])
    if not kinds:
        raise UserError(f"{method} has no variants, so no {kind!r}; write {method} alone")
    if scope_kind(kind) not in kinds or kind == "top:K":
        raise UserError(unknown(f"variant of {method}", kind, kinds))
    return {"method": method, "mode" if kind in modes else "scope": kind}


def check_methods(names: Iterable[str]) -> list[str]:
    """Each method or variant once, all of them known."""
    methods = list(dict.fromkeys(names))
    for name in methods:
        variant(name)
    if not methods:
        raise UserError("methods is empty; give a list such as non_private,dpfp,dpsgd")
    return methods


def check_budgets(values: Iterable[float]) -> list[float]:
    """Each ε once, all of them budgets."""
    budgets = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"epsilon is {value!r}; give numbers above 0")
        if math.isinf(value):
            raise UserError("epsilon inf is training without privacy; use --methods non_private")
        if not value > 0:
            raise UserError(f"epsilon is {value:g}; give numbers above 0")
        budgets.append(float(value))
    if not budgets:
        raise UserError("epsilon is empty; give numbers above 0")
    return list(dict.fromkeys(budgets))
