"""Rows of the user's files: TSV, CSV, Parquet and JSONL behind one interface that knows where every
row stands, so that each complaint can name the file, the line and the fix. They are read piece by
piece: no file need fit into memory.

A line ends at `\\n` (or `\\r\\n`) and nowhere else: Python's own `splitlines` would also split at
U+2028, U+0085, `\\x0b` and others, which real texts contain.

Tables of many files, and of `datasets`: read in order, piece by piece.

A pattern such as `part-*.parquet` is one table: the rows of its files one after the other, files by
name with their numbers in order (part-2 before part-10).
"""

import csv
import difflib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from glob import glob, has_magic
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

from dpfp_ray.system.errors import Guess, UserError

# The order is also the preference when a folder holds the same split in several formats.
TSV, CSV = (".tsv", ".tab", ".txt"), (".csv",)
JSONL, PARQUET = (".jsonl", ".ndjson", ".json"), (".parquet", ".pq")
SUFFIXES = (*TSV, *CSV, *JSONL, *PARQUET)
BATCH = 8192  # rows of a Parquet file, or of a data set in memory, at once


class Row(NamedTuple):
    """The wanted fields of one row, or what is wrong with it."""

    line: int
    fields: list[Any]
    problem: str = ""
    path: Path | None = None  # of the file, where a table is of several


@dataclass(frozen=True)
class RawTable:
    """A file with named columns. `rows(wanted)` reads it from the start, wanted columns only.

    `unit` is "line" for text files (1-based, the header is line 1) and "row" for Parquet
    (1-based, there are no lines to look at).
    """

    path: Path
    columns: tuple[str, ...]
    rows: Callable[[Sequence[int]], Iterator[Row]]
    unit: str = "line"
    text_columns: tuple[int, ...] | None = None  # None: any may hold text

    @property
    def with_text(self) -> tuple[int, ...]:
        """Columns that may hold text."""
        every = tuple(range(len(self.columns)))
        return every if self.text_columns is None else self.text_columns

    @property
    def header(self) -> str:
        """Where the column names stand, for messages about them."""
        named_in_line_1 = self.path.suffix.lower() in (*TSV, *CSV)
        return f"{self.path}: line 1" if named_in_line_1 else f"{self.path}"

    def listed(self) -> str:
        return "the columns are " + ", ".join(shorten(name) for name in self.columns[:40])


def open_table(path: Path, names: tuple[str, ...] | None = None) -> RawTable:
    """The file's columns, known before its rows are read. `names` are for a file without header."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: unknown file type {suffix!r}; use one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "there is no such file"
        raise UserError(f"{path}: {what}; check the path")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty; give one with a header and rows")
        if suffix in PARQUET:
            return _open_parquet(path)
        if suffix in JSONL:
            return _open_jsonl(path)
        split = partial(_split_csv, delimiter=_delimiter(path)) if suffix in CSV else _split_tsv
        return _open_delimited(path, split, names)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def shorten(value: object, limit: int = 60) -> str:
    """A value as it appears in messages: quoted, on one line, never long."""
    shown = repr(value)
    return shown if len(shown) <= limit else f"{shown[: limit - 2]}…{shown[-1]}"


@dataclass
class BadRows:
    """What happens to rows that cannot be used: the first is an error, or all are counted."""

    table: RawTable
    skip: bool
    first: str = ""
    count: int = 0

    def add(self, line: int, what: str, path: Path | None = None) -> None:
        if self.skip and self.count:
            self.count += 1
            return
        place = f"{path or self.table.path}: {self.table.unit} {line}: {what}"
        if not self.skip:
            raise UserError(f"{place}; correct the row, or pass --bad-rows skip")
        self.first, self.count = place, 1

    def warn(self, kept: int) -> None:
        """Say once per table how much was left out; nothing left is an error in any case."""
        if not self.count:
            return
        if not kept:
            raise UserError(f"{self.first}; no usable row is left (all {self.count} bad)")
        warnings.warn(
            f"{self.count} of {kept + self.count} rows skipped; the first: {self.first}",
            stacklevel=2,
        )


def find_column(table: RawTable, wanted: str, flag: str) -> int:
    """The column that the user named: exactly, else ignoring case."""
    for same in (str, str.casefold):
        hits = [i for i, name in enumerate(table.columns) if same(name) == same(wanted)]
        if len(hits) == 1:
            return hits[0]
        if hits:
            raise UserError(
                f"{table.header}: {len(hits)} columns are called {wanted!r}; rename all but one"
            )
    nearest = difflib.get_close_matches(wanted, table.columns, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    if wanted.isdigit() and not hint:
        hint = " (columns have numbers with --no-header only)"
    raise UserError(
        f"{table.header}: no column {wanted!r}{hint}; {table.listed()}; give another {flag}"
    )


SAMPLE = 1 << 20  # bytes by which an encoding and a delimiter are recognised
DELIMITERS = ",;\t|"


@lru_cache(maxsize=64)
def _encoding(path: Path, size: int, modified: int) -> str:
    """UTF-8 unless the first megabyte says otherwise, which is then said once."""
    from charset_normalizer import from_bytes

    with path.open("rb") as file:
        sample = file.read(SAMPLE)
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    try:
        sample[: sample.rfind(b"\n") + 1].decode("utf-8")
    except UnicodeDecodeError:
        best = from_bytes(sample).best()
        # All that Windows writes of Western texts: its encodings' names differ only in detail.
        western = best is None or best.encoding in ("cp1250", "cp1252", "latin_1", "cp1257")
        encoding = "cp1252" if western or best is None else best.encoding
        warnings.warn(
            Guess(f"{path}: not UTF-8; read as {encoding} (if letters look wrong, convert it)"),
            stacklevel=2,
        )
        return encoding
    return "utf-8"


def _decoded_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text without its line end); bytes that do not decode name their line."""
    facts = path.stat()
    encoding = _encoding(path, facts.st_size, facts.st_mtime_ns)
    if encoding != "utf-8":
        with path.open(encoding=encoding, errors="replace", newline="\n") as lines:
            for number, text in enumerate(lines, start=1):
                yield number, text.removesuffix("\n").removesuffix("\r")
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: line {number}: byte {error.start + 1} is not UTF-8; "
                    f"convert it, e.g. iconv -f latin1 -t utf-8"
                ) from None
            yield number, text.removesuffix("\n").removesuffix("\r")


