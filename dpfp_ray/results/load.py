"""Results from any number of places as rows or as a DataFrame."""

from pathlib import Path
from typing import TYPE_CHECKING

from dpfp_ray.results.query import filter_rows, select_columns, sort_rows
from dpfp_ray.results.rows import COLUMNS, Row, flatten
from dpfp_ray.results.rows import columns as columns_of
from dpfp_ray.results.store import load_records

if TYPE_CHECKING:
    import pandas


def find_rows(
    *places: str | Path, where: str | None = None, sort: str | None = None, limit: int | None = None
) -> tuple[list[Row], list[str], int]:
    """Flat rows (`results.rows.COLUMNS`), all columns, and how many rows match in all."""
    rows = [flatten(record) for record in load_records(*places)]
    known = columns_of(rows)
    found = sort_rows(filter_rows(rows, where, known), sort, known)
    return found[:limit], known, len(found)


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
    rows, known, _ = find_rows(*places, where=where, sort=sort, limit=limit)
    frame = as_frame(rows)
    if columns is not None:
        frame = frame[select_columns(columns, known)]
    return frame


def as_frame(rows: list[Row]) -> "pandas.DataFrame":
    """Rows as a DataFrame, columns typed: a column without any value joins with others all the
    same. Whole numbers that may be missing are Int64."""
    import pandas

    frame = pandas.DataFrame(rows, columns=columns_of(rows))
    kinds = {str: "string", int: "Int64", float: "float64"}
    return frame.astype({name: kinds[COLUMNS.get(name, float)] for name in frame.columns})
