"""What makes a plan valid: each value by itself, and all of them together.

Representations are what a frozen or trained encoder's output is made into, h(x):

    pooler, cls, mean    one vector of the last layer, as the encoder was trained for
    last                 that of the last real token, which in a decoder has seen all others
    layers               the mean of every layer, embeddings first, each scaled to norm 1, joined
    layers:3,4           the same of some layers; 0 is the embeddings
    pair                 of two texts with means u and v: u, v, |u − v| and u v, each scaled, joined
    auto                 what suits encoder, data and noise (`training/prepare.py`)

All but the first two lines' need a frozen encoder (scope head).
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpfp_ray.plan.method_spec import LORA_FIELDS, SCOPES, USED_BY_SOME, scope_kind, users_of
from dpfp_ray.system.errors import UserError, unknown

if TYPE_CHECKING:
    from dpfp_ray.plan.plan import Plan

_COUNTS = (
    "batch_size",
    "micro_batches",
    "max_train",
    "max_per_user",
    "max_dev",
    "max_public",
    "max_physical_batch",
    "rank",
    "power_iterations",
    "lora_rank",
)


def check(plan: "Plan") -> None:
    """Raise a `UserError` for the first value that makes no sense, by itself or with the others."""
    for spec in dataclasses.fields(plan):
        choices = spec.metadata["choices"]
        value = getattr(plan, spec.name)
        if choices and value is not None and spec.name != "adjacency" and value not in choices:
            raise UserError(unknown(spec.name, value, choices))
    if plan.adjacency not in plan.adjacencies:
        raise UserError(
            f"adjacency {plan.adjacency!r} is not one that {plan.spec.title} can promise; "
            f"use {' or '.join(plan.adjacencies)}"
        )
    for name in _COUNTS:
        _require(
            getattr(plan, name),
            name,
            lambda v: isinstance(v, int) and v >= 1,
            "a whole number of 1 or more",
        )
    _check_persons(plan)
    _require(plan.epsilon, "epsilon", lambda v: 0 < v <= 1000, "a number above 0, at most 1000")
    for name in ("clip", "learning_rate", "epochs", "lora_alpha"):
        _require(getattr(plan, name), name, lambda v: 0 < v < math.inf, "a number above 0")
    _require(plan.delta, "delta", lambda v: 0 < v < 1, "a number between 0 and 1")
    _require(plan.max_length, "max_length", lambda v: v >= 3, "3 or more")
    _require(plan.weight_decay, "weight_decay", lambda v: 0 <= v < math.inf, "0 or more")
    _require(plan.dropout, "dropout", lambda v: 0 <= v < 1, "from 0 to below 1")
    if plan.ridge != "auto":
        _require(plan.ridge, "ridge", lambda v: 0 <= v < math.inf, "0 or more, or auto")
    _require(plan.shrinkage, "shrinkage", lambda v: 0 <= v < math.inf, "0 or more")
    _check_method(plan)
    if not plan.private and (plan.epsilon is not None or plan.delta is not None):
        raise UserError(f"{plan.method} spends no budget; drop epsilon and delta")
    _require(plan.cache_gb, "cache_gb", lambda v: v >= 0, "a number of gigabytes, 0 for none")
    if plan.task == "custom" and not plan.train_file:
        raise UserError("task custom needs train_file; give --train-file FILE")
    if plan.teacher is not None:
        _ = plan.private_part, plan.trained_part  # each is checked as it is made
        return
    if plan.batch_size is None:
        return
    if plan.batch_size < plan.M:
        raise UserError(
            f"micro_batches M = {plan.M} is more than batch_size B = {plan.batch_size}; "
            f"each micro-batch needs an expected size of 1 or more, so use M <= B"
        )
    if plan.records is not None:
        if plan.p > 1:
            raise UserError(
                f"sampling probability p = B/(M D) = {plan.p:.4g} is above 1 with "
                f"B = {plan.batch_size}, M = {plan.M}, D = {plan.records}; "
                f"use a batch_size of {plan.M * plan.records} or less"
            )
        if plan.steps < 1:
            raise UserError(
                f"epochs E = {plan.epochs} of D = {plan.records} {plan.unit}s make no whole step "
                f"of B = {plan.batch_size}; use a smaller batch_size or more epochs"
            )


def _check_method(plan: "Plan") -> None:
    """What the plan's method, in its mode, has no use for."""
    spec = plan.spec
    _check_scope(plan)
    _check_representation(plan)
    if scope_kind(plan.scope) not in spec.scopes:
        why = " freezes the encoder" if spec.scopes == ("head",) else f" has no scope {plan.scope}"
        raise UserError(f"{spec.title}{why}; use scope {' or '.join(spec.scopes)}, or drop scope")
    for name, unused in USED_BY_SOME.items():
        if name not in spec.uses and (value := getattr(plan, name)) != unused:
            users = " or ".join(other.title for other in users_of(name).values())
            raise UserError(
                f"{name} is {value}, but {spec.title} does not use it; drop it, or use {users}"
            )
    if plan.label_words and plan.teacher is None and plan.start != "words" and spec.reads_records:
        raise UserError("label_words is given, but start is zero; use start words, or drop it")
    if plan.scope == "head" and plan.dropout:
        raise UserError("dropout acts in the encoder, which scope head freezes; drop it")
    if plan.label_epsilon is not None:
        _require(
            plan.label_epsilon,
            "label_epsilon",
            lambda v: 0 < v < (plan.epsilon or math.inf),
            f"a number above 0 and below epsilon = {plan.epsilon}, of which it is a share",
        )
        if plan.accountant == "rdp":
            raise UserError("accountant rdp has no bound with label_epsilon; use pld or gdp")
    if plan.scaling == "unit" and plan.clip != 1:
        raise UserError(
            f"clip is {plan.clip:g}, but scaling unit gives every representation norm 1; "
            f"drop clip, or use scaling clip"
        )
    if plan.allocates and plan.accountant == "gdp":
        raise UserError(
            "accountant gdp has no limit theorem for sampling allocation; use accountant pld or rdp"
        )
    if spec.own_profile and plan.accountant != "pld":
        raise UserError(
            f"accountant {plan.accountant} cannot calibrate {spec.title}, which has a profile of "
            "its own; use pld"
        )
    if plan.one_release:
        _check_one_release(plan)


