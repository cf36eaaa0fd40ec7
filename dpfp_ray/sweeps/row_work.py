"""Tokenising and encoding on all machines of a cluster, through Ray Data.

The driver reads the rows and keeps what is made of them, on its disk; between the two they go out
in windows, stream through Ray Data's tasks (tokenising) and actors (the frozen encoder, on GPUs
where there are some), and come back in order. Neither all texts nor all representations are ever in
the driver's memory or in the object store. A piece of work is what it is on one machine, so the
numbers are the same.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from dpfp_ray.data.tokens import (
    LENGTHS,
    Chunk,
    Encoded,
    TokenTable,
    encode_chunk,
    tokenise_here,
)
from dpfp_ray.models.row_store import Encoder, Shard, Work, encode_here
from dpfp_ray.sweeps.cluster import connected, settings
from dpfp_ray.sweeps.resources import RayOptions
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.prepare import Hands

LEAST_ROWS = 32_768  # fewer are done here before a cluster has begun
WINDOW = 1_000_000  # rows that are on their way at once, at most
DIGESTS, PAD = "digests", "pad"
T = TypeVar("T")


def hands_of(options: RayOptions) -> Hands:
    """This process where Ray is started here, or reached by Ray Client; else the cluster."""
    if options.address == "local" or options.address.startswith("ray://"):
        return Hands()
    work = ClusterWork(options.address)
    return Hands(work.tokenise, work.encode)


class ClusterWork:
    """`Hands` for the cluster at `address`; it is joined when there are enough rows to share."""

    def __init__(self, address: str, least: int = LEAST_ROWS, window: int = WINDOW) -> None:
        self.address, self.least, self.window = address, least, window

    def tokenise(self, chunks: Iterator[Chunk], tokenizer: Any, limit: int) -> Iterator[Encoded]:
        few, chunks = self._few(chunks, lambda chunk: len(chunk[0]))
        if few:
            yield from tokenise_here(chunks, tokenizer, limit)
            return

        def change(table: pa.Table) -> pa.Table:
            pairs = table.column("pairs").to_pylist() if "pairs" in table.column_names else None
            chunk = table.column("texts").to_pylist(), pairs
            return as_lists(encode_chunk(chunk, tokenizer, limit))

        for made in self._stream(map(chunk_table, chunks), change):
            yield from_lists(made)

    def encode(
        self, works: Iterator[Work], model: str, kind: str, precision: str, name: str
    ) -> Iterator[Shard]:
        few, works = self._few(works, lambda work: len(work.table))
        if few:
            yield from encode_here(works, model, kind, precision, name)
            return
        facts = {"model": model, "kind": kind, "precision": precision}
        for made in self._stream(map(work_table, works), EncodeBatches, **facts):
            yield shard_of(made)

    def _few(self, parts: Iterator[T], rows: Callable[[T], int]) -> tuple[bool, Iterator[T]]:
        """Whether `parts` have fewer rows than are worth sharing; and all of them, again."""
        looked_at, count = [], 0
        for part in parts:
            looked_at.append(part)
            count += rows(part)
            if count >= self.least:
                return False, itertools.chain(looked_at, parts)
        return True, iter(looked_at)

    def _stream(self, tables: Iterator[pa.Table], change: Any, **facts: Any) -> Iterator[pa.Table]:
        """What `change` makes of each table, in order; each window is one pass of Ray Data."""
        with ExitStack() as session:
            session.enter_context(settings())
            session.enter_context(connected(self.address))
            for window in windows(tables, self.window):
                yield from whole(stream(window, change, **facts), [len(one) for one in window])


def windows(tables: Iterator[pa.Table], most: int) -> Iterator[list[pa.Table]]:
    """Some tables after the other, of about `most` rows together."""
    window: list[pa.Table] = []
    for table in tables:
        window.append(table)
        if sum(map(len, window)) >= most:
            yield window
            window = []
    if window:
        yield window


def stream(tables: Sequence[pa.Table], change: Any, **facts: Any) -> Iterator[pa.Table]:
    """`change` of each table, by Ray Data: a function as tasks, a class as actors."""
    import ray
    import ray.data

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    how: dict[str, Any] = {"num_cpus": 1}
    if isinstance(change, type):
        gpus = int(ray.cluster_resources().get("GPU", 0))
        places = gpus or max(1, int(ray.cluster_resources().get("CPU", 1)))
        how = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        how |= {"fn_constructor_kwargs": facts, "concurrency": (1, min(places, len(tables)))}
    references: list[Any] = [ray.put(table) for table in tables]
    rows = ray.data.from_arrow_refs(references)
    made = rows.map_batches(change, batch_size=None, batch_format="pyarrow", **how)
    yield from made.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)


def whole(parts: Iterator[pa.Table], sizes: Sequence[int]) -> Iterator[pa.Table]:
    """Tables of `sizes` rows again: Ray Data may cut large ones."""
    kept: list[pa.Table] = []
    for size in sizes:
        while sum(map(len, kept)) < size:
            kept.append(next(parts))
        table = pa.concat_tables(kept)
        yield table.slice(0, size).combine_chunks()
        kept = [table.slice(size)] if len(table) > size else []


class EncodeBatches:
    """A frozen encoder in an actor of Ray Data."""

    def __init__(self, model: str, kind: str, precision: str) -> None:
        use_threads(1)
        self.encoder = Encoder(model, kind, precision)

    def __call__(self, table: pa.Table) -> pa.Table:
        return shard_table(self.encoder.shard(work_of(table)))


# Work and what comes of it as Arrow tables, a row of which is a row of ours. ----------------------


def chunk_table(chunk: Chunk) -> pa.Table:
    texts, pairs = chunk
    columns = {"texts": pa.array(texts, pa.large_string())}
    if pairs is not None:
        columns["pairs"] = pa.array(pairs, pa.large_string())
    return pa.table(columns)


def as_lists(encoded: Encoded) -> pa.Table:
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(encoded[LENGTHS])])
    return pa.table(
        {
            name: pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat))
            for name, flat in encoded.items()
            if name != LENGTHS
        }
    )


def from_lists(table: pa.Table) -> Encoded:
    """As `encode_chunk` gives it."""
    found: Encoded = {}
    for name in table.column_names:
        lists = table.column(name).combine_chunks()
        found[name] = lists.flatten().to_numpy()
        lengths = lists.value_lengths().to_numpy().astype(np.int64)
    found[LENGTHS] = lengths
    return found


def work_table(work: Work) -> pa.Table:
    table = as_lists({**work.table.columns, LENGTHS: work.table.lengths})
    table = table.append_column(DIGESTS, rows_array(work.digests.view("u1").reshape(-1, 16)))
    pads = np.full(len(table), work.table.pad_token_id, np.int64)
    return table.append_column(PAD, pa.array(pads))


def work_of(table: pa.Table) -> Work:
    digests, pad = array_of(table, DIGESTS), table.column(PAD)[0].as_py()
    columns = from_lists(table.drop_columns([DIGESTS, PAD]))
    lengths = columns.pop(LENGTHS)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = TokenTable(columns, offsets, np.zeros(len(lengths), np.int64), pad)
    return Work(tokens, digests.view("S16").reshape(-1))


def shard_table(shard: Shard) -> pa.Table:
    columns = {
        DIGESTS: rows_array(shard.digests.view("u1").reshape(-1, 16)),
        "last": rows_array(shard.last),
    }
    if shard.layers.size:  # Arrow has no rows of no numbers
        columns["layers"] = rows_array(shard.layers.reshape(len(shard.layers), -1))
    return pa.table(columns)


def shard_of(table: pa.Table) -> Shard:
    last, none = array_of(table, "last"), np.empty(0, np.float16)
    layers = array_of(table, "layers") if "layers" in table.column_names else none
    layers = layers.reshape(len(last), -1, last.shape[1])
    return Shard(array_of(table, DIGESTS).view("S16").reshape(-1), last, layers)


def rows_array(rows: Any) -> pa.FixedSizeListArray:
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])


def array_of(table: pa.Table, name: str) -> Any:
    """The rows of a column as one array."""
    column = table.column(name).combine_chunks()
    return np.ascontiguousarray(column.flatten().to_numpy()).reshape(-1, column.type.list_size)
