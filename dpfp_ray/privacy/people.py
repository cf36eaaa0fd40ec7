"""Whose records these are: data sets recognised by their content, not by name or path.

Each text of a record has a keyed fingerprint of 8 bytes (blake2b), after its characters, case and
white space are made uniform; labels and order do not matter. A data set is its sorted
fingerprints. A set that shares any text with a known one is about the same people, and so is
whatever is linked to that: a set that overlaps two groups makes them one. Another spelling of a
path, a copy, a subset, reordered rows or a dropped column so change nothing, and overlapping
subsets count in full. Errors are on one side: a common phrase can join unrelated data sets, which
makes a sum too large; what is not seen is a record whose every text was really rewritten.

The key is random, made once, and lies beside the fingerprints: who has both can confirm a guess of
a record, so both are for the owner only. Sets of more than `MOST` texts keep those whose
fingerprint is below a threshold (a share of 1/2, 1/4, …): an overlap of k texts is then missed with
probability (1 − share)^k.

**Writers at once.** A new set is stored before it is compared with the others, and its links are
stored before it is used. Of two sets that are stored at once, the later one's writer sees the
other. Two first writers may both make a key; each stores its set under every key that it sees, and
all see the one that was written first, so any two sets have a key in common.
"""

import hashlib
import io
import json
import secrets
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.plan.errors import UserError
from dpfp_ray.privacy.ledger_files import OnceWritten

MOST = 4_000_000  # fingerprints kept of a set: 32 MB
KEYS, SETS = "keys", "people"

Fingerprints = NDArray[np.uint64]


@dataclass(frozen=True)
class KnownPeople:
    """A registered data set; `overlaps` has the texts shared with each set known before it.

    An overlap with a set of which only a share is kept is an estimate from that share.
    """

    id: str
    records: int
    overlaps: dict[str, int]