def _check_representation(plan: "Plan") -> None:
    check_representation(plan.representation)
    if plan.scope == "head":
        return
    if is_joined(plan.representation):
        raise UserError(
            f"representation {plan.representation} is read off a frozen encoder, but scope is "
            f"{plan.scope}; use scope head, or mean"
        )
    if plan.centring != "none":
        raise UserError(f"centring needs a frozen encoder, but scope is {plan.scope}; drop it")


def _check_persons(plan: "Plan") -> None:
    column = plan.user_column
    if column is None:
        return
    for name in ("text_column", "pair_column", "label_column"):
        if getattr(plan, name) == column:
            raise UserError(
                f"user_column is {column!r}, and so is {name}; name the column that says whose a "
                f"record is"
            )
    if not plan.spec.bounds_persons:
        raise UserError(
            f"{plan.spec.title} bounds each record by itself, not a person; drop user_column, or "
            f"use another method"
        )


def _check_scope(plan: "Plan") -> None:
    if scope_kind(plan.scope) not in SCOPES or plan.scope == "top:K":
        raise UserError(
            f"{unknown('scope', plan.scope, SCOPES)}; K is a number of layers, as in top:2"
        )
    for name in LORA_FIELDS:
        if plan.scope != "lora" and (value := getattr(plan, name)) is not None:
            raise UserError(f"{name} is {value}, but scope is {plan.scope}; drop it, or use lora")


def _check_one_release(plan: "Plan") -> None:
    defaults = plan.spec.defaults_for(plan.scope)
    only = {
        "epochs": defaults.epochs,
        "batch_size": plan.records,
        "learning_rate": defaults.learning_rate,
        "schedule": defaults.schedule,
        "weight_decay": defaults.weight_decay,
    }
    for name, value in only.items():
        if getattr(plan, name) != value:
            raise UserError(
                f"{plan.spec.title} makes one release of all records and solves its head in "
                f"closed form; drop {name}"
            )


def _require(value: Any, name: str, holds: Callable[[Any], bool], need: str) -> None:
    if value is not None and not (isinstance(value, (int, float)) and holds(value)):
        raise UserError(f"{name} is {value}; give {need}")


REPRESENTATIONS = ("auto", "pooler", "cls", "last", "mean", "layers", "layers:I,J", "pair")
_SOME_LAYERS = re.compile(r"layers:\d{1,4}(,\d{1,4})*")


def check_representation(name: str) -> None:
    if name.startswith("layers:"):
        numbers = layer_numbers(name) if _SOME_LAYERS.fullmatch(name) else ()
        if not numbers or list(numbers) != sorted(set(numbers)):
            raise UserError(
                f"representation is {name}; name layers once, in rising order, as in layers:3,4,5,6"
            )
    elif name not in REPRESENTATIONS:
        raise UserError(unknown("representation", name, REPRESENTATIONS))


def layer_numbers(name: str) -> tuple[int, ...]:
    """Those that `layers:3,4` names; none for every other name, `layers` included."""
    numbers = name.partition(":")[2]
    return tuple(int(number) for number in numbers.split(",")) if numbers else ()


def is_joined(name: str) -> bool:
    """Whether it is made of several parts, from a frozen encoder's means."""
    return name == "pair" or name.partition(":")[0] == "layers"
