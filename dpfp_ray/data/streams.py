"""Tables of many files, and of `datasets`: read in order, piece by piece.

A pattern such as `part-*.parquet` is one table: the rows of its files one after the other, files by
name with their numbers in order (part-2 before part-10).
"""

import re
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from dpfp_ray.data.readers import (
    BATCH,
    JSONL,
    SUFFIXES,
    RawTable,
    Row,
    numbered,
    open_table,
    shorten,
)
from dpfp_ray.system.errors import UserError


def files_of(name: str | Path) -> list[Path]:
    """The files that a pattern stands for; the one file that any other name does."""
    path = Path(name).expanduser()
    if path.exists() or not has_magic(str(path)):
        return [path]
    found = [Path(one) for one in glob(str(path), recursive=True)]
    return sorted((one for one in found if one.is_file()), key=_in_order)


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

    known = None if all(table.text_columns is None for table in tables) else some
    return RawTable(path, columns, rows, first.unit, known)


def _rows(table: RawTable, columns: tuple[str, ...], wanted: Sequence[int]) -> Iterator[Row]:
    if table.columns == columns:
        for row in table.rows(wanted):
            yield Row(row.line, row.fields, row.problem, table.path)
        return
    there = [name for name in (columns[i] for i in wanted) if name in table.columns]
    for row in table.rows([table.columns.index(name) for name in there]):
        found = dict(zip(there, row.fields, strict=False))
        yield Row(row.line, [found.get(columns[i]) for i in wanted], row.problem, table.path)


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
