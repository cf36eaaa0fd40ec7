"""Data on a cluster: rows are tokenised and encoded on all machines, and trials share one copy.

Tokens and initial weights travel through Ray's object store, one copy a node. numpy arrays are what
Ray hands out without copying, so tables and weights are kept as such.

With `DPFP_SHARED_CACHE` (a folder or a URI) the driver puts representations there as Arrow shards,
and trials get the table's name in place of its rows. The first trial on a machine that reads a row
copies the shards into that machine's cache; all trials there map the file. Sums over all rows
(`moments`) need no copy: all machines add up shards. Shards hold private data in another form, and
are no release.

    <shared cache>/representations/<key>/000000.arrow
"""

import copy
import dataclasses
import functools
import itertools
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from dpfp_ray.data import Table
from dpfp_ray.data.tokens import Chunk, Encoded, encode_chunk, tokenise_here
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.representations import RepresentationTable, Rows, keep, kept, shards
from dpfp_ray.models.row_store import Encoder, Shard, Work, encode_here
from dpfp_ray.models.scopes import initialise
from dpfp_ray.plan.plan import Plan
from dpfp_ray.sweeps.cluster import RayOptions, connected, settings
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import Files, below, open_files, public
from dpfp_ray.system.whole_files import PRIVATE
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.prepare import Data, Hands, Inputs, Prepared, Public, build_model

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True)
class SharedModel:
    """A classifier as a skeleton without numbers, and its numbers as arrays."""

    skeleton: bytes
    arrays: dict[str, NDArray[np.float32]]

    @staticmethod
    def of(model: Classifier) -> "SharedModel":
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in _tensors(model).items()}
        return SharedModel(pickle.dumps(copy.deepcopy(model).to("meta")), arrays)

    def build(self, plan: Plan, head_seed: int) -> Classifier:
        model: Classifier = pickle.loads(self.skeleton)
        model = model.to_empty(device="cpu")
        with torch.no_grad():
            for name, tensor in _tensors(model).items():
                # Copied, because all trials on this node read the same arrays.
                np.copyto(tensor.numpy(), self.arrays[name])
        initialise(model, head_seed)
        return model


def share_inputs(plan: Plan, inputs: Inputs) -> "ray.ObjectRef[Inputs]":
    """Put one copy of `plan`'s inputs into the object store."""
    import ray

    model = build_model(
        Prepared(inputs.bind(plan), inputs, 0.0), seed=0, device=torch.device("cpu")
    )
    dev = {name: _handed_out(table) for name, table in inputs.data.dev.items()}
    data, public = Data(_handed_out(inputs.data.train), dev), inputs.public
    # The private records stay on the driver; the model is rebuilt for each trial.
    build = SharedModel.of(model).build
    shared = dataclasses.replace(
        inputs,
        data=data,
        make_model=build,
        records=None,
        dev_records={},
        words=inputs.words and _handed_out(inputs.words),
        public=public and Public(_handed_out(public.rows), _handed_out(public.tokens)),
    )
    return ray.put(shared)


def _handed_out(table: Any) -> Any:
    """By name, where there is a cache that all machines reach; else memory-mapped files as plain
    arrays: another node cannot open our files. They are copied once, from the files into the object
    store, and not into this process's own memory."""
    place = shared_cache()
    table = publish(table, place) if place else table
    arrays: dict[str, Any] = {}
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if isinstance(value, np.ndarray):
            arrays[field.name] = np.asarray(value)
        elif isinstance(value, dict):
            arrays[field.name] = {name: np.asarray(column) for name, column in value.items()}
    return dataclasses.replace(table, **arrays)


def _tensors(model: Module) -> dict[str, Tensor]:
    """Parameters and all buffers; some buffers (position ids) are in no state_dict."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


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
        empty = np.empty((0, self.shape[1]), self.dtype)
        parts = zip(shards(len(table)), shard_names(len(table)), strict=True)
        references = (
            task.remote(self.place, name, table.shard(rows, empty), work) for rows, name in parts
        )
        yield from in_order(references, lambda: machines)


def in_order(references: Iterator[Any], most: Callable[[], float]) -> Iterator[Any]:
    """The values of Ray's `references`, of which at most so many are on their way."""
    import ray

    waited_for: deque[Any] = deque()
    for reference in references:
        waited_for.append(reference)
        if len(waited_for) >= most():
            yield ray.get(waited_for.popleft())
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
    dtype, files = np.dtype(kind), files_of(place, key)
    table = kept(key, rows, dtype)
    if table is None:
        content = (from_arrow(files.read_name(name)) for name in shard_names(rows))
        table = keep(key, content, rows, dtype)
    if table is None:
        raise UserError(f"the rows in {public(place)} do not fit their table; delete them")
    return table


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


LEAST_ROWS = 32_768  # fewer are done here before a cluster has begun


def hands_of(options: RayOptions) -> Hands:
    """This process where Ray is started here, or reached by Ray Client; else the cluster."""
    if options.address == "local" or options.address.startswith("ray://"):
        return Hands()
    work = ClusterWork(options.address)
    return Hands(work.tokenise, work.encode)


class ClusterWork:
    """`Hands` for the cluster at `address`; it is joined when there are enough rows to share.

    A part of the rows is the same as on one machine, so the numbers are the same.
    """

    def __init__(self, address: str, least: int = LEAST_ROWS) -> None:
        self.address, self.least = address, least

    def tokenise(self, chunks: Iterator[Chunk], tokenizer: Any, limit: int) -> Iterator[Encoded]:
        few, chunks = self._few(chunks, lambda chunk: len(chunk[0]))
        if few:
            return tokenise_here(chunks, tokenizer, limit)
        return self._stream(chunks, encode_chunk, tokenizer, limit)

    def encode(
        self, works: Iterator[Work], model: str, kind: str, precision: str, name: str
    ) -> Iterator[Shard]:
        few, works = self._few(works, lambda work: len(work.table))
        if few:
            return encode_here(works, model, kind, precision, name)
        return self._stream(works, encode_rows, model, kind, precision)

    def _few(self, parts: Iterator[T], rows: Callable[[T], int]) -> tuple[bool, Iterator[T]]:
        """Whether `parts` have fewer rows than are worth sharing; and all of them, again."""
        read, count = [], 0
        for part in parts:
            read.append(part)
            count += rows(part)
            if count >= self.least:
                return False, itertools.chain(read, parts)
        return True, iter(read)

    def _stream(self, parts: Iterator[Any], work: Callable[..., T], *facts: Any) -> Iterator[T]:
        """`work` of each part, in order, as Ray tasks; two parts a core (or GPU) are on their way.

        Ray repeats a task whose machine is lost.
        """
        with settings(), connected(self.address):
            import ray

            gpus = work is encode_rows and ray.cluster_resources().get("GPU", 0) >= 1
            # max_calls=0: a process that has loaded the encoder is used again.
            task: Any = ray.remote(num_cpus=not gpus, num_gpus=int(gpus), max_calls=0)(work)
            shared = [ray.put(fact) for fact in facts]
            places = "GPU" if gpus else "CPU"
            references = (task.remote(part, *shared) for part in parts)
            yield from in_order(references, lambda: 2 * ray.cluster_resources().get(places, 1))


def encode_rows(work: Work, model: str, kind: str, precision: str) -> Shard:
    use_threads(1)
    return encoder_of(model, kind, precision).shard(work)


@functools.lru_cache(maxsize=1)
def encoder_of(model: str, kind: str, precision: str) -> Encoder:
    """The frozen encoder of this process."""
    return Encoder(model, kind, precision)
