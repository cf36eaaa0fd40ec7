"""What a frozen encoder says of each text, kept text by text: one pass serves all who ask later.

Kept are the mean of the last layer (fp32) and the means of all layers, each scaled to norm 1 (half
precision: seven layers of a sentence in MiniLM are 5 KB). A text is found again by its own tokens,
so subsets, supersets, other layers, pairs with a text in common and repeated texts encode nothing
twice. Shards are folders that appear in one rename:

    encoded/<encoder, precision>/<shard>/{digests,last,layers}.npy

They hold private data in another form: readable by their owner only, and no release.
"""

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.data.cache import cache_dir
from dpfp_ray.data.progress import counted_rows
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.data.whole_files import PRIVATE, private_folder, whole_folder
from dpfp_ray.models.download import encoder_identity
from dpfp_ray.models.modeling_dpfp import unit
from dpfp_ray.models.pretrained import build_classifier

# Part of every key: raise it when the meaning of the stored numbers changes.
FORMAT_VERSION = 1
INFERENCE_ROWS = 256
SHARD = 32_768  # rows: a pass that is killed loses at most these
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Shard:
    digests: npt.NDArray[np.bytes_]  # (n,), 16 bytes each, of a row's tokens
    last: Floats  # (n, width)
    layers: Halves  # (n, layers + 1, width)


@dataclass(frozen=True)
class EncodedRows:
    """The rows of a table: row i is `places[i]` = (shard, row there)."""

    shards: list[Shard]
    places: npt.NDArray[np.int64]  # (n, 2)

    def last(self, rows: slice = slice(None)) -> Floats:
        return self._gather("last", rows)

    def layers(self, rows: slice = slice(None)) -> Halves:
        return self._gather("layers", rows)

    def _gather(self, name: str, rows: slice) -> Any:
        places = self.places[rows]
        kept = [getattr(shard, name) for shard in self.shards]
        found = np.empty((len(places), *kept[0].shape[1:]), kept[0].dtype)
        for number in np.unique(places[:, 0]):
            here = places[:, 0] == number
            found[here] = kept[number][places[here, 1]]
        return found


def encoded_rows(table: TokenTable, model: str, precision: str, name: str = "") -> EncodedRows:
    """Every row of `table`, encoding those that were never met; `name` is for the progress bar."""
    facts = f"{FORMAT_VERSION} {encoder_identity(model)} {precision}"
    folder = cache_dir() / "encoded" / hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
    shards = list(_kept_shards(folder))
    known = {
        digest: (number, row)
        for number, shard in enumerate(shards)
        for row, digest in enumerate(shard.digests.tolist())
    }
    digests = list(_digests(table))
    missing = {digest: row for row, digest in enumerate(digests) if digest not in known}
    rows = np.array(sorted(missing.values()), np.int64)
    # Before cutting into shards: similar lengths together, so that little is padded.
    rows = rows[np.argsort(table.lengths[rows], kind="stable")]
    for start in range(0, len(rows), SHARD):
        part = rows[start : start + SHARD]
        made = _encode(table, part, [digests[row] for row in part], model, precision, name)
        shards.append(_keep(folder, made))
        known |= {digest: (len(shards) - 1, i) for i, digest in enumerate(made.digests.tolist())}
    places = np.array([known[digest] for digest in digests], np.int64).reshape(-1, 2)
    return EncodedRows(shards, places)


def _digests(table: TokenTable) -> Iterator[bytes]:
    """Of each row's tokens; never ending in a zero byte, which numpy would drop."""
    columns = [(name, np.ascontiguousarray(table.columns[name])) for name in sorted(table.columns)]
    start = " ".join(f"{name} {column.dtype.str}" for name, column in columns).encode()
    for first, end in zip(table.offsets[:-1], table.offsets[1:], strict=True):
        digest = hashlib.blake2b(start, digest_size=15)
        for _, column in columns:
            digest.update(column[first:end].data)
        yield digest.digest() + b"\xff"


@torch.inference_mode()
def _encode(
    table: TokenTable,
    rows: npt.NDArray[np.int64],
    digests: list[bytes],
    model: str,
    precision: str,
    name: str,
) -> Shard:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = build_classifier(model, "layers", classes=2, scope="head").to(device).eval()
    last: Floats | None = None
    layers: Halves | None = None
    parts = split_rows(table.lengths[rows], INFERENCE_ROWS, PART_COST[device.type])
    for part in counted_rows(parts, f"encoding {name}".rstrip()):
        batch = {key: value.to(device) for key, value in table.collate(rows[part]).items()}
        with torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
            means = encoder.layer_means(batch).float()
        if last is None or layers is None:
            last = np.empty((len(rows), means.shape[2]), np.float32)
            layers = np.empty((len(rows), *means.shape[1:]), np.float16)
        last[part] = means[:, -1].cpu().numpy()
        layers[part] = unit(means).half().cpu().numpy()
    assert last is not None, "there is at least one row to encode"
    assert layers is not None
    return Shard(np.array(digests), last, layers)


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