def _split_tsv(path: Path) -> Iterator[Row]:
    """Quotes are literal, as in GLUE: a lone one must not swallow the lines after it."""
    for number, text in _decoded_lines(path):
        if text:
            yield Row(number, text.split("\t"))


def _delimiter(path: Path) -> str:
    """A comma, unless another sign parts the first rows into as many fields as the header."""
    lines = [text for _, text in islice(_decoded_lines(path), 20) if text]

    def fields(sign: str) -> int:
        counts = [len(row) for row in csv.reader(lines, delimiter=sign)]
        return counts[0] if counts and len(set(counts)) == 1 else 1

    best = max(DELIMITERS, key=fields) if fields(",") == 1 else ","
    if fields(best) == 1:
        return ","
    if best != ",":
        said = f"{path}: fields are separated by {best!r}"
        warnings.warn(Guess(said), stacklevel=2)
    return best


def _split_csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    """Ordinary quoting; a quoted field may run over lines, the row is named by its first."""
    lines = (text + "\n" for _, text in _decoded_lines(path))
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    while True:
        first = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if reader.line_num > first or "end of data" in str(error):
                # Skipping here would lose an unknown number of rows, so it is never a bad row.
                raise UserError(
                    f"{path}: line {first}: a quote that opens here is not closed properly "
                    f"({error}); write a quote inside a quoted field as two"
                ) from None
            yield Row(first, [], f"not valid CSV ({error})")
            continue
        if fields:
            yield Row(first, fields)


def _open_delimited(
    path: Path, split: Callable[[Path], Iterator[Row]], names: tuple[str, ...] | None
) -> RawTable:
    header = next(split(path), None)
    if header is None:
        raise UserError(f"{path}: the file is empty; give one with a header and rows")
    if header.problem:
        raise UserError(f"{path}: line {header.line}: {header.problem}; correct the header")
    columns = names or tuple(name.strip() for name in header.fields)
    first_row = header.line if names else header.line + 1

    def rows(wanted: Sequence[int]) -> Iterator[Row]:
        for row in split(path):
            if row.line < first_row:
                continue
            if row.problem:
                yield row
            elif len(row.fields) != len(columns):
                yield Row(row.line, [], f"{len(row.fields)} fields, expected {len(columns)}")
            else:
                yield Row(row.line, [row.fields[i] for i in wanted])

    return RawTable(path, columns, rows)


def _open_jsonl(path: Path) -> RawTable:
    # Keys may be left out of single rows, so no one row can say what the columns are.
    keys: dict[str, None] = {}
    first: tuple[int, str] | None = None
    for line, value, problem in _parsed_lines(path):
        keys.update(dict.fromkeys(value))
        first = first or (line, problem)
    if not keys:
        line, problem = first or (1, "no rows")
        raise UserError(
            f"{path}: line {line}: {problem or 'no keys'}; give one JSON object in each line"
        )
    columns = tuple(keys)

    def rows(wanted: Sequence[int]) -> Iterator[Row]:
        names = [columns[i] for i in wanted]
        for line, value, problem in _parsed_lines(path):
            yield Row(line, [value.get(name) for name in names], problem)

    return RawTable(path, columns, rows)


def _parsed_lines(path: Path) -> Iterator[tuple[int, dict[str, Any], str]]:
    return (_parse_json(number, text) for number, text in _decoded_lines(path) if text.strip())


