"""h(x) of every record, computed once by a frozen encoder and kept: what `scope: head` trains on.

A frozen encoder gives a record the same representation in every epoch of every trial, so one
inference pass serves them all, memory-mapped from a cache that is keyed by content. The cache holds
private data in another form (representations can be inverted in part): its files are readable by
their owner only, and they are no release.
"""

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Linear, Module
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dpfp_ray.data import content_hash, grouped
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.data.tokens import PairTable, TokenTable
from dpfp_ray.models.classifier import Classifier, initialise_head, set_dropout
from dpfp_ray.models.download import encoder_identity
from dpfp_ray.models.modeling_dpfp import chosen_layers, join, relation
from dpfp_ray.models.row_store import INFERENCE_ROWS, Encode, encode_here, encoded_rows, kind_of
from dpfp_ray.models.scopes import Lora, restrict
from dpfp_ray.plan.checks import is_joined
from dpfp_ray.system.cache import cache_dir
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import PRIVATE, ChecksumWriter, check_file, whole_file

# Part of every key: raise it when the meaning of the stored numbers changes.
FORMAT_VERSION = 1
ASSEMBLED_ROWS = 4096  # at once
SHARD = 65_536  # rows; sums are added shard by shard, so it is part of their last digits
Rows = npt.NDArray[np.float16] | npt.NDArray[np.float32]
Floats = npt.NDArray[np.float32]
T = TypeVar("T")


@runtime_checkable
class Elsewhere(Protocol):
    """In place of h: rows in a store that other machines can work on (`sweeps/shared.py`)."""

    def by_shard(
        self, table: "RepresentationTable", work: Callable[["RepresentationTable"], T]
    ) -> Iterator[T]: ...


@dataclass(frozen=True, eq=False)
class RepresentationTable:
    """What a `TokenTable` is to the encoder, this is to the head: `h[i]` belongs to `labels[i]`."""

    h: Rows  # joined ones in half precision: their numbers are below 1
    labels: npt.NDArray[np.int64]
    key: str  # of what h was computed from: tokens, encoder, representation, precision, centre
    centre: Floats | None = None  # what was taken off h, if anything
    persons: npt.NDArray[np.int64] | None = None
    words: "RepresentationTable | None" = None  # public phrases for the classes (`label_words.py`)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        return self.h.shape[1]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.ones(len(self), np.int64)

    def collate(self, rows: npt.NDArray[Any]) -> dict[str, Tensor]:
        h = self.h[np.asarray(rows, dtype=np.int64)]
        return {"representation": torch.from_numpy(h).float()}

    def by_shard(self, work: Callable[["RepresentationTable"], T]) -> Iterator[T]:
        """What `work` makes of each shard of the rows, in order: here, or where they lie. No
        shard knows persons, whose rows may lie in several."""
        if isinstance(self.h, Elsewhere):
            return self.h.by_shard(self, work)
        return (work(self.shard(rows, self.h[rows])) for rows in shards(len(self)))

    def shard(self, rows: slice, h: Rows) -> "RepresentationTable":
        return RepresentationTable(h, self.labels[rows], self.key, self.centre)

    def content(self) -> str:
        """By what h was computed from: its last digits depend on the machine."""
        labels = {"labels": np.asarray(self.labels, dtype=np.int64)}
        return content_hash(grouped(labels, self.persons), f"representations {self.key}")


