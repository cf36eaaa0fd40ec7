"""Results from any number of places as rows or as a DataFrame."""

from pathlib import Path
from typing import TYPE_CHECKING

from dpfp_ray.results.rows import COLUMNS, Row, columns, flatten
from dpfp_ray.results.store import load_records

if TYPE_CHECKING:
    import pandas


def load_rows(*places: str | Path) -> list[Row]:
    """All records below the given folders or URIs as flat rows (`results.rows.COLUMNS`)."""
    return [flatten(record) for record in load_records(*places)]


def load_results(*places: str | Path) -> "pandas.DataFrame":
    """All results as a table, one row for each run or trial.

    >>> load_results("runs").query("method == 'dpsgd' and epsilon <= 3")  # doctest: +SKIP
    """
    return as_frame(load_rows(*places))


def as_frame(rows: list[Row]) -> "pandas.DataFrame":
    """Rows as a DataFrame, columns typed: a column without any value joins with others all the
    same. Whole numbers that may be missing are Int64."""
    import pandas

    frame = pandas.DataFrame(rows, columns=columns(rows))
    kinds = {str: "string", int: "Int64", float: "float64"}
    return frame.astype({name: kinds[COLUMNS.get(name, float)] for name in frame.columns})
