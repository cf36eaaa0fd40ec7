"""Records of finished, failed and running trials on storage: one JSON file each, whole or absent.

STORE/records/ID.json     one trial each, written in one rename; a crash loses none and halves none
STORE/results.{jsonl,csv,parquet}   the same as one table, written by `export`

A store is a folder or a URI (s3://, gs://, file://). Below a folder, the result.json files that
`dpfp train` leaves, and other stores, belong to it too: `runs/` shows everything that was run.
"""

import csv
import hashlib
import io
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from dpfp_ray.data.storage import Files, Found, open_files
from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.method_spec import is_private, modes_of

Record = dict[str, Any]
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
    "train_seconds": float,
    "steps": int,
    "records": int,
    "plan_hash": str,
    "node": str,
    "seed_index": int,
    "audit_epsilon": float,
    "verdict": str,
    "error": str,
}
SPLIT = "accuracy_"
READERS = 32  # small objects on a far store are all waiting, no work
NAMED = 5  # files that a warning lists


class Store:
    """Trial records under one folder or URI.

    `put` replaces the record of the same id in one atomic step. `records` skips what is not a whole
    record, with one warning. Readers and any number of writers may work at the same time.
    """

    def __init__(self, location: str | Path, files: Files | None = None) -> None:
        self.files = files or open_files(location)
        self.name = self.files.name

    def exists(self) -> bool:
        return self.files.exists()

    def put(self, record: Mapping[str, Any]) -> None:
        """Write `record`; from then on it is what everyone reads under its id."""
        # A lone surrogate (from an odd path in an error) becomes \udcXX, which is valid JSON.
        content = (to_json(dict(record)) + "\n").encode("utf-8", "backslashreplace")
        self.files.write(f"records/{file_name(record_id(record))}.json", content)

    def records(self) -> list[Record]:
        """All records, by id; where two have the same trial id, the one written later."""
        found = self.files.find()
        if self.files.local:
            read = [self._read(file) for file in found]
        else:
            with ThreadPoolExecutor(READERS) as pool:
                read = list(pool.map(self._read, found))
        broken = [file.path for file, record in zip(found, read, strict=True) if record is None]
        if broken:
            more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
            warnings.warn(
                f"skipped, no whole record: {', '.join(broken[:NAMED])}{more}", stacklevel=2
            )
        whole = [(record, file) for file, record in zip(found, read, strict=True) if record]
        return sorted(distinct(whole), key=record_id)

    def get(self, identity: str) -> Record | None:
        """The record that `put` last wrote under this id here."""
        try:
            record = json.loads(self.files.read_name(f"records/{file_name(identity)}.json"))
        except (OSError, ValueError):
            return None
        return dict(record)

    def rows(self) -> list[Row]:
        return [flatten(record) for record in self.records()]

    def export(self) -> list[str]:
        """The flat rows as three files beside records/; their names."""
        rows = self.rows()
        names = columns(rows)
        lines = "".join(to_json({name: row.get(name) for name in names}) + "\n" for row in rows)
        contents = {
            "results.jsonl": lines.encode(),
            "results.csv": to_csv(rows, names).encode(),
            "results.parquet": to_parquet(rows, names),
        }
        for name, content in contents.items():
            self.files.write(name, content)
        return list(contents)

    def _read(self, file: Found) -> Record | None:
        try:
            record = json.loads(self.files.read(file.path))
            record_id(record)
        except (OSError, ValueError, RecursionError):
            return None
        return dict(record)


def record_id(record: Any) -> str:
    """The trial's id, or the plan's hash for a run outside any sweep."""
    plan_hash = record.get("plan_hash") if isinstance(record, Mapping) else None
    identity = _section(record, "trial").get("id") or plan_hash
    if not identity:
        raise ValueError("a record needs trial.id or plan_hash")
    return str(identity)


