"""Records as flat rows of fixed columns, for people, tables and files."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpfp_ray.plan.method_spec import LORA_FIELDS, find_spec
from dpfp_ray.plan.plan import FIELDS, TYPES, kinds_of
from dpfp_ray.training.dev_scores import quote
from dpfp_ray.training.record import Record, Select, record_id

Row = dict[str, Any]


def _column_type(annotation: Any) -> type:
    """The type of a plan field's column; `object` holds numbers and words (ridge: auto or 0.5)."""
    kinds = set(kinds_of(annotation)) - {type(None)}
    if kinds == {float, str}:
        return object
    return next((kind for kind in (int, float) if kinds == {kind}), str)


PLAN_COLUMNS = {name: _column_type(TYPES[name]) for name in FIELDS}
# Plan fields that people look for first; all others follow the scores.
FIRST_FIELDS = ("method", "mode", "task", "model", "epsilon", "accountant")
FILE_FIELDS = ("data_dir", "train_file", "dev_file", "public_file")  # only their last part is shown
# Every column of a flat row, in the order in which people and files see them.
# `accuracy_<split>` columns, if any, follow `accuracy`.
COLUMNS: dict[str, type] = {
    **dict.fromkeys(("id", "sweep", "status"), str),
    **{name: PLAN_COLUMNS[name] for name in FIRST_FIELDS},
    "guarantee": str,
    **dict.fromkeys(
        ("accuracy", "f1", "matthews", "calibration_error", "majority_accuracy"), float
    ),
    **{name: kind for name, kind in PLAN_COLUMNS.items() if name not in FIRST_FIELDS},
    "unit": str,  # what `records` counts and ε protects: record, or person
    **dict.fromkeys(("epsilon_gdp", "epsilon_rdp", "epsilon_pld"), float),
    **dict.fromkeys(("sigma", "noise_multiplier", "noise_to_signal"), float),
    **dict.fromkeys(("noise_coordinates", "steps"), int),
    "examples_per_second": float,
    "peak_memory_bytes": int,
    **dict.fromkeys(("prepare_seconds", "train_seconds"), float),
    **dict.fromkeys(("plan_hash", "node"), str),
    "seed_index": int,
    "audit_epsilon": float,
    "verdict": str,  # the outcome of an audit; files and queries of users know it by this name
    "error": str,
}
SPLIT = "accuracy_"
LONGEST_LIST = 1000  # class names in one cell


def flatten(record: Record, select: Select = "last") -> Row:
    """One flat row for people: every column is there, what is not known is None."""
    plan, privacy, trial = record["plan"], record["privacy"], record["trial"]
    audit, metrics = record["audit"], quote(record["history"], select)
    ended = "finished" if record["finished"] else "stopped"
    facts: dict[str, Any] = {
        **_used_fields(plan),
        **privacy,
        **record["cost"],
        **metrics,
        **{name: trial.get(name) for name in ("sweep", "node", "seed_index", "error")},
        **{f"epsilon_{name}": value for name, value in privacy.get("epsilon", {}).items()},
        "epsilon": plan.get("epsilon"),
        "id": record_id(record),
        "status": trial.get("status") or ended,
        "delta": privacy.get("delta", plan.get("delta")),
        "noise_to_signal": noise_to_signal(plan, privacy),
        "plan_hash": record["plan_hash"],
        "unit": "person" if plan.get("user_column") else "record",
        "audit_epsilon": audit.get("epsilon"),
        "verdict": audit.get("verdict"),
    }
    row: Row = {}
    for name, kind in COLUMNS.items():
        row[name] = _cell(facts.get(name), kind)
        if name == "accuracy":
            row |= {key: metrics[key] for key in sorted(metrics) if key.startswith(SPLIT)}
    return row


def noise_to_signal(plan: Mapping[str, Any], privacy: Mapping[str, Any]) -> float | None:
    """Length of the noise in what a step learns from, over the most that its records may weigh.

    A sum of clipped parts gets one noise of σ√k, against n·C: (σ/C)·√k / n. Rows that get noise one
    by one average it: (σ/C)·√(k / n). n is B, which is all records for a single release.
    """
    spec = find_spec(plan.get("method"), plan.get("mode"))
    ratio, k = privacy.get("noise_multiplier"), privacy.get("noise_coordinates")
    n = plan.get("batch_size")
    if spec is None or not ratio or not k or not n:
        return None
    rows = plan.get("method") == "dpfp" and plan.get("mode") != "moments"
    return float(ratio * math.sqrt(k / n) if rows else ratio * math.sqrt(k) / n)


def _cell(value: Any, kind: type) -> Any:
    """`value` as it stands in a column of this type."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) if len(value) < LONGEST_LIST else None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and math.isnan(value):
        return None
    return float(value) if kind is float and value is not None else value


def _used_fields(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's fields, without those that its method does not use: they hold defaults, which
    would mislead."""
    spec = find_spec(plan.get("method"), plan.get("mode"))
    unused = set() if spec is None else set(spec.unused)
    unused -= {"batch_size", "epochs"}  # of one release: all records, once
    if plan.get("scope") != "lora":
        unused |= set(LORA_FIELDS)
    facts = {name: plan.get(name) for name in FIELDS if name not in unused}
    for name in FILE_FIELDS:
        if facts.get(name):
            facts[name] = str(facts[name]).replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    return facts


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
    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), object: pa.string()}
    schema = pa.schema([(name, types[COLUMNS.get(name, float)]) for name in names])
    sink = pa.BufferOutputStream()
    mixed = [name for name in names if COLUMNS.get(name) is object]
    texts = [{**row, **{n: None if row[n] is None else str(row[n]) for n in mixed}} for row in rows]
    pq.write_table(pa.Table.from_pylist(texts, schema=schema), sink)
    return bytes(sink.getvalue().to_pybytes())
