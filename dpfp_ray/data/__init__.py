"""Records in, packed tokens out. `tasks` finds and checks the records, `readers` and `streams` read
rows, `texts` holds them, `demo` is a download, `split` chooses among rows and groups them
by person, `tokens` packs; here is what they pass on.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from dpfp_ray.data.texts import distinct, take

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Split:
    """Records in file order; `pairs` is None for tasks of one text.

    `columns` are the file's, by role (text, pair, label), with those that were guessed.
    `users` says whose each record is; None where the unit of privacy is the record.
    """

    texts: Sequence[str]
    pairs: Sequence[str] | None
    labels: npt.NDArray[np.int64]
    # Texts in other columns of the same rows, column by column, "" where a row has none to tell:
    # not trained on, but a ledger knows people by them.
    beside: tuple[Sequence[str], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    users: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def units(self) -> int:
        """D: records, or persons."""
        return len(self) if self.users is None else len(distinct(self.users)[1])

    def take(self, rows: npt.NDArray[np.int64]) -> "Split":
        return Split(
            take(self.texts, rows),
            None if self.pairs is None else take(self.pairs, rows),
            self.labels[rows],
            tuple(take(column, rows) for column in self.beside),
            self.columns,
            None if self.users is None else take(self.users, rows),
        )

    def all_texts(self) -> "AllTexts":
        return AllTexts((self,))


class AllTexts:
    """Every text of every record of some splits, those beside included, and the persons' names: all
    that people are known by. It can be gone through any number of times."""

    def __init__(self, splits: Iterable[Split]) -> None:
        self.columns: list[Sequence[str]] = []
        self.beside: list[Sequence[str]] = []
        self.names: list[Sequence[str]] = []
        for split in splits:
            self.columns += [split.texts] if split.pairs is None else [split.texts, split.pairs]
            self.beside += split.beside
            if split.users is not None:
                self.names.append(take(split.users, distinct(split.users)[1]))

    def __len__(self) -> int:
        others = sum(1 for column in self.beside for text in column if text)
        return sum(map(len, (*self.columns, *self.names))) + others

    def __iter__(self) -> Iterator[str]:
        yield from chain.from_iterable(self.columns)
        yield from filter(None, chain.from_iterable(self.beside))
        yield from (f"person: {name}" for name in chain.from_iterable(self.names))


@dataclass(frozen=True, eq=False)
class Task:
    """A training set and one or more dev sets: "dev", or "matched" and "mismatched" for MNLI."""

    name: str
    label_names: tuple[str, ...]
    train: Split
    dev: dict[str, Split]


class Table(Protocol):
    """A split as a model takes it: tokens, or representations that a frozen encoder has made."""

    @property
    def labels(self) -> npt.NDArray[np.int64]: ...
    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """What each row costs, in tokens."""
        ...

    @property
    def persons(self) -> npt.NDArray[np.int64] | None:
        """The number of each row's person, from 0; None where every row is a unit of its own."""
        ...

    def __len__(self) -> int: ...
    def collate(self, rows: npt.NDArray[Any]) -> "dict[str, torch.Tensor]":
        """The given rows as the model's input."""
        ...

    def content(self) -> str:
        """A hash of the records, labels included; as private as they are."""
        ...


def grouped(
    arrays: Mapping[str, npt.NDArray[Any]], persons: npt.NDArray[np.int64] | None
) -> dict[str, npt.NDArray[Any]]:
    """Hash the person ids too: another grouping is another data set."""
    return dict(arrays) | ({} if persons is None else {"persons": persons})


def content_hash(arrays: Mapping[str, npt.NDArray[Any]], facts: str = "") -> str:
    """Equal for equal arrays under equal names. It can confirm a guess of what is in them, so it
    goes nowhere but into keys."""
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def public_order(count: int, purpose: str) -> npt.NDArray[np.int64]:
    """A fixed permutation of 0 … count−1, the same on every machine and with every numpy.

    Row i's place is its splitmix64 hash (Steele, Lea, Flood 2014), not a library's generator,
    whose streams may change between versions.
    """
    start = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable").astype(np.int64)
