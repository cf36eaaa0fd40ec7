"""Representations in a cache that all machines reach, and each machine's own copy of them.

With `DPFP_SHARED_CACHE` (a folder or a URI) the driver puts a table there as Arrow shards, and
trials get its name in place of its rows. The first trial on a machine that looks at a row copies
the shards into that machine's cache; it and all that follow map the file, so no table goes through
Ray's object store or is held in anybody's memory. Sums over all rows (`moments`) need no copy: they
are made shard by shard on all machines. Like the cache, shards hold private data in another form,
and are no release.

    <shared cache>/representations/<key>/000000.arrow
"""

import dataclasses
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpfp_ray.data import Table
from dpfp_ray.models.representations import RepresentationTable, Rows, keep, kept, shards
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import Files, below, open_files, public
from dpfp_ray.system.whole_files import PRIVATE
from dpfp_ray.training.machine import use_threads

COLUMN = "h"
T = TypeVar("T")


def shared_cache() -> str | None:
    """`$DPFP_SHARED_CACHE`, if there is one; a folder as other machines' processes find it."""
    place = os.environ.get("DPFP_SHARED_CACHE")
    return place if not place or "://" in place else os.path.abspath(os.path.expanduser(place))


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The rows h of a table, in the shared cache at `place`; who looks at one maps them all.

    It stands where an array would, and has of an array what is used of h.
    """

    place: str
    key: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]

    def __getitem__(self, rows: Any) -> Any:
        return np.asarray(self)[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(mapped(self.place, self.key, self.shape[0], self.dtype.str), dtype)

    def by_shard(
        self, table: RepresentationTable, work: Callable[[RepresentationTable], T]
    ) -> Iterator[T]:
        """`work` of each shard, in order, one on each machine at a time: they read it from the
        shared cache, and nobody needs all rows. A machine that is alone maps its own copy."""
        import ray

        machines = sum(node["Alive"] for node in ray.nodes())
        if machines == 1:
            yield from dataclasses.replace(table, h=np.asarray(self)).by_shard(work)
            return
        # It holds no core: the trial, which waits for it, holds one already.
        task: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(work_on_shard)
        waited_for: deque[Any] = deque()
        for rows, name in zip(shards(len(table)), shard_names(len(table)), strict=True):
            if len(waited_for) == machines:
                yield ray.get(waited_for.popleft())
            rest = table.shard(rows, np.empty((0, self.shape[1]), self.dtype))
            waited_for.append(task.remote(self.place, name, rest, work))
        while waited_for:
            yield ray.get(waited_for.popleft())


def work_on_shard(
    place: str, name: str, rest: RepresentationTable, work: Callable[[RepresentationTable], T]
) -> T:
    use_threads(1)
    h = from_arrow(files_of(place, rest.key).read_name(name))
    return work(dataclasses.replace(rest, h=h))


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


def publish(table: Table, place: str) -> Table:
    """`table`, its rows by name once they are in the shared cache; those that are stay."""
    if not isinstance(table, RepresentationTable) or not len(table):
        return table
    files = files_of(place, table.key)
    there = set(files.names())
    for rows, name in zip(shards(len(table)), shard_names(len(table)), strict=True):
        if name not in there:
            files.write(name, to_arrow(table.h[rows]), PRIVATE)
    h: Any = SharedRows(place, table.key, (len(table), table.width), table.h.dtype)
    return dataclasses.replace(table, h=h)


def files_of(place: str, key: str) -> Files:
    return open_files(below(below(place, "representations"), key))


def shard_names(rows: int) -> list[str]:
    return [f"{number:06}.arrow" for number in range(len(shards(rows)))]


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
