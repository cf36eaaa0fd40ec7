"""Records of finished, failed and running trials on storage: one JSON file each, whole or absent.

STORE/records/ID.json     one trial each, written in one rename; a crash loses none and halves none
STORE/results.{jsonl,csv,parquet}   the same as one table, written by `export`

A store is a folder or a URI (s3://, gs://, file://). Below a folder, the result.json files that
`dpfp train` leaves, and other stores, belong to it too: `runs/` shows everything that was run.
"""

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpfp_ray.results.query import filter_rows, select_columns, sort_rows
from dpfp_ray.results.rows import (
    COLUMNS,
    Row,
    columns,
    flatten,
    to_csv,
    to_parquet,
)
from dpfp_ray.results.rows import columns as columns_of
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import Files, Found, open_files
from dpfp_ray.system.whole_files import to_json
from dpfp_ray.training.record import Record, read_record, record_id

if TYPE_CHECKING:
    import pandas


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

    def put(self, record: Record) -> None:
        """Write `record`; from then on it is what everyone reads under its id."""
        if not record_id(record):
            raise ValueError("a record needs trial.id or plan_hash")
        # A lone surrogate (from an odd path in an error) becomes \udcXX, which is valid JSON.
        content = (to_json(dict(record)) + "\n").encode("utf-8", "backslashreplace")
        self.files.write(f"records/{file_name(record_id(record))}.json", content)

    def records(self) -> list[Record]:
        """All records, by id; where two have the same trial id, the one written later."""
        files = self.files.find()
        if self.files.local:
            read = [self._read(file) for file in files]
        else:
            with ThreadPoolExecutor(READERS) as pool:
                read = list(pool.map(self._read, files))
        broken = [file.path for file, record in zip(files, read, strict=True) if record is None]
        if broken:
            more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
            warnings.warn(
                f"skipped, no whole record: {', '.join(broken[:NAMED])}{more}", stacklevel=2
            )
        whole = [(record, file) for file, record in zip(files, read, strict=True) if record]
        return sorted(distinct(whole), key=record_id)

    def get(self, identity: str) -> Record | None:
        """The record that `put` last wrote under this id here."""
        try:
            return read_record(self.files.read_name(f"records/{file_name(identity)}.json"))
        except (OSError, ValueError):
            return None

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
            return read_record(self.files.read(file.path))
        except (OSError, ValueError):
            return None


def load_records(*locations: str | Path) -> list[Record]:
    """The records at these places, each once; a place without any is a mistake worth saying."""
    if not locations:
        raise UserError("no place to load from; give the --output of a run or sweep")
    loaded: dict[str, Record] = {}
    for location in locations:
        store = Store(location)
        if not store.exists():
            raise UserError(f"there is no folder {store.name}; give the --output of a run or sweep")
        records = store.records()
        if not records:
            raise UserError(f"{store.name} holds no records; give the --output of a run or sweep")
        loaded |= {to_json(record): record for record in records}
    return list(loaded.values())


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
        if not record["trial"].get("id"):
            loose[_copy_mark(record)] = record
            continue
        earlier = trials.get(record_id(record))
        if earlier is None or _freshness(record, file) > _freshness(*earlier):
            trials[record_id(record)] = (record, file)
    kept = [record for record, _ in trials.values()]
    copies = {_copy_mark(record) for record in kept} if loose else set()
    loose = {mark: record for mark, record in loose.items() if mark not in copies}
    runs = Counter(record_id(record) for record in loose.values())
    for mark, record in loose.items():
        identity = record_id(record)
        if runs[identity] > 1 or identity in trials:
            record["trial"] = {**record["trial"], "id": f"{identity}-{mark[:6]}"}
        kept.append(record)
    return kept


def _copy_mark(record: Record) -> str:
    """What was run and measured, without who asked for it; timings make it unique to a run."""
    facts = [record["plan_hash"], record["history"], record["cost"]]
    return hashlib.blake2b(to_json(facts).encode("utf-8", "surrogatepass")).hexdigest()


def _freshness(record: Record, file: Found) -> tuple[float, bool, float]:
    trial = record["trial"]
    began, seconds = trial.get("started_at"), trial.get("seconds") or 0.0
    return (
        file.modified if began is None else began + seconds,
        trial.get("status") != "running",
        file.modified,
    )


@dataclass(frozen=True)
class FoundRows:
    """Flat rows of runs or trials, all columns that they may have, and how many match in all."""

    rows: list[Row]
    columns: list[str]
    total: int

    def chosen(self, names: str) -> list[str]:
        """The columns that `names` asks for, such as id,accuracy,lr."""
        return select_columns(names, self.columns)

    def to_csv(self, columns: list[str] | None = None) -> str:
        return to_csv(self.rows, columns or self.columns)


def find_results(
    *places: str | Path, where: str | None = None, sort: str | None = None, limit: int | None = None
) -> FoundRows:
    """As `load_results`, in plain Python; `COLUMNS` has the columns that every row has."""
    rows = [flatten(record) for record in load_records(*places)]
    names = columns_of(rows)
    matching = sort_rows(filter_rows(rows, where, names), sort, names)
    return FoundRows(matching[:limit], names, len(matching))


def load_results(
    *places: str | Path,
    where: str | None = None,
    sort: str | None = None,
    columns: str | None = None,
    limit: int | None = None,
) -> "pandas.DataFrame":
    """All results below the folders or URIs as a table, one row for each run or trial.

    `where`, `sort`, `columns` and `limit` are those of `dpfp results`.

    >>> load_results("runs", where="method == 'dpsgd' and epsilon <= 3")  # doctest: +SKIP
    """
    matching = find_results(*places, where=where, sort=sort, limit=limit)
    frame = as_frame(matching.rows)
    return frame if columns is None else frame[matching.chosen(columns)]


def as_frame(rows: list[Row]) -> "pandas.DataFrame":
    """Rows as a DataFrame, columns typed: a column without any value joins with others all the
    same. Whole numbers that may be missing are Int64."""
    import pandas

    frame = pandas.DataFrame(rows, columns=columns_of(rows))
    kinds = {str: "string", int: "Int64", float: "float64", object: "object"}
    return frame.astype({name: kinds[COLUMNS.get(name, float)] for name in frame.columns})
