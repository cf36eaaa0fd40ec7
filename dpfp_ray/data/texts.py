"""Many texts end to end in one place, decoded when they are looked at.

A list of a million strings is a million objects of 50 bytes and more beside their letters. Here a
text costs 12 bytes of memory; the letters themselves are in memory while they are few, and else in
a file of the cache folder that has no name, that nobody else can open, and that is gone when the
process is.
"""

import hashlib
import re
import tempfile
import threading
import unicodedata
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from dpfp_ray.system.cache import cache_dir
from dpfp_ray.system.errors import UserError

IN_MEMORY = 64 * 2**20  # bytes of a column of texts
CHUNK = 4096  # texts at once
# Texts of a few rows far from each other are read one by one, not with all that is in between.
SPARSE = 64

Ints = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.uint64]
Item = TypeVar("Item")


# Characters that no reader sees, beside those of the category Cf: fillers, joiners, variation
# selectors (Unicode's Default_Ignorable_Code_Point), which no module of Python lists.
IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)


def normal(text: str) -> str:
    """One spelling for what people would call the same text: case, white space, compatible forms
    and characters that nobody sees make no difference."""
    if not (text.isascii() and text.isprintable()):
        text = unicodedata.normalize("NFKC", text)
        text = "".join(
            letter
            for letter in IGNORABLE.sub("", text)
            if letter.isspace() or unicodedata.category(letter) not in ("Cf", "Cc")
        )
        text = unicodedata.normalize("NFKC", text.casefold())
    return " ".join(text.casefold().split())


class ManyTexts(Protocol):
    """Counted, and gone through as often as one likes; a list is the simplest."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    left = iter(items)
    while part := list(islice(left, size)):
        yield part


class Letters:
    """Bytes to write to and then to read from; closed when nobody reads them any more."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=str(cache_dir()))  # noqa: SIM115
        self._lock = threading.Lock()
        weakref.finalize(self, self._file.close)

    def write(self, content: bytes) -> None:
        try:
            self._file.write(content)
        except OSError as error:
            raise UserError(
                f"no room for the texts while they are read, in {cache_dir()} ({error.strerror}); "
                f"set DPFP_CACHE to a folder with room"
            ) from error

    def read(self, start: int, stop: int) -> bytes:
        with self._lock:
            self._file.seek(start)
            return self._file.read(stop - start)


class Texts(Sequence[str]):
    """A sequence of strings, equal to any other sequence of the same strings.

    `take` gives some of them without copying a letter.
    """

    def __init__(self, letters: "Letters", starts: Ints, lengths: Lengths) -> None:
        self._letters, self._starts, self._lengths = letters, starts, lengths

    def __len__(self) -> int:
        return len(self._starts)

    def take(self, rows: npt.NDArray[Any]) -> "Texts":
        return Texts(self._letters, self._starts[rows], self._lengths[rows])

    def blank(self, rows: npt.NDArray[np.bool_]) -> "Texts":
        """The same with "" at `rows`."""
        return Texts(self._letters, self._starts, np.where(rows, np.uint32(0), self._lengths))

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if not isinstance(place, slice):
            return self._texts(self._starts[[place]], self._lengths[[place]])[0]
        return self._texts(self._starts[place], self._lengths[place])

    def _texts(self, starts: Ints, lengths: Lengths) -> list[str]:
        if not len(starts):
            return []
        stops = starts + lengths
        first, last = int(starts.min()), int(stops.max())
        if last - first > SPARSE * (int(lengths.sum()) + CHUNK):
            places = zip(starts.tolist(), stops.tolist(), strict=True)
            pieces = [self._letters.read(a, b) for a, b in places]
        else:
            block = self._letters.read(first, last)
            places = zip((starts - first).tolist(), (stops - first).tolist(), strict=True)
            pieces = [block[a:b] for a, b in places]
        return [piece.decode("utf-8", "surrogatepass") for piece in pieces]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), CHUNK):
            yield from self[start : start + CHUNK]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self):,} texts>"

    def __reduce__(self) -> Any:
        return pack, (list(self),)


class TextWriter:
    """Takes texts one after the other; `finish` gives them as `Texts`."""

    def __init__(self) -> None:
        self._letters = Letters()
        self._waiting: list[str] = []
        self._lengths: list[Lengths] = []

    def add(self, text: str) -> None:
        self._waiting.append(text)
        if len(self._waiting) == CHUNK:
            self._write()

    def _write(self) -> None:
        # JSON can spell half a surrogate pair; a ledger knows such texts, too.
        encoded = [text.encode("utf-8", "surrogatepass") for text in self._waiting]
        self._waiting.clear()
        self._lengths.append(np.fromiter(map(len, encoded), np.uint32, len(encoded)))
        self._letters.write(b"".join(encoded))

    def finish(self) -> Texts:
        self._write()
        lengths = np.concatenate(self._lengths)
        stops = np.cumsum(lengths, dtype=np.int64)
        return Texts(self._letters, stops - lengths, lengths)


def pack(texts: Iterable[str]) -> Texts:
    writer = TextWriter()
    for text in texts:
        writer.add(text)
    return writer.finish()


def take(texts: Sequence[str], rows: npt.NDArray[Any]) -> Sequence[str]:
    """The texts at `rows`, of a list or of `Texts`."""
    return texts.take(rows) if isinstance(texts, Texts) else [texts[i] for i in rows]


def hashes(words: Iterable[str], size: int = 8, key: bytes = b"") -> Numbers:
    """blake2b of each word, as (words, size/8) numbers of 64 bits."""
    found = [np.zeros(0, "<u8")]
    for part in chunks(words, CHUNK):
        encoded = (word.encode("utf-8", "surrogatepass") for word in part)
        digests = (hashlib.blake2b(one, digest_size=size, key=key).digest() for one in encoded)
        found.append(np.frombuffer(b"".join(digests), "<u8"))
    return np.concatenate(found).astype(np.uint64).reshape(-1, size // 8)


def group(keys: Numbers) -> tuple[Ints, Ints]:
    """Equal rows of `keys` as one group: each row's group, and each group's first row.

    Groups are numbered in the order of their first rows. By sorting: a dict of as many keys would
    be a hundred bytes a row.
    """
    order = np.lexsort(keys.T[::-1])
    in_order = keys[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (in_order[1:] != in_order[:-1]).any(1)
    firsts = order[begins]  # the sort is stable, so the first of a group is its first row
    numbers = np.empty(len(firsts), np.int64)
    by_row = np.argsort(firsts)
    numbers[by_row] = np.arange(len(firsts))
    groups = np.empty(len(order), np.int64)
    groups[order] = numbers[np.cumsum(begins) - 1]
    return groups, firsts[by_row]


def distinct(words: Iterable[str]) -> tuple[Ints, Ints]:
    """As `group`, for words; by hashes of 128 bits, which nobody can make collide."""
    return group(hashes(words, 16))
