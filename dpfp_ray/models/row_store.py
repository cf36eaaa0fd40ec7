"""What a frozen encoder says of each text, kept text by text: one pass serves all who ask later.

Kept are the mean of the last layer (fp32) and the means of all layers, each scaled to norm 1 (half
precision: seven layers of a sentence in MiniLM are 5 KB). A text is found again by its own tokens,
so subsets, supersets, other layers, pairs with a text in common and repeated texts encode nothing
twice. `cls` and `pooler` are in none of these means: each has a store of its own, of one vector a
text (fp32) and no layers. Shards are folders that appear in one rename:

    encoded/<encoder, precision, kind of vector>/<shard>/{digests,last,layers}.npy

They hold private data in another form: readable by their owner only, and no release.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.data.texts import group
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.models.download import encoder_identity
from dpfp_ray.models.modeling_dpfp import unit
from dpfp_ray.models.pretrained import build_classifier
from dpfp_ray.system.cache import cache_dir
from dpfp_ray.system.terminal import counted_rows
from dpfp_ray.system.whole_files import PRIVATE, private_folder, whole_folder

# Part of every key: raise it when the meaning of the stored numbers changes.
FORMAT_VERSION = 1
INFERENCE_ROWS = 256
SHARD = 32_768  # rows: a pass that is killed loses at most these
DIGESTED_ROWS = 8192  # at once
MEANS = "layers"  # the kind of all that means of layers are enough for
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Shard:
    digests: npt.NDArray[np.bytes_]  # (n,), 16 bytes each, of a row's tokens
    last: Floats  # (n, width)
    layers: Halves  # (n, layers + 1, width); (n, 0, width) for `cls` and `pooler`


@dataclass(frozen=True)
class Work:
    """What one shard is made from: the tokens of its rows, and their digests."""

    table: TokenTable
    digests: npt.NDArray[np.bytes_]


class Encode(Protocol):
    """Who makes shards: one of each work, in their order. On this machine `encode_here` does."""

    def __call__(
        self, works: Iterator[Work], model: str, kind: str, precision: str, name: str
    ) -> Iterator[Shard]: ...


@dataclass(frozen=True)
class EncodedRows:
    """The rows of a table: row i is row `places[i]` of all shards, one after the other."""

    shards: list[Shard]
    places: npt.NDArray[np.int64]

    def last(self, rows: slice = slice(None)) -> Floats:
        return self._gather("last", rows)

    def layers(self, rows: slice = slice(None)) -> Halves:
        return self._gather("layers", rows)

    def _gather(self, name: str, rows: slice) -> Any:
        places = self.places[rows]
        kept = [getattr(shard, name) for shard in self.shards]
        found = np.empty((len(places), *kept[0].shape[1:]), kept[0].dtype)
        # In the order of the shards: each is looked at once, from its beginning to its end.
        order = np.argsort(places, kind="stable")
        in_order = places[order]
        # The place of each shard's first row, and the end of the last.
        starts = np.cumsum([0, *(len(shard.digests) for shard in self.shards)])
        bounds = np.searchsorted(in_order, starts)
        for number in np.flatnonzero(np.diff(bounds)):
            here = order[bounds[number] : bounds[number + 1]]
            found[here] = kept[number][places[here] - starts[number]]
        return found


def encode_here(
    works: Iterator[Work], model: str, kind: str, precision: str, name: str
) -> Iterator[Shard]:
    encoder: Encoder | None = None
    for work in works:
        encoder = encoder or Encoder(model, kind, precision)
        yield encoder.shard(work, name)


def kind_of(representation: str) -> str:
    return representation if representation in ("cls", "last", "pooler") else MEANS


def encoded_rows(
    table: TokenTable,
    model: str,
    kind: str,
    precision: str,
    name: str = "",
    encode: Encode = encode_here,
) -> EncodedRows:
    """Every row of `table`, encoding those that were never met; `name` is for the progress bar."""
    folder = store_of(model, kind, precision)
    shards = list(_kept_shards(folder))
    kept = sum(len(shard.digests) for shard in shards)
    digests = np.concatenate([*(shard.digests for shard in shards), _digests(table)])
    # Equal digests are one text: the first that is kept, or else the last row that has it.
    texts, firsts = group(digests.view("<u8").reshape(-1, 2))
    lasts = np.zeros(len(firsts), np.int64)
    lasts[texts[kept:]] = np.arange(len(table))  # of equal places the last counts
    rows = np.sort(lasts[firsts >= kept])
    # Before they are split into shards: similar lengths together, so that little is padded.
    rows = rows[np.argsort(table.lengths[rows], kind="stable")]
    place_of = firsts  # of each text; those to be encoded follow what is kept
    place_of[texts[kept + rows]] = kept + np.arange(len(rows))
    parts = (rows[start : start + SHARD] for start in range(0, len(rows), SHARD))
    works = (Work(table.take(part), digests[kept + part]) for part in parts)
    shards += [_keep(folder, made) for made in encode(works, model, kind, precision, name)]
    return EncodedRows(shards, place_of[texts[kept:]])


def store_of(model: str, kind: str, precision: str) -> Path:
    facts = f"{FORMAT_VERSION} {encoder_identity(model)} {precision} {kind}"
    return cache_dir() / "encoded" / hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def _digests(table: TokenTable) -> npt.NDArray[np.bytes_]:
    """Of each row's tokens; never ending in a zero byte, which numpy would drop."""
    columns = [(name, np.ascontiguousarray(table.columns[name])) for name in sorted(table.columns)]
    start = hashlib.blake2b(
        " ".join(f"{name} {column.dtype.str}" for name, column in columns).encode(), digest_size=15
    )
    found = [np.zeros(0, "S16")]
    for first in range(0, len(table), DIGESTED_ROWS):
        offsets = table.offsets[first : first + DIGESTED_ROWS + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        sides = [
            (memoryview(column[low:high].tobytes()), ((offsets - low) * column.itemsize).tolist())
            for _, column in columns
        ]
        words = []
        for row in range(len(offsets) - 1):
            digest = start.copy()
            for content, places in sides:
                digest.update(content[places[row] : places[row + 1]])
            words.append(digest.digest())
        found.append(np.frombuffer(b"\xff".join(words) + b"\xff", "S16"))
    return np.concatenate(found)


class Encoder:
    def __init__(self, model: str, kind: str, precision: str) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        encoder = build_classifier(model, kind, classes=2, scope="head")
        self.encoder, self.precision = encoder.to(self.device).eval(), precision

    @torch.inference_mode()
    def shard(self, work: Work, name: str = "") -> Shard:
        """What it says of the rows of `work`, of which there is at least one."""
        device, table = self.device, work.table
        made: tuple[Floats, Halves] | None = None
        parts = split_rows(table.lengths, INFERENCE_ROWS, PART_COST[device.type])
        for part in counted_rows(parts, f"encoding {name}".rstrip()):
            batch = {key: value.to(device) for key, value in table.collate(part).items()}
            with torch.autocast(device.type, torch.bfloat16, self.precision == "bf16"):
                last, layers = self._vectors(batch)
            if made is None:
                rows = len(table)
                made = (
                    np.empty((rows, *last.shape[1:]), np.float32),
                    np.empty((rows, *layers.shape[1:]), np.float16),
                )
            made[0][part] = last.cpu().numpy()
            made[1][part] = unit(layers).half().cpu().numpy()
        assert made is not None, "there is at least one row to encode"
        return Shard(work.digests, *made)

    def _vectors(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self.encoder.representation == MEANS:
            means = self.encoder.layer_means(batch).float()
            return means[:, -1], means
        h = self.encoder.represent(batch).float()
        return h, h[:, None][:, :0]


def _keep(folder: Path, shard: Shard) -> Shard:
    """Written and memory-mapped; in memory where nothing can be written."""
    content = hashlib.blake2b(shard.digests.tobytes(), digest_size=16).hexdigest()
    try:
        private_folder(folder.parent)
        with whole_folder(folder / content, mode=PRIVATE) as built:
            for name, array in vars(shard).items():
                np.save(built / f"{name}.npy", array)
    except OSError as error:
        # The cache saves time; a full or read-only disk is no reason not to train.
        warnings.warn(f"encoded rows are not cached in {folder}: {error}", stacklevel=4)
        return shard
    return _load(folder / content) or shard


def _kept_shards(folder: Path) -> Iterator[Shard]:
    if folder.is_dir():
        for entry in sorted(folder.iterdir()):
            if not entry.name.startswith(".") and (shard := _load(entry)) is not None:
                yield shard


def _load(entry: Path) -> Shard | None:
    """The shard if it is whole, else None: a damaged cache costs time, never a run."""
    try:
        arrays = {
            # As plain arrays on the mapped memory: np.memmap is slower to index.
            name: np.asarray(np.load(entry / f"{name}.npy", mmap_mode="r"))
            for name in ("digests", "last", "layers")
        }
    except (OSError, ValueError, EOFError):
        return None
    shard = Shard(**arrays)
    fits = (
        shard.digests.dtype == np.dtype("S16")
        and shard.last.dtype == np.float32
        and shard.layers.dtype == np.float16
        and len(shard.digests) == len(shard.last) == len(shard.layers) > 0
        and shard.layers.shape[2:] == shard.last.shape[1:]
    )
    return shard if fits else None
