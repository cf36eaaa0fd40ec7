"""Records in, packed tokens out. `tasks` finds and checks the records, `readers` reads rows, `demo`
is a download, `split` chooses among rows, `persons` groups them, `tokens` packs; here is what they
pass on.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Split:
    """Records in file order; `pairs` is None for tasks of one text.

    `columns` are the file's, by role (text, pair, label), with those that were guessed.
    `users` says whose each record is; None where the unit of privacy is the record.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: npt.NDArray[np.int64]
    # Texts in other columns of the same rows: not trained on, but a ledger knows people by them.
    beside: list[tuple[str, ...]] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    users: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def units(self) -> int:
        """D: records, or persons."""
        return len(self) if self.users is None else len(set(self.users))

    def take(self, rows: npt.NDArray[np.int64]) -> "Split":
        pairs = None if self.pairs is None else [self.pairs[i] for i in rows]
        beside = None if self.beside is None else [self.beside[i] for i in rows]
        users = None if self.users is None else [self.users[i] for i in rows]
        texts = [self.texts[i] for i in rows]
        return Split(texts, pairs, self.labels[rows], beside, self.columns, users)

    def all_texts(self) -> list[str]:
        """Every text of every record, those beside included, and the persons' names: all that
        people are known by."""
        more = [text for row in self.beside or () for text in row]
        names = [f"person: {name}" for name in sorted(set(self.users or ()))]
        return [*self.texts, *(self.pairs or ()), *more, *names]


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
    """`arrays` and, where there are persons, whose their rows are: other groups are other data."""
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
