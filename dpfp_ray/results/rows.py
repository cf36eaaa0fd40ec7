"""Records as flat rows of fixed columns, for people, tables and files."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpfp_ray.plan.method_spec import is_private, modes_of
from dpfp_ray.training.dev_scores import RULES, Select, quote

Row = dict[str, Any]

# Every column of a flat row, in the order in which people and files see them.
# `accuracy_<split>` columns, if any, follow `accuracy`.
COLUMNS: dict[str, type] = {
    "id": str,
    "sweep": str,
    "status": str,
    "method": str,
    "mode": str,
    "task": str,
    "model": str,
    "epsilon": float,
    "accountant": str,
    "guarantee": str,
    "accuracy": float,
    "f1": float,
    "matthews": float,
    "calibration_error": float,
    "majority_accuracy": float,
    "batch_size": int,
    "micro_batches": int,
    "clip": float,
    "learning_rate": float,
    "epochs": float,
    "scope": str,
    "epsilon_gdp": float,
    "epsilon_rdp": float,
    "epsilon_pld": float,
    "delta": float,
    "sigma": float,
    "noise_multiplier": float,
    "noise_coordinates": int,
    "examples_per_second": float,
    "peak_memory_bytes": int,
    "prepare_seconds": float,
    "train_seconds": float,
    "steps": int,
    "records": int,
    "unit": str,  # what `records` counts and ε protects: record, or person
    "plan_hash": str,
    "node": str,
    "seed_index": int,
    "audit_epsilon": float,
    "verdict": str,  # the outcome of an audit; files and queries of users know it by this name
    "error": str,
}
SPLIT = "accuracy_"


def flatten(record: Mapping[str, Any], select: Select = "last") -> Row:
    """One flat row for people: every column is there, what is not known is None."""
    plan, privacy, cost = (section(record, name) for name in ("plan", "privacy", "cost"))
    trial, audit = section(record, "trial"), section(record, "audit")
    metrics = quoted_metrics(record, select)
    spent = section(privacy, "epsilon")
    ended = "finished" if record.get("finished") else "stopped" if "finished" in record else None
    facts = {
        **{name: plan.get(name) for name in _FROM_PLAN},
        **{name: privacy.get(name) for name in _FROM_PRIVACY},
        **{name: cost.get(name) for name in _FROM_COST},
        **{name: metrics.get(name) for name in _FROM_METRICS},
        **{name: trial.get(name) for name in _FROM_TRIAL},
        **{f"epsilon_{name}": spent.get(name) for name in ("gdp", "rdp", "pld")},
        "id": trial.get("id") or record.get("plan_hash"),
        "status": trial.get("status") or ended,
        "accuracy": metrics.get("accuracy"),
        "delta": privacy.get("delta", plan.get("delta")),
        "plan_hash": record.get("plan_hash"),
        "unit": ("person" if plan.get("user_column") else "record") if plan else None,
        "audit_epsilon": audit.get("epsilon"),
        "verdict": audit.get("verdict"),
    }
    # Plan fields that a method does not use hold their defaults; showing them would mislead.
    if len(modes_of(plan.get("method"))) < 2:
        facts["mode"] = None
    if not is_private(plan.get("method")):
        facts["accountant"] = None
    row: Row = {}
    for name, kind in COLUMNS.items():
        row[name] = scalar(facts.get(name), kind)
        if name == "accuracy":
            splits = sorted(str(key) for key in metrics if str(key).startswith(SPLIT))
            row |= {split: scalar(metrics[split], float) for split in splits}
    return row


_FROM_PLAN = (
    *("method", "mode", "task", "model", "scope", "epsilon", "accountant", "records"),
    *("batch_size", "micro_batches", "clip", "learning_rate", "epochs"),
)
_FROM_PRIVACY = ("guarantee", "sigma", "noise_multiplier", "noise_coordinates", "steps")
_FROM_COST = ("examples_per_second", "peak_memory_bytes", "prepare_seconds", "train_seconds")
_FROM_METRICS = ("f1", "matthews", "calibration_error", "majority_accuracy")
_FROM_TRIAL = ("sweep", "node", "seed_index", "error")


def quoted_metrics(record: Mapping[str, Any], select: Select = "last") -> Mapping[str, Any]:
    """The scores by one rule, whatever rule the version that wrote the record had."""
    metrics = section(record, "metrics")
    if metrics.get("rule", RULES["last"]) == RULES[select]:
        return metrics
    try:
        return quote(record["history"], select)
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return metrics  # a history that cannot be read: the record's own choice


def columns(rows: Sequence[Row]) -> list[str]:
    """The columns that `rows` have together, in their fixed order."""
    splits = sorted({name for row in rows for name in row if name.startswith(SPLIT)})
    names = list(COLUMNS)
    after = names.index("accuracy") + 1
    return [*names[:after], *splits, *names[after:]]


def to_csv(rows: Sequence[Row], names: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_text(name) for name in names])
    writer.writerows([csv_text(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def csv_text(value: Any) -> Any:
    """Spreadsheets run text that looks like a formula; an apostrophe makes it text again."""
    if not isinstance(value, str):
        return value
    formula = value.lstrip().startswith(("=", "+", "-", "@")) or value.startswith(("\t", "\r"))
    return f"'{value}" if formula else value


def to_parquet(rows: Sequence[Row], names: Sequence[str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Types are fixed, so that a column without any value joins with the same column of other files.
    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    schema = pa.schema([(name, types[COLUMNS.get(name, float)]) for name in names])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), sink)
    return bytes(sink.getvalue().to_pybytes())


def section(record: Any, name: str) -> Mapping[str, Any]:
    """A part of a record; records of failed trials lack some, broken ones hold nonsense there."""
    part = record.get(name) if isinstance(record, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def scalar(value: Any, kind: type) -> Any:
    """`value` as its column's type, else None. JSON files hold an infinite ε as "inf"."""
    if value is None or isinstance(value, Mapping | list | bool):
        return None
    if kind is str:
        return str(value).encode("utf-8", "replace").decode()
    try:
        number = float(value)
        if math.isnan(number) or (kind is int and not abs(number) < 2**63):
            return None
        if kind is int:
            return int(number) if number == int(number) else None
        return number
    except (TypeError, ValueError, OverflowError):
        return None
