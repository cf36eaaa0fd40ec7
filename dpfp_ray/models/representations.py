"""h(x) of every record, computed once by a frozen encoder and kept: what `scope: head` trains on.

A frozen encoder gives a record the same representation in every epoch of every trial, so one
inference pass serves them all, memory-mapped from a cache that is keyed by content. The cache holds
private data in another form (representations can be inverted in part): its files are readable by
their owner only, and they are no release.
"""

import hashlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Linear, Module

from dpfp_ray.data import content_hash
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.data.cache import cache_dir
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.data.whole_files import PRIVATE, whole_file
from dpfp_ray.models.classifier import Classifier, initialise_head
from dpfp_ray.models.download import encoder_identity
from dpfp_ray.models.pretrained import build_classifier

# Part of every key: raise it when the meaning of the stored numbers changes.
FORMAT_VERSION = 1
INFERENCE_ROWS = 256
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RepresentationTable:
    """What a `TokenTable` is to the encoder, this is to the head: `h[i]` belongs to `labels[i]`."""

    h: Floats
    labels: npt.NDArray[np.int64]
    key: str  # of what h was computed from: tokens, encoder, representation, precision

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        return self.h.shape[1]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """All rows cost the same."""
        return np.ones(len(self), np.int64)

    def collate(self, rows: npt.NDArray[Any]) -> dict[str, Tensor]:
        return {"representation": torch.from_numpy(self.h[np.asarray(rows, dtype=np.int64)])}

    def content(self) -> str:
        """By what h was computed from: its last digits depend on the machine."""
        labels = np.asarray(self.labels, dtype=np.int64)
        return content_hash({"labels": labels}, f"representations {self.key}")


class HeadClassifier(Classifier):
    """A classifier whose encoder has already done its work: only the head is left.

    It takes batches of a `RepresentationTable`. Its weights have the names that they have in a
    whole `Classifier`, so what is saved from one loads into the other.
    """

    def __init__(self, width: int, classes: int, representation: str, head_seed: int = 0) -> None:
        Module.__init__(self)  # there is no encoder to probe
        self.encoder = torch.nn.Identity()
        self.representation = representation
        self.width, self.classes = width, classes
        self.frozen = True
        self.head = torch.nn.utils.skip_init(Linear, width, classes)
        initialise_head(self, head_seed)

    def represent(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["representation"]


def represent(
    table: TokenTable, model: str, representation: str, precision: str = "fp32", name: str = ""
) -> RepresentationTable:
    """h of every row of `table`, from the cache if these tokens went through this encoder before.

    The encoder runs in inference mode, without dropout; `name` is only for the progress bar. A
    pooler that the checkpoint lacks is random with seed 0, whatever the run's seed.
    """
    key = _key(table, model, representation, precision)
    entry = cache_dir() / "representations" / f"{key}.npy"
    known = _load(entry, len(table))
    if known is None:
        known = _encode(table, model, representation, precision, name)
        try:
            with whole_file(entry, PRIVATE) as file:
                np.save(file, known)
        except OSError as error:
            # The cache saves time; a full or read-only disk is no reason not to train.
            warnings.warn(
                f"representations are not cached in {entry.parent}: {error}", stacklevel=2
            )
    return RepresentationTable(known, np.asarray(table.labels), key)


@torch.inference_mode()
def _encode(
    table: TokenTable, model: str, representation: str, precision: str, name: str
) -> Floats:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = build_classifier(model, representation, classes=2, scope="head").to(device).eval()
    h = np.empty((len(table), encoder.width), np.float32)
    parts = split_rows(table.lengths, INFERENCE_ROWS, PART_COST[device.type])
    for part in progress(parts, f"encoding {name}".rstrip()):
        batch = {key: tensor.to(device) for key, tensor in table.collate(part).items()}
        with torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
            h[part] = encoder.represent(batch).float().cpu().numpy()
    return h


def progress(
    parts: list[npt.NDArray[np.int64]], description: str
) -> Iterator[npt.NDArray[np.int64]]:
    from rich.progress import Progress, TextColumn

    from dpfp_ray.data.terminal import stderr

    columns = [*Progress.get_default_columns(), TextColumn("{task.completed:,.0f} rows")]
    with Progress(*columns, console=stderr, disable=not sys.stderr.isatty()) as bar:
        # Rows are sorted by length: those still to come cost more, so time left is a lower bound.
        task = bar.add_task(description, total=sum(len(part) for part in parts))
        for part in parts:
            yield part
            bar.advance(task, len(part))


def _key(table: TokenTable, model: str, representation: str, precision: str) -> str:
    """Labels are not in it: h does not depend on them."""
    facts = f"{FORMAT_VERSION} {encoder_identity(model)} {representation} {precision}"
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for name, array in {**table.columns, "offsets": table.offsets}.items():
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _load(entry: Path, rows: int) -> Floats | None:
    """The entry if it is whole, else None: a damaged cache costs time, never a run."""
    try:
        h = np.load(entry, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    if h.shape[:1] != (rows,) or h.ndim != 2 or h.dtype != np.float32:
        return None
    # As a plain array on the mapped memory: np.memmap is slower to index.
    return np.asarray(h)