class People:
    """The data sets of one ledger."""

    def __init__(self, files: OnceWritten, most: int = MOST) -> None:
        self.files = files
        self.most = most

    def register(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> KnownPeople:
        """The data set's id; stored and linked to those it overlaps with, if it was not known."""
        if not texts:
            raise UserError("a data set without records cannot be entered in a ledger")
        keys = self.keys()
        both = list(texts) if pairs is None else [*texts, *pairs]
        by_key = {name: fingerprints(both, key) for name, key in keys.items()}
        main = min(by_key)
        digest = hashlib.blake2b(by_key[main].tobytes(), key=keys[main], digest_size=8)
        name = digest.hexdigest()
        known = self.links().get(name)
        if known is None:
            for key, prints in by_key.items():
                if f"{name}.{key}.npy" not in self.files.names(SETS):
                    self._store(f"{SETS}/{name}.{key}.npy", self._sample(prints))
            known = self._overlaps(name)
            self.files.write(
                f"{SETS}/{name}.{secrets.token_hex(4)}.json",
                json.dumps({"records": len(texts), "overlaps": known}).encode(),
            )
        return KnownPeople(name, len(texts), known)

    def find(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> str | None:
        """A stored set that shares a text with these; nothing is stored."""
        names = self.files.names(KEYS)
        both = list(texts) if pairs is None else [*texts, *pairs]
        for key in names:
            prints = fingerprints(both, self.files.read(f"{KEYS}/{key}"))
            for file in self.files.names(SETS):
                name, _, rest = file.partition(".")
                if rest == f"{key}.npy":
                    stored = self._load(name, key)[1:]
                    if len(np.intersect1d(prints, stored, assume_unique=True)):
                        return name
        return None

    def keys(self) -> dict[str, bytes]:
        """Every key, by name; the first call makes one."""
        names = self.files.names(KEYS)
        if not names:
            if self.files.names(SETS):
                raise UserError(
                    f"the ledger {self.files.name} has data sets but no key to recognise them by; "
                    f"restore its folder {KEYS!r} from a backup"
                )
            self.files.write(f"{KEYS}/{secrets.token_hex(8)}", secrets.token_bytes(32))
            names = self.files.names(KEYS)
        return {name: self.files.read(f"{KEYS}/{name}") for name in names}

    def links(self) -> dict[str, dict[str, int]]:
        """Set → the sets known before it that it overlaps with, and in how many texts."""
        found: dict[str, dict[str, int]] = {}
        for file in self.files.names(SETS):
            if file.endswith(".json"):
                found.setdefault(file.split(".")[0], {}).update(self._read_links(file))
        return found

    def groups(self, also: Iterable[str] = ()) -> dict[str, str]:
        """Set → the name of its group, the same for all sets that are linked however far."""
        parents: dict[str, str] = {name: name for name in also}

        def top(name: str) -> str:
            parents.setdefault(name, name)
            while parents[name] != name:
                parents[name] = parents[parents[name]]
                name = parents[name]
            return name

        for name, others in self.links().items():
            for other in (name, *others):
                first, second = sorted((top(name), top(other)))
                parents[second] = first
        return {name: top(name) for name in list(parents)}

    def _read_links(self, file: str) -> dict[str, int]:
        try:
            links: dict[str, int] = json.loads(self.files.read(f"{SETS}/{file}"))["overlaps"]
        except (ValueError, KeyError):
            raise UserError(
                f"{SETS}/{file} of the ledger {self.files.name} is damaged; restore it"
            ) from None
        return links

    def _overlaps(self, name: str) -> dict[str, int]:
        """Texts shared with every other stored set, those without links yet included.

        A set that has no key in common with this one is still being written: its writer will
        see this one, which is there under all of its keys.
        """
        linked = self.links().keys()  # before the listing: what is linked has been stored
        stored: dict[str, set[str]] = {}
        for file in self.files.names(SETS):
            if file.endswith(".npy"):
                other, key, _ = file.split(".")
                stored.setdefault(other, set()).add(key)
        lost = sorted(other for other in linked if not stored.get(other, set()) & stored[name])
        if lost:
            raise UserError(
                f"the fingerprints of data set {lost[0]} are gone from the ledger "
                f"{self.files.name}; restore its folder {SETS!r} from a backup"
            )
        found = {}
        for other in sorted(stored.keys() - {name}):
            common = sorted(stored[other] & stored[name])
            if not common:
                continue
            shared = self._shared(self._load(name, common[0]), self._load(other, common[0]))
            if shared:
                found[other] = shared
        return found

    def _shared(self, one: Fingerprints, other: Fingerprints) -> int:
        """How many texts two sets share, by the smaller of their kept shares."""
        limit = min(one[0], other[0])
        mine, theirs = (prints[1:][prints[1:] <= limit] for prints in (one, other))
        shared = len(np.intersect1d(mine, theirs, assume_unique=True))
        return round(shared * (2.0**64 / (float(limit) + 1.0)))

    def _sample(self, prints: Fingerprints) -> Fingerprints:
        """The largest fingerprint that would be kept, then those kept, sorted."""
        limit = 2**64 - 1
        while np.searchsorted(prints, np.uint64(limit), side="right") > self.most:
            limit //= 2
        kept = prints[: np.searchsorted(prints, np.uint64(limit), side="right")]
        return np.concatenate([np.array([limit], dtype=np.uint64), kept])

    def _store(self, name: str, prints: Fingerprints) -> None:
        buffer = io.BytesIO()
        np.save(buffer, prints, allow_pickle=False)
        self.files.write(name, buffer.getvalue())

    def _load(self, name: str, key: str) -> Fingerprints:
        content = self.files.read(f"{SETS}/{name}.{key}.npy")
        try:
            return np.load(io.BytesIO(content), allow_pickle=False).astype(np.uint64)
        except ValueError:
            raise UserError(
                f"{SETS}/{name}.{key}.npy of the ledger {self.files.name} is damaged; restore it"
            ) from None


def fingerprints(texts: Iterable[str], key: bytes) -> Fingerprints:
    """The distinct fingerprints of all texts that are not empty, sorted.

    A set of nothing but empty texts keeps the empty one: its records must be of some people.
    """
    uniform = {normal(text) for text in texts}
    chosen = (uniform - {""}) or {""}
    digests = b"".join(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=8).digest()
        for text in chosen
    )
    return np.unique(np.frombuffer(digests, dtype="<u8").astype(np.uint64))


def normal(text: str) -> str:
    """One spelling for what people would call the same text."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(plain.casefold().split())
