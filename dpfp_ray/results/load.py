"""Records from any number of places, each run once; a place without any is a mistake worth saying.

`dpfp results`, `dpfp report` and notebooks all read through here.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError
from dpfp_ray.results.store import COLUMNS, Record, Row, Store, columns, flatten

if TYPE_CHECKING:
    import pandas


def load_records(*places: str | Path) -> list[Record]:
    """All records below the given folders or URIs, should one lie within another, too."""
    if not places:
        raise UserError("no place to load from; give the --output of a run or sweep")
    found = [record for place in places for record in _records_at(place)]
    return list({to_json(record): record for record in found}.values())


def load_rows(*places: str | Path) -> list[Row]:
    """The same as flat rows, with the columns of `results.store.COLUMNS`."""
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


def _records_at(place: str | Path) -> list[Record]:
    store = Store(place)
    if not store.exists():
        raise UserError(f"there is no folder {store.name}; give the --output of a run or sweep")
    records = store.records()
    if not records:
        raise UserError(f"{store.name} holds no records; give the --output of a run or sweep")
    return records
