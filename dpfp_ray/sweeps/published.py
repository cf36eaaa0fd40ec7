"""Representations in a cache that all machines reach, and each machine's own copy of them.

With `DPFP_SHARED_CACHE` (a folder or a URI) the driver puts a table there as Arrow shards, and
trials get its name in place of its rows. The first trial on a machine copies the shards into that
machine's cache; it and all that follow map the file, so no table goes through Ray's object store or
is held in anybody's memory. Like the cache they hold private data in another form, and are no
release.

    <shared cache>/representations/<key>/000000.arrow
"""

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpfp_ray.data import Table
from dpfp_ray.data.storage import Files, below, open_files, public
from dpfp_ray.data.whole_files import PRIVATE
from dpfp_ray.models.representations import RepresentationTable, Rows, keep, kept
from dpfp_ray.plan.errors import UserError

SHARD = 65_536  # rows
COLUMN = "h"


def shared_cache() -> str | None:
    """`$DPFP_SHARED_CACHE`, if there is one; a folder as other machines' processes find it."""
    place = os.environ.get("DPFP_SHARED_CACHE")
    return place if not place or "://" in place else os.path.abspath(os.path.expanduser(place))


@dataclass(frozen=True, eq=False)
class Published:
    """A `RepresentationTable` whose rows lie in the shared cache at `place`."""

    place: str
    rest: RepresentationTable  # all but its rows
    shape: tuple[int, int]
    kind: str

    def table(self) -> RepresentationTable:
        """With its rows, mapped from this machine's cache."""
        return dataclasses.replace(
            self.rest, h=mapped(self.place, self.rest.key, self.shape[0], self.kind)
        )


@functools.lru_cache(maxsize=4)  # a process runs many trials on one table
def mapped(place: str, key: str, rows: int, kind: str) -> Rows:
    """The rows in this machine's cache, copied there if they are not."""
    found = kept(key, rows, np.dtype(kind))
    if found is None:
        files = files_of(place, key)
        shards = (from_arrow(files.read_name(name)) for name in shard_names(rows))
        found = keep(key, shards, rows, np.dtype(kind))
    if found is None:
        raise UserError(f"the rows in {public(place)} do not fit their table; delete them")
    return found


def publish(table: Table, place: str) -> "Table | Published":
    """`table` itself, or its name once its rows are in the shared cache; those that are stay."""
    if not isinstance(table, RepresentationTable) or not len(table):
        return table
    files = files_of(place, table.key)
    there = set(files.names())
    for number, name in enumerate(shard_names(len(table))):
        if name not in there:
            rows = table.h[number * SHARD : (number + 1) * SHARD]
            files.write(name, to_arrow(rows), PRIVATE)
    width = table.h.shape[1]
    rest = dataclasses.replace(table, h=np.empty((0, width), table.h.dtype))
    return Published(place, rest, (len(table), width), table.h.dtype.str)


def opened(table: Any) -> Any:
    return table.table() if isinstance(table, Published) else table


def files_of(place: str, key: str) -> Files:
    return open_files(below(below(place, "representations"), key))


def shard_names(rows: int) -> list[str]:
    return [f"{number:06}.arrow" for number in range(-(-rows // SHARD))]


def to_arrow(rows: npt.NDArray[Any]) -> bytes:
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    table = pa.table({COLUMN: pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_arrow(content: bytes) -> npt.NDArray[Any]:
    column = pa.ipc.open_file(pa.BufferReader(content)).read_all().column(COLUMN).combine_chunks()
    return np.asarray(column.flatten().to_numpy()).reshape(-1, column.type.list_size)