def _parse_json(number: int, text: str) -> tuple[int, dict[str, Any], str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return number, {}, f"not valid JSON ({error})"
    if not isinstance(value, dict):
        return number, {}, f"{shorten(value)} is not a JSON object"
    return number, value, ""


def _open_parquet(path: Path) -> RawTable:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({shorten(str(error))})") from None

    names = tuple(schema.names)
    texts = tuple(
        i
        for i, name in enumerate(names)
        if names.count(name) == 1 and schema.types[i] in (pa.string(), pa.large_string())
    )

    def rows(wanted: Sequence[int]) -> Iterator[Row]:
        chosen = [names[i] for i in wanted]
        try:
            with pq.ParquetFile(path) as file:
                parts = file.iter_batches(BATCH, columns=chosen)
                yield from numbered([part[name].to_pylist() for name in chosen] for part in parts)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: damaged Parquet file ({shorten(str(error))})") from None

    return RawTable(path, names, rows, unit="row", text_columns=texts)


def numbered(parts: Iterable[Sequence[Sequence[Any]]]) -> Iterator[Row]:
    """The rows of one part after the other, each a list of columns; counted from 1."""
    fields = chain.from_iterable(zip(*columns, strict=True) for columns in parts)
    return map(Row, count(1), map(list, fields))


def text_problem(value: object, column: str) -> str:
    """Why a value cannot be trained on as text; empty if it can."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return f"no {column!r}"
    if not isinstance(value, str):
        return f"{column!r} is {shorten(value)}, which is not text"
    if not value.strip():
        return f"empty {column!r}"
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        return f"{column!r} is not valid Unicode ({shorten(value)})"
    return ""


def files_of(name: str | Path) -> list[Path]:
    """The files that a pattern stands for; the one file that any other name does."""
    path = Path(name).expanduser()
    if path.exists() or not has_magic(str(path)):
        return [path]
    paths = [Path(one) for one in glob(str(path), recursive=True)]
    return sorted((one for one in paths if one.is_file()), key=_in_order)


def _in_order(path: Path) -> list[tuple[int, str]]:
    words = re.split(r"(\d+)", str(path))
    return [(int(word), word) if word.isdigit() else (-1, word) for word in words]


def open_files(path: Path, names: tuple[str, ...] | None = None) -> RawTable:
    """As `open_table`, for a file or a pattern of files that have the same columns."""
    files = files_of(path)
    if files == [path.expanduser()]:
        return open_table(files[0], names)
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: end the pattern in the files' type, one of {', '.join(SUFFIXES)}")
    if not files:
        raise UserError(f"{path}: no file has such a name; check the pattern")
    tables = [open_table(file, names) for file in files]
    first = tables[0]
    columns = tuple(dict.fromkeys(name for table in tables for name in table.columns))
    if all(table.columns == first.columns for table in tables):
        columns = first.columns
    elif path.suffix.lower() not in JSONL:  # where a key may be left out of any row
        _refuse_other_columns(first, tables)
    texts = [{table.columns[i] for i in table.with_text} for table in tables]
    some = tuple(i for i, name in enumerate(columns) if all(name in one for one in texts))

    def rows(wanted: Sequence[int]) -> Iterator[Row]:
        for table in tables:
            yield from _rows(table, columns, wanted)

    text_columns = None if all(table.text_columns is None for table in tables) else some
    return RawTable(path, columns, rows, first.unit, text_columns)


def _rows(table: RawTable, columns: tuple[str, ...], wanted: Sequence[int]) -> Iterator[Row]:
    if table.columns == columns:
        for row in table.rows(wanted):
            yield Row(row.line, row.fields, row.problem, table.path)
        return
    there = [name for name in (columns[i] for i in wanted) if name in table.columns]
    for row in table.rows([table.columns.index(name) for name in there]):
        values = dict(zip(there, row.fields, strict=False))
        yield Row(row.line, [values.get(columns[i]) for i in wanted], row.problem, table.path)


def _refuse_other_columns(first: RawTable, tables: Sequence[RawTable]) -> None:
    for table in tables:
        missing = sorted(set(first.columns) ^ set(table.columns))
        if missing:
            raise UserError(
                f"{table.path}: the columns are not those of {first.path} ({shorten(missing[0])} "
                f"is in one of them only); give files with the same columns"
            )


def open_dataset(path: Path, data: Any) -> RawTable:
    """A `datasets.Dataset`, or one in streaming mode (`IterableDataset`)."""
    names = data.column_names
    if names is None:  # a stream tells by its first row
        names = list(next(iter(data), {}))
        if not names:
            raise UserError(f"{path}: the data set has no rows; give one with rows")

    def batches(chosen: list[str]) -> Iterator[Any]:
        if hasattr(data, "__len__"):
            part = data.select_columns(chosen)
            yield from (part[start : start + BATCH] for start in range(0, len(data), BATCH))
        else:
            yield from data.iter(batch_size=BATCH)

    def rows(wanted: Sequence[int]) -> Iterator[Row]:
        chosen = [names[i] for i in wanted]
        return numbered([batch[name] for name in chosen] for batch in batches(chosen))

    return RawTable(path, tuple(map(str, names)), rows, unit="row")