class HeadClassifier(Classifier):
    """A classifier whose encoder has already done its work: only the head is left.

    It takes batches of a `RepresentationTable`. Its weights have the names that they have in a
    whole `Classifier`, so what is saved from one loads into the other.
    """

    def __init__(self, width: int, classes: int, representation: str, head_seed: int = 0) -> None:
        Module.__init__(self)  # there is no encoder to probe
        self.register_buffer("centre", None)
        self.encoder = torch.nn.Identity()
        self.representation = representation
        self.width, self.classes = width, classes
        self.frozen = True
        self.head = torch.nn.utils.skip_init(Linear, width, classes)
        initialise_head(self, head_seed)

    def represent(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["representation"]


def represent(
    table: TokenTable | PairTable,
    model: str,
    representation: str,
    precision: str = "fp32",
    name: str = "",
    centre: Floats | None = None,
    encode: Encode = encode_here,
) -> RepresentationTable:
    """h of every row of `table`, from the cache if these tokens went through this encoder before.

    The encoder runs in inference mode, without dropout; `name` is only for the progress bar. A
    pooler that the checkpoint lacks is random with seed 0, whatever the run's seed. `centre` is
    what to take off (`public_centre`); `encode` is who runs the encoder.
    """
    key = _key(table, model, representation, precision, centre)
    kind = np.dtype(np.float16 if is_joined(representation) else np.float32)
    parts = partial(_parts, table, model, representation, precision, name, centre, encode)
    h = kept(key, len(table), kind)
    if h is None:
        try:
            h = keep(key, parts(), len(table), kind)
        except OSError as error:
            # The cache saves time; a full or read-only disk is no reason not to train.
            warnings.warn(
                f"representations are not cached in {entry_of(key).parent}: {error}", stacklevel=2
            )
    if h is None:
        h = np.concatenate(list(parts()))
    return RepresentationTable(h, np.asarray(table.labels), key, centre)


def public_centre(tables: list[RepresentationTable]) -> Floats:
    """The mean of all their rows: of dev rows, for plans that count these as public."""
    h = np.concatenate([np.asarray(table.h, np.float64) for table in tables])
    finite = h[np.isfinite(h).all(1)]
    return np.asarray(finite.sum(0) / max(len(finite), 1), np.float32)


def _parts(
    table: TokenTable | PairTable,
    model: str,
    representation: str,
    precision: str,
    name: str,
    centre: Floats | None,
    encode: Encode,
) -> Iterator[Rows]:
    """All rows in order, some at a time, from what the encoder said of each text."""
    sides = [table.first, table.second] if isinstance(table, PairTable) else [table]
    kind = kind_of(representation)
    encoded = [encoded_rows(side, model, kind, precision, name, encode) for side in sides]
    off = None if centre is None else torch.from_numpy(centre)
    for start in range(0, len(table), ASSEMBLED_ROWS):
        rows = slice(start, start + ASSEMBLED_ROWS)
        if len(sides) == 1 and not is_joined(representation):
            h = encoded[0].last(rows)
            yield h if centre is None else h - centre
            continue
        texts = [torch.from_numpy(side.layers(rows)).float() for side in encoded]
        if len(texts) == 2:
            parts = relation(texts[0][:, -1], texts[1][:, -1])
        else:
            parts = chosen_layers(texts[0], representation)
        yield join(parts, off).half().numpy()


def shards(rows: int) -> list[slice]:
    """At least one, be it empty."""
    return [slice(start, start + SHARD) for start in range(0, max(rows, 1), SHARD)]


def _key(
    table: TokenTable | PairTable,
    model: str,
    representation: str,
    precision: str,
    centre: Floats | None,
) -> str:
    """Labels are not in it: h does not depend on them."""
    facts = f"{FORMAT_VERSION} {encoder_identity(model)} {representation} {precision}"
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for side in [table.first, table.second] if isinstance(table, PairTable) else [table]:
        for name, array in {**side.columns, "offsets": side.offsets}.items():
            digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
    if centre is not None:
        digest.update(b"\ncentre\n" + centre.tobytes())
    return digest.hexdigest()


def entry_of(key: str) -> Path:
    return cache_dir() / "representations" / f"{key}.npy"


def keep(key: str, parts: Iterator[Rows], rows: int, kind: np.dtype[Any]) -> Rows | None:
    """Write rows as they come to this machine's cache, an .npy file; they are mapped from there."""
    with whole_file(entry_of(key), PRIVATE) as stream:
        file = ChecksumWriter(stream)
        for number, part in enumerate(parts):
            if number == 0:
                descr = np.lib.format.dtype_to_descr(part.dtype)
                facts = {"descr": descr, "fortran_order": False, "shape": (rows, part.shape[1])}
                np.lib.format.write_array_header_1_0(file, facts)
            file.write(np.ascontiguousarray(part).tobytes())
        file.finish()
    return kept(key, rows, kind)


def kept(key: str, rows: int, kind: np.dtype[Any]) -> Rows | None:
    """The entry if it is whole, else None: a damaged cache costs time, never a run."""
    try:
        check_file(entry_of(key))
        h = np.load(entry_of(key), mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    if h.shape[:1] != (rows,) or h.ndim != 2 or h.dtype != kind:
        return None
    # As a plain array on the mapped memory: np.memmap is slower to index.
    return np.asarray(h)


# An encoder that the caller holds in memory: any module from token ids to one vector a token. Its
# own weights are never trained: every run gets a copy.

CUSTOM = "custom:"  # how a plan's `model` says that the encoder was given to the call
_NEEDED = ("model_max_length", "num_special_tokens_to_add", "pad_token_id", "special_tokens_map")


class Adapter(Module):
    """A hand-written module behind the interface of a transformers encoder."""

    def __init__(self, inner: Module, tokenizer: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = SimpleNamespace(pad_token_id=tokenizer.pad_token_id)
        self.vocabulary = len(tokenizer)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        output = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        return SimpleNamespace(last_hidden_state=output) if isinstance(output, Tensor) else output

    def get_input_embeddings(self) -> Any:
        """Which ids there are; wherever `inner` keeps its embedding, if it has one."""
        return SimpleNamespace(num_embeddings=self.vocabulary)


@dataclass(frozen=True)
class OwnEncoder:
    """`module(input_ids=…, attention_mask=…)` gives hidden states of shape (rows, length, width),
    by themselves or as `.last_hidden_state`; `tokenizer` is one of transformers' or tokenizers'.
    """

    module: Module
    tokenizer: Any

    def __post_init__(self) -> None:
        if not isinstance(self.module, Module):
            raise UserError(
                f"encoder is a {type(self.module).__name__}; give a torch.nn.Module, or name a "
                f"folder in the plan's model"
            )
        if type(self.tokenizer).__module__.split(".")[0] == "tokenizers":
            wrapped = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer)
            object.__setattr__(self, "tokenizer", wrapped)
        if not all(hasattr(self.tokenizer, name) for name in _NEEDED):
            raise UserError(
                f"tokenizer is a {type(self.tokenizer).__name__}; give one of transformers or "
                f"tokenizers beside encoder"
            )

    @property
    def name(self) -> str:
        return f"{CUSTOM}{type(self.module).__name__}"

    def resolve_representation(self, wanted: str) -> str:
        """`mean` unless the plan says otherwise: nobody but the caller knows what it was trained
        for."""
        if wanted.startswith("layers") and not isinstance(self.module, PreTrainedModel):
            raise UserError(f"representation {wanted}: {self.name} gives one layer; use mean")
        if wanted == "pooler" and not hasattr(self.module, "pooler"):
            raise UserError(f"representation pooler: {self.name} has none; use cls or mean")
        return "mean" if wanted == "auto" else wanted

    def classifier(
        self,
        representation: str,
        classes: int,
        *,
        dropout: float,
        head_seed: int,
        scope: str,
        lora: Lora | None = None,
    ) -> Classifier:
        encoder = copy.deepcopy(self.module).float().cpu()
        encoder.requires_grad_(True)
        set_dropout(encoder, dropout)
        if not isinstance(encoder, PreTrainedModel):
            encoder = Adapter(encoder, self.tokenizer)
        try:
            model = Classifier(
                encoder,
                representation,
                classes,
                frozen=scope == "head",
                head_seed=head_seed,
                dropout=dropout,
            )
        except UserError:
            raise
        except Exception as error:  # whatever the caller's own code raises
            raise UserError(
                f"encoder {self.name} gives no hidden states for input_ids and attention_mask "
                f"({type(error).__name__}: {error})"
            ) from error
        restrict(model, scope, lora, head_seed)
        return model

    @torch.inference_mode()
    def represent(
        self,
        table: TokenTable | PairTable,
        representation: str,
        precision: str,
        centre: Floats | None = None,
    ) -> RepresentationTable:
        """h of every row, as `representations.represent` makes it, but kept nowhere."""
        model = self.classifier(representation, 2, dropout=0.0, head_seed=0, scope="head")
        model.centre = None if centre is None else torch.from_numpy(centre)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model.to(device).eval()
        h = np.empty((len(table), model.width), np.float32)
        for part in split_rows(table.lengths, INFERENCE_ROWS, PART_COST[device.type]):
            h[part] = model.represent_rows(table, part, precision).cpu().numpy()
        key = hashlib.blake2b(h.data, digest_size=16).hexdigest()
        return RepresentationTable(h, np.asarray(table.labels), key, centre)
