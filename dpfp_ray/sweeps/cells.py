"""The cells of a comparison: plan values for each (method, ε)."""

import math
from collections.abc import Iterable
from typing import Any

from dpfp_ray.plan.defaults import METHODS, MODES, ONE_RELEASE
from dpfp_ray.plan.errors import UserError, unknown

BUDGET = ("delta", "accountant", "adjacency")
# What modes that release once have, and what they have not: they do not train in steps.
ONLY_ONE_RELEASE = ("scaling", "ridge", "shrinkage", "label_epsilon")
STEPS = ("batch_size", "micro_batches", "epochs", "learning_rate", "schedule", "weight_decay")
ONLY_DPFP = ("mode", "micro_batches", *ONLY_ONE_RELEASE)


def variant(name: str) -> dict[str, str]:
    """The plan fields that `dpfp`, `dpfp:moments` or `dpsgd:head` stand for."""
    method, colon, kind = name.partition(":")
    if method not in METHODS:
        raise UserError(unknown("method", method, METHODS))
    if not colon:
        return {"method": method}
    if kind == "head":
        return {"method": method, "scope": "head"}
    kinds = (*MODES, "head") if method == "dpfp" else ("head",)
    if kind not in kinds:
        raise UserError(unknown(f"variant of {method}", kind, kinds))
    return {"method": method, "mode": kind}


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
        for key in unused(method, str(values.get("mode", ""))):
            values.pop(key, None)
        if method == "non_private":
            cells.append(values)
        else:
            cells += [{**values, "epsilon": budget} for budget in budgets]
    return cells


def unused(method: str, mode: str) -> tuple[str, ...]:
    """Fields of a plan that mean nothing to a method."""
    if method == "non_private":
        return (*ONLY_DPFP, *BUDGET)
    if method != "dpfp":
        return ONLY_DPFP
    return STEPS if mode in ONE_RELEASE else ONLY_ONE_RELEASE


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