def file_name(identity: str) -> str:
    """A name that no file system refuses and that cannot leave its folder; one for each id."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", identity).lstrip(".")[:100]
    if safe == identity:
        return safe
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"{safe}-{digest}"


def distinct(found: Iterable[tuple[Record, Found]]) -> list[Record]:
    """Each run once.

    Of two records of one trial the newer stays. Runs outside a sweep are named by their plan, which
    two runs may share (they differ in their secret seeds): both stay, under ids of their own,
    unless they are copies of one another or of a trial.
    """
    trials: dict[str, tuple[Record, Found]] = {}
    loose: dict[str, Record] = {}
    for record, file in found:
        if not _section(record, "trial").get("id"):
            loose[_fingerprint(record)] = record
            continue
        known = trials.get(record_id(record))
        if known is None or _freshness(record, file) > _freshness(*known):
            trials[record_id(record)] = (record, file)
    kept = [record for record, _ in trials.values()]
    copies = {_fingerprint(record) for record in kept} if loose else set()
    loose = {print_: record for print_, record in loose.items() if print_ not in copies}
    runs = Counter(record_id(record) for record in loose.values())
    for print_, record in loose.items():
        identity = record_id(record)
        if runs[identity] > 1 or identity in trials:
            record["trial"] = {**_section(record, "trial"), "id": f"{identity}-{print_[:6]}"}
        kept.append(record)
    return kept


def _fingerprint(record: Record) -> str:
    """What was run and measured, without who asked for it; timings make it unique to a run."""
    facts = [record.get(name) for name in ("plan_hash", "metrics", "history", "cost")]
    return hashlib.blake2b(to_json(facts).encode("utf-8", "surrogatepass")).hexdigest()


def _freshness(record: Record, file: Found) -> tuple[float, bool, float]:
    trial = _section(record, "trial")
    started, seconds = trial.get("started_at"), _scalar(trial.get("seconds"), float) or 0.0
    if isinstance(started, str):
        try:
            started = datetime.fromisoformat(started).timestamp()
        except ValueError:
            started = None
    began = _scalar(started, float)
    return (
        file.modified if began is None else began + seconds,
        trial.get("status") != "running",
        file.modified,
    )


def flatten(record: Mapping[str, Any]) -> Row:
    """One flat row for people: every column is there, what is not known is None."""
    plan, privacy, cost = (_section(record, name) for name in ("plan", "privacy", "cost"))
    trial, metrics, audit = (_section(record, name) for name in ("trial", "metrics", "audit"))
    spent = _section(privacy, "epsilon")
    ended = "finished" if record.get("finished") else "stopped" if "finished" in record else None
    facts = {
        **{name: plan.get(name) for name in _FROM_PLAN},
        **{name: privacy.get(name) for name in _FROM_PRIVACY},
        **{name: cost.get(name) for name in _FROM_COST},
        **{name: trial.get(name) for name in _FROM_TRIAL},
        **{f"epsilon_{name}": spent.get(name) for name in ("gdp", "rdp", "pld")},
        "id": trial.get("id") or record.get("plan_hash"),
        "status": trial.get("status") or ended,
        "accuracy": metrics.get("accuracy"),
        "delta": privacy.get("delta", plan.get("delta")),
        "plan_hash": record.get("plan_hash"),
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
        row[name] = _scalar(facts.get(name), kind)
        if name == "accuracy":
            splits = sorted(str(key) for key in metrics if str(key).startswith(SPLIT))
            row |= {split: _scalar(metrics[split], float) for split in splits}
    return row


_FROM_PLAN = (
    *("method", "mode", "task", "model", "scope", "epsilon", "accountant", "records"),
    *("batch_size", "micro_batches", "clip", "learning_rate", "epochs"),
)
_FROM_PRIVACY = ("guarantee", "sigma", "noise_multiplier", "noise_coordinates", "steps")
_FROM_COST = ("examples_per_second", "peak_memory_bytes", "train_seconds")
_FROM_TRIAL = ("sweep", "node", "seed_index", "error")


def columns(rows: Sequence[Row]) -> list[str]:
    """The columns that `rows` have together, in their fixed order."""
    splits = sorted({name for row in rows for name in row if name.startswith(SPLIT)})
    names = list(COLUMNS)
    after = names.index("accuracy") + 1
    return [*names[:after], *splits, *names[after:]]


def to_csv(rows: Sequence[Row], names: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([row.get(name) for name in names] for row in rows)
    return text.getvalue()


def to_parquet(rows: Sequence[Row], names: Sequence[str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Types are fixed, so that a column without any value joins with the same column of other files.
    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    schema = pa.schema([(name, types[COLUMNS.get(name, float)]) for name in names])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), sink)
    return bytes(sink.getvalue().to_pybytes())


def _section(record: Any, name: str) -> Mapping[str, Any]:
    """A part of a record; records of failed trials lack some, broken ones hold nonsense there."""
    part = record.get(name) if isinstance(record, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _scalar(value: Any, kind: type) -> Any:
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
