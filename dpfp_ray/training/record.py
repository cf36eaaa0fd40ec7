"""The record of a run: every key typed, checked when it is read, written as JSON.

`result.json` of a run and `records/ID.json` of a trial have this shape. `read_record` refuses what
does not fit, so that no reader has to look for nonsense; it gives keys in their types' order, which
is the order that runs write them in. A trial that failed or was refused has only the sections that
it got to; the others are there, empty. There is no secret in a record.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dpfp_ray.plan.plan import TYPES, Plan
from dpfp_ray.plan.values import make_plan

SCHEMA = 1
Select = Literal["last", "best"]
_OPEN = ConfigDict(extra="allow")  # keys that a later version adds are kept


class Scores(TypedDict, total=False):
    """One model on one dev set. `f1` is of class 1 with two classes (as GLUE scores QQP), else the
    mean over classes; `recall` has None for a class without dev rows."""

    accuracy: float
    f1: float | None
    matthews: float | None
    recall: list[float | None]
    one_class: bool
    majority_accuracy: float | None
    calibration_error: float | None
    loss: float | None


class EpochFacts(TypedDict):
    """An entry of the history. `epsilon` is what was spent by then, by accountant."""

    epoch: int
    step: int
    train_loss: float | None
    dev: dict[str, Scores]
    epsilon: dict[str, float | None]
    train_seconds: float | None


class Answers(TypedDict):
    rows: int
    classes: int
    fingerprint: str
    predicted: str
    labels: str


class KeptAnswers(TypedDict):
    epoch: int
    dev: dict[str, Answers]


class ClaimFacts(TypedDict, total=False):
    """What another library that trained claims of the run; `epsilon` is by its own accountants."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    library: str
    version: str
    changed_files: list[str]
    says: str
    sampling_rate: float
    noise_multiplier: float
    releases: int
    epsilon: dict[str, float]
    settings: dict[str, Any]
    notes: list[str]


class PrivacyFacts(TypedDict, total=False):
    __pydantic_config__ = _OPEN  # type: ignore[misc]
    guarantee: str
    epsilon: dict[str, float | None]
    delta: float | None
    noise_multiplier: float
    sigma: float
    p: float
    steps: int
    draws: int
    noise_coordinates: int
    release_id: str
    claim: ClaimFacts


class CostFacts(TypedDict, total=False):
    """A selection leaves out what a clock or a machine would tell.

    `part` is the most of a step that was in memory at once: tokens, padding included, on a GPU;
    rows on a CPU, and there only after it ran out of memory.
    """

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    prepare_seconds: float
    train_seconds: float
    eval_seconds: float
    examples_per_second: float
    peak_memory_bytes: int
    parameters: int
    trainable_parameters: int
    part: dict[str, int]


class TrialFacts(TypedDict, total=False):
    """Of a run in a sweep or comparison: who ran it, where, and how it ended."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    id: str
    sweep: str | None
    group: str | None
    seed_index: int | None
    status: str | None
    error: str | None
    warning: str | None
    node: str | None
    pid: int | None
    started_at: float
    reported_at: float
    batch: str
    planned: int
    seconds: float
    steps_drawn: int | None
    ledger_entry: str | None


class AuditFacts(TypedDict, total=False):
    """What an audit measured; `epsilon` is its lower bound."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    verdict: str
    epsilon: float
    stated_epsilon: float | None
    ceiling: float | None
    canaries: int
    guesses: int
    correct: int
    confidence: float
    family: str
    access: str


class Record(TypedDict):
    """`plan` has the plan's fields; `metrics` are the scores of the epoch that the run quotes."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    schema: int
    plan: dict[str, Any]
    plan_hash: str
    finished: bool
    labels: list[str]
    columns: dict[str, Any]
    dev_records: dict[str, int]
    select: Select
    metrics: dict[str, Any]
    history: list[EpochFacts]
    predictions: list[KeptAnswers]
    privacy: PrivacyFacts
    statement: dict[str, Any]
    cost: CostFacts
    environment: dict[str, Any]
    trial: TrialFacts
    audit: AuditFacts
    selection: dict[str, Any]
    ledger_entry: str


def make_record(**sections: Any) -> Record:
    empty: dict[str, Any] = {name: {} for name in Record.__annotations__}
    empty |= {name: [] for name in ("labels", "history", "predictions")}
    empty |= {"schema": SCHEMA, "plan_hash": "", "finished": False}
    empty |= {"select": "last", "ledger_entry": ""}
    return cast(Record, empty | sections)


def read_record(content: str | bytes) -> Record:
    """The record in a JSON text; ValueError, in one line, if it is none."""
    try:
        return checked_record(json.loads(content))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checked_record(facts: Any) -> Record:
    """The same for what is read already."""
    if not isinstance(facts, dict) or not isinstance(facts.get("plan"), dict):
        raise ValueError("it has no plan")
    plans, records = _adapters()
    try:
        record = records.validate_python(make_record(**facts))
        record["plan"] = plans.validate_python(record["plan"])
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not record_id(record):
        raise ValueError("it has neither trial.id nor plan_hash")
    return record


def fitting_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a refused trial's plan values that have their field's type."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(ValidationError):
            fields |= _adapters()[0].validate_python({name: value})
    return fields


@cache
def _adapters() -> tuple[TypeAdapter[dict[str, Any]], TypeAdapter[Record]]:
    optional = {name: kind | None for name, kind in TYPES.items()}
    fields = TypedDict("fields", optional, total=False)  # type: ignore[misc]
    fields.__pydantic_config__ = _OPEN  # type: ignore[attr-defined]
    return cast(Any, TypeAdapter(fields)), TypeAdapter(Record)


def record_id(record: Record) -> str:
    """The trial's id, or the plan's hash for a run outside any sweep."""
    return record["trial"].get("id") or record["plan_hash"]


def plan_of(record: Record) -> Plan:
    return make_plan({key: value for key, value in record["plan"].items() if value is not None})


def entry_of(record: Record) -> str:
    """The ledger's entry that paid for a result; empty if the record does not say."""
    return record["ledger_entry"] or record["trial"].get("ledger_entry") or ""


def status_of(record: Record) -> str:
    """finished, failed, stopped or refused, as a ledger sees it."""
    status = record["trial"].get("status") or ""
    return status if status in ("failed", "stopped", "refused") else "finished"


def fingerprint(record: Record) -> str:
    """The same for the same result, whichever store or ledger it is in. Losses and clocks make it
    unique to a run."""
    facts = json.dumps(
        [record["privacy"], record["history"], record["trial"].get("id")], sort_keys=True
    )
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
