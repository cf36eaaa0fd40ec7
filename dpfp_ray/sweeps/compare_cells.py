"""The cells of a comparison: plan values for each (method, ε)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dpfp_ray.plan.errors import UserError, unknown
from dpfp_ray.plan.method_spec import (
    LORA_FIELDS,
    METHODS,
    find_spec,
    modes_of,
    scope_kind,
    scopes_of,
)

Settings = Mapping[str, Mapping[str, Any]]  # plan fields of one method or variant only


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


def cells_of(
    methods: str | Iterable[str],
    epsilon: float | Iterable[float],
    fields: Mapping[str, Any],
    match: str | None,
    settings: Settings | None,
) -> list[dict[str, Any]]:
    """The cells that the keywords of `compare` ask for, checked."""
    names = check_methods([methods] if isinstance(methods, str) else methods)
    budgets = check_budgets([epsilon] if isinstance(epsilon, int | float) else epsilon)
    own = {key: dict(values) for key, values in (settings or {}).items()}
    return plan_cells(names, budgets, dict(fields), match, own)


def plan_cells(
    methods: list[str],
    budgets: list[float],
    common: dict[str, Any],
    match: str | None,
    settings: dict[str, dict[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """Plan values for each (method, ε); non-private training has no ε and is run once.

    A flag applies to every method that knows it, one of `settings` to its method or, if it names a
    variant, to that variant.
    """
    cells = []
    for name in methods:
        fields, own = variant(name), settings or {}
        method = fields["method"]
        values = {**common, **own.get(method, {}), **own.get(name, {}), **fields}
        if match == "batch":
            values.setdefault("batch_size", 32)
        spec = find_spec(method, values.get("mode")) or find_spec(method)
        assert spec is not None
        unused = spec.unused + (() if values.get("scope") == "lora" else LORA_FIELDS)
        for key in unused:
            values.pop(key, None)
        cells += [{**values, "epsilon": budget} for budget in budgets] if spec.private else [values]
    return cells


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
        if math.isinf(value):
            raise UserError("epsilon inf is training without privacy; use --methods non_private")
        if not value > 0:
            raise UserError(f"epsilon is {value:g}; give numbers above 0")
        budgets.append(float(value))
    return list(dict.fromkeys(budgets))
