"""Tokens of a split: encoded once, packed end to end without padding, memory-mapped from a cache
that is keyed by content.

Rows are padded only when a batch is made, to that batch's longest row: most sentences are far
shorter than `max_length`, and the encoder's cost is the padded size.

Tokens of sentence pairs whose two texts are encoded one by one, not as one joint text.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from dpfp_ray.data import Split, content_hash, grouped
from dpfp_ray.system.cache import cache_dir
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import counted
from dpfp_ray.system.whole_files import PRIVATE, whole_folder

if TYPE_CHECKING:
    import torch

# Part of every key: raise it when the meaning of the stored arrays changes.
FORMAT_VERSION = 2
DTYPES = {"input_ids": np.int32, "token_type_ids": np.int8}
LENGTHS = "lengths"
CHUNK = 2_000
PROGRESS_ABOVE = 20_000
Chunk = tuple[Sequence[str], Sequence[str] | None]  # texts of some rows, and their second texts
Encoded = dict[str, npt.NDArray[Any]]  # of a chunk: each column flat, and the rows' lengths


class Tokenise(Protocol):
    """Turns texts into tokens, chunk by chunk and in order, as `tokenise_here` does."""

    def __call__(
        self, chunks: Iterator[Chunk], tokenizer: Any, limit: int
    ) -> Iterator[Encoded]: ...


def tokenise_here(chunks: Iterator[Chunk], tokenizer: Any, limit: int) -> Iterator[Encoded]:
    return (encode_chunk(chunk, tokenizer, limit) for chunk in chunks)


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Row i's tokens are `column[offsets[i]:offsets[i + 1]]` of each flat column.

    `token_type_ids` is there only if the tokenizer makes it: some encoders (MPNet, DistilBERT)
    refuse it.
    """

    columns: dict[str, npt.NDArray[Any]]
    offsets: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    pad_token_id: int
    persons: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def collate(self, rows: npt.NDArray[Any]) -> "dict[str, torch.Tensor]":
        """The given rows, in the given order (repeats allowed), padded on the right.

        No rows give tensors of shape (0, 1): an empty draw is a normal step.
        """
        import torch

        rows = np.asarray(rows, dtype=np.int64)
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        places = np.arange(max(1, lengths.max(initial=0)))
        mask = places < lengths[:, None]
        flat = (starts[:, None] + places)[mask]
        batch = {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
        for name, column in self.columns.items():
            padded = np.full(mask.shape, self.pad_token_id if name == "input_ids" else 0, np.int64)
            padded[mask] = column[flat]
            batch[name] = torch.from_numpy(padded)
        return batch

    def take(self, rows: npt.NDArray[np.int64]) -> "TokenTable":
        """The given rows in the given order, as a table of their own."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        # Token t of the result lies as far behind its row's start as in the old table.
        flat = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return TokenTable(
            {name: column[flat] for name, column in self.columns.items()},
            offsets,
            np.asarray(self.labels)[rows],
            self.pad_token_id,
            None if self.persons is None else self.persons[rows],
        )

    def content(self) -> str:
        return content_hash(grouped(_arrays(self), self.persons), f"tokens {self.pad_token_id}")


def tokenise(
    split: Split, tokenizer: Any, max_length: int, name: str = "", work: Tokenise = tokenise_here
) -> TokenTable:
    """The split's tokens, from the cache if these very records were encoded this way before.

    Rows are truncated to `max_length` (or the tokenizer's own limit, if that is smaller); of a pair
    the longer text is truncated first. `name` is only for the progress bar; `work` is who does it.
    """
    limit = token_limit(tokenizer, max_length, paired=split.pairs is not None)
    if not len(split):
        return _encode(split, tokenizer, limit, name)  # an empty file cannot be memory-mapped
    key = _key(split, tokenizer, limit)
    entry = cache_dir() / "tokens" / key
    pad = _pad_id(tokenizer)
    stored = _load(entry, pad)
    if stored is not None:
        return stored
    try:
        _store(_encoded(split, tokenizer, limit, name, work), split.labels, entry, pad)
        stored = _load(entry, pad)
    except OSError as error:
        # The cache saves time; a full or read-only disk is no reason not to train.
        warnings.warn(f"tokens are not cached in {entry.parent}: {error}", stacklevel=2)
    return stored or _encode(split, tokenizer, limit, name)


def tokenise_once(split: Split, tokenizer: Any, max_length: int) -> TokenTable:
    """As `tokenise`, but kept nowhere: rows that somebody asks about are not ours to store."""
    return _encode(
        split, tokenizer, token_limit(tokenizer, max_length, split.pairs is not None), ""
    )


def token_limit(tokenizer: Any, max_length: int, paired: bool) -> int:
    """How many tokens a row may have: `max_length`, or the tokenizer's own limit if less."""
    # Tokenizers without a limit of their own say 10^30.
    limit = min(max_length, int(tokenizer.model_max_length))
    special = tokenizer.num_special_tokens_to_add(pair=paired)
    texts = 2 if paired else 1
    if limit < special + texts:
        raise UserError(
            f"max_length is {limit}, but {special} special tokens and {texts} of text need "
            f"{special + texts}; use a larger max_length"
        )
    return limit


def _pad_id(tokenizer: Any) -> int:
    """Any id serves as padding where the attention mask hides it (GPT-2 has no pad token)."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


def _encode(split: Split, tokenizer: Any, limit: int, name: str) -> TokenTable:
    """The tokens in memory."""
    parts: dict[str, list[npt.NDArray[Any]]] = {"input_ids": [], LENGTHS: [np.zeros(1, np.int64)]}
    for encoded in _encoded(split, tokenizer, limit, name):
        for column, flat in encoded.items():
            parts.setdefault(column, []).append(flat)
    offsets = np.cumsum(np.concatenate(parts.pop(LENGTHS)))
    columns = {
        column: np.concatenate([np.zeros(0, DTYPES[column]), *arrays])
        for column, arrays in parts.items()
    }
    return TokenTable(columns, offsets, split.labels, _pad_id(tokenizer))


def _encoded(
    split: Split, tokenizer: Any, limit: int, name: str, work: Tokenise = tokenise_here
) -> Iterator[Encoded]:
    """The tokens of `CHUNK` rows after the other."""

    def chunks() -> Iterator[Chunk]:
        for start in range(0, len(split), CHUNK):
            rows = slice(start, start + CHUNK)
            yield split.texts[rows], None if split.pairs is None else split.pairs[rows]

    yield from counted(
        work(chunks(), tokenizer, limit),
        lambda part: len(part[LENGTHS]),
        f"tokenising {name}".rstrip(),
        len(split),
        bar=len(split) > PROGRESS_ABOVE,
    )


def encode_chunk(chunk: Chunk, tokenizer: Any, limit: int) -> Encoded:
    texts, pairs = chunk
    pad = _pad_id(tokenizer)
    encoded = tokenizer(
        texts,
        pairs,
        truncation="longest_first",
        max_length=limit,
        padding=False,
        return_attention_mask=False,
    )
    arrays: Encoded = {}
    for column in DTYPES:
        if column in encoded:
            # Without special tokens a text may have no token at all; attention needs one.
            empty = pad if column == "input_ids" else 0
            ids = [row or [empty] for row in encoded[column]]
            arrays[column] = np.fromiter(chain.from_iterable(ids), DTYPES[column])
    arrays[LENGTHS] = np.array([len(row) or 1 for row in encoded["input_ids"]], np.int64)
    return arrays


# The cache: one folder per key, which appears in one rename and is checked when it is opened. ----


def _key(split: Split, tokenizer: Any, limit: int) -> str:
    digest = hashlib.blake2b(digest_size=16)

    def add(content: bytes) -> None:
        # With the length first, no two different lists of contents are the same bytes.
        digest.update(len(content).to_bytes(8, "little") + content)

    add(f"{FORMAT_VERSION} {limit}".encode())
    add(_tokenizer_identity(tokenizer).encode())
    add(np.ascontiguousarray(split.labels, dtype=np.int64).tobytes())
    for texts in (split.texts, split.pairs):
        add(b"none" if texts is None else b"texts")
        for text in texts or ():
            add(text.encode())
    return digest.hexdigest()


def _tokenizer_identity(tokenizer: Any) -> str:
    """All that decides which ids come out, and nothing that a call to the tokenizer changes."""
    facts: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "inputs": list(tokenizer.model_input_names),
        "special": {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
        "truncation_side": tokenizer.truncation_side,
        "pad": _pad_id(tokenizer),
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        facts["vocabulary"] = tokenizer.get_vocab()
    else:
        # Truncation and padding are kept in the backend as the last call left them.
        facts["backend"] = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    return json.dumps(facts, sort_keys=True)


def _arrays(table: TokenTable) -> dict[str, npt.NDArray[Any]]:
    arrays = {**table.columns, "offsets": table.offsets, "labels": table.labels}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _checksum(array: npt.NDArray[Any]) -> str:
    digest = hashlib.blake2b(f"{array.dtype.str} {array.shape}".encode(), digest_size=16)
    digest.update(array.data)
    return digest.hexdigest()


def _store(
    parts: Iterable[Encoded], labels: npt.NDArray[np.int64], entry: Path, pad_token_id: int
) -> None:
    """Write tokens as they come. An entry that another process has stored meanwhile stays, unless
    it is damaged."""

    def whole(found: Path) -> bool:
        return _load(found, pad_token_id) is not None

    lengths = [np.zeros(1, np.int64)]
    with whole_folder(entry, whole, PRIVATE) as built:
        columns: dict[str, BinaryIO] = {}
        with ExitStack() as open_files:
            for part in parts:
                lengths.append(part[LENGTHS])
                for name in [name for name in part if name != LENGTHS]:
                    if name not in columns:
                        columns[name] = open_files.enter_context((built / name).open("xb"))
                    columns[name].write(part[name].data)
        np.cumsum(np.concatenate(lengths)).tofile(built / "offsets")
        np.ascontiguousarray(labels, dtype=np.int64).tofile(built / "labels")
        # In this order they are loaded again, and go into keys of what is made from them.
        names = (*columns, "offsets", "labels")
        checksums = {name: _checksum(_mapped(built / name)) for name in names}
        (built / "checksums.json").write_text(json.dumps(checksums))


def _mapped(path: Path) -> npt.NDArray[Any]:
    """As a plain array on the mapped memory: np.memmap is slower to index."""
    return np.asarray(np.memmap(path, DTYPES.get(path.name, np.int64), "r"))


def _load(entry: Path, pad_token_id: int) -> TokenTable | None:
    """The entry if it is whole, else None: a damaged cache costs time, never a run."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        checksums = json.loads((entry / "checksums.json").read_text())
        for name, checksum in checksums.items():
            arrays[name] = _mapped(entry / name)
            if _checksum(arrays[name]) != checksum:
                return None
        offsets, labels = arrays.pop("offsets"), arrays.pop("labels")
        return TokenTable(arrays, offsets, labels, pad_token_id)
    except Exception:  # damaged bytes make numpy's and json's readers fail in many ways
        return None


@dataclass(frozen=True, eq=False)
class PairTable:
    """Row i is the pair of row i of `first` and of `second`, which hold the same labels."""

    first: TokenTable
    second: TokenTable
    persons: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.first)

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        return self.first.labels

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.maximum(self.first.lengths, self.second.lengths)

    def collate(self, rows: npt.NDArray[Any]) -> "dict[str, torch.Tensor]":
        second = {f"pair_{name}": value for name, value in self.second.collate(rows).items()}
        return self.first.collate(rows) | second

    def content(self) -> str:
        both = f"{self.first.content()} {self.second.content()}"
        if self.persons is not None:
            both += f" {content_hash({'persons': self.persons})}"
        return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()


def tokenise_sides(
    split: Split,
    tokenizer: Any,
    max_length: int,
    name: str = "",
    work: Tokenise = tokenise_here,
    *,
    keep: bool = True,
) -> PairTable:
    """Each text of each pair by itself, at most `max_length`; without `keep` nothing is cached."""
    if split.pairs is None:
        raise UserError("representation pair needs two texts a record; give pair_column, or mean")
    first, second = (Split(texts, None, split.labels) for texts in (split.texts, split.pairs))
    if not keep:
        one, other = (tokenise_once(side, tokenizer, max_length) for side in (first, second))
    else:
        one, other = (tokenise(side, tokenizer, max_length, name, work) for side in (first, second))
    return PairTable(one, other)
