"""Whose records these are: data sets recognised by their content, not by name or path.

Each text of a record has a keyed fingerprint of 8 bytes (blake2b), after its characters, case and
white space are made uniform; labels and order do not matter. A data set is its sorted
fingerprints. A set that shares any text with a known one is about the same people, and so is
whatever is linked to that: a set that overlaps two groups makes them one. Another spelling of a
path, a copy, a subset, reordered rows or a dropped column so change nothing, and overlapping
subsets count in full. Texts in columns that are not trained on count, too: another text column
of the same file is the same people. Errors are on one side: a common phrase can join unrelated data
sets, which makes a sum too large; what is not seen is a record whose every text was really
rewritten. Dev sets are kept apart: dev rows count as public, and join nobody. But a record that is
private in one use and a dev row in another is not protected from the second, and the sum says so.

Where it is known whose a record is, names have fingerprints too: sets that share a name are about
the same person, whatever the texts are. (Sets that number their persons from 1 share names.)

The key is random, made once, and lies beside the fingerprints: who has both can confirm a guess of
a record, so both are for the owner only. Sets of more than `MOST` texts keep those whose
fingerprint is below a threshold (a share of 1/2, 1/4, …): an overlap of k texts is then missed with
probability (1 − share)^k.

**Writers at once.** A new set is stored before it is compared with the others, and its links are
stored before it is used. Of two sets that are stored at once, the later one's writer sees the
other. Of two first writers one makes the key, and the other one reads it.
"""

import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.data.texts import ManyTexts, hashes, normal
from dpfp_ray.system.cache import explained
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import Files, LocalFiles, open_files
from dpfp_ray.system.whole_files import PRIVATE, locked

MOST = 4_000_000  # fingerprints kept of a set: 32 MB
DIGEST = 16  # bytes of a checksum
CHECKSUM = "checksum"
KEYS, SETS, DEV, ENTRIES = "keys", "people", "dev", "entries"
KEY = "key"  # its only name in `KEYS`

Fingerprints = NDArray[np.uint64]


@dataclass(frozen=True)
class KnownPeople:
    """A registered data set; `overlaps` has the texts shared with each set known before it.

    An overlap with a set of which only a share is kept is an estimate from that share.
    """

    id: str
    texts: int
    overlaps: dict[str, int]


# A folder or bucket of small objects, each of which is written once and never changed. Local
# objects are for their owner only (0600 in folders of 0700); behind a URI that is the bucket's
# policy to say. A second writer of one name fails. Every object carries a checksum, which covers
# its name too, so that a changed number is noticed and not summed. It is no signature: the owner
# can make another one.


def default_place() -> str:
    """`$DPFP_LEDGER`, else the user's data folder: unlike a cache, it must not be lost."""
    chosen = os.environ.get("DPFP_LEDGER")
    if chosen:
        return chosen
    import platformdirs

    return str(Path(platformdirs.user_data_dir("dpfp-ray", appauthor=False)) / "ledger")


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.blake2b(name.encode() + b"\0" + content, digest_size=DIGEST).digest()


def _canonical(facts: Mapping[str, Any]) -> bytes:
    """The same bytes for equal facts, before and after they went through a file."""
    return json.dumps(facts, sort_keys=True, allow_nan=False).encode()


class OnceWritten:
    """Named bytes below a path or URI."""

    def __init__(self, place: str | Path | Files) -> None:
        self.files = place if isinstance(place, Files) else open_files(place)
        self.name = self.files.name

    def names(self, folder: str) -> list[str]:
        """The names in `folder`, sorted; scratch files are left out."""
        return sorted(name for name in self.files.names(folder) if not name.startswith("."))

    def read(self, name: str) -> bytes:
        stored = self._stored(name)
        content, digest = stored[:-DIGEST], stored[-DIGEST:]
        with self.intact(name):
            if digest != _digest(name, content):
                raise ValueError("its checksum does not match")
        return content

    def read_json(self, name: str) -> dict[str, Any]:
        with self.intact(name):
            facts: dict[str, Any] = json.loads(self._stored(name))
            if facts.pop(CHECKSUM) != _digest(name, _canonical(facts)).hex():
                raise ValueError("its checksum does not match")
        return facts

    def write(self, name: str, content: bytes) -> None:
        """Put `content` under `name`, whole; what is there already is never replaced."""
        self._store(name, content + _digest(name, content))

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """As `write`; people and programs read it as plain JSON."""
        sealed = {**facts, CHECKSUM: _digest(name, _canonical(facts)).hex()}
        self._store(name, json.dumps(sealed, indent=1, allow_nan=False).encode())

    def _stored(self, name: str) -> bytes:
        try:
            return self.files.read_name(name)
        except OSError as error:
            raise UserError(
                f"cannot read {name} of the ledger {self.name}: {error.strerror}"
            ) from None

    def _store(self, name: str, content: bytes) -> None:
        if not self.files.create(name, content, PRIVATE):
            raise UserError(f"cannot write {name} of the ledger {self.name}: File exists")

    @contextmanager
    def intact(self, name: str) -> Iterator[None]:
        """Turns what a damaged object raises into one line that names it."""
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise UserError(
                f"{name} of the ledger {self.name} is damaged ({why}); restore it from a backup: "
                f"without it the sum would be too small"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process of this machine at a time, on folders. Correctness never rests on it."""
        with ExitStack() as stack:
            if isinstance(self.files, LocalFiles):
                with explained(lock := self.files.root / "lock"):
                    stack.enter_context(locked(lock))
            yield


class People:
    def __init__(self, files: OnceWritten, most: int = MOST) -> None:
        self.files = files
        self.most = most

    def register(self, texts: ManyTexts) -> KnownPeople:
        """The data set's id; stored and linked to those it overlaps with, if it was not known.

        `texts` are all texts of all records, in any order.
        """
        if not texts:
            raise UserError("a data set without records cannot be entered in a ledger")
        name, prints = self._fingerprints(texts)
        overlaps = self.links().get(name)
        if overlaps is None:
            self._store(SETS, name, prints)
            overlaps = self._overlaps(name, prints)
            self._note(SETS, name, {"texts": len(texts), "overlaps": overlaps})
            for dev, shared in self._shared_with(DEV, prints).items():
                self._note(DEV, dev, {"overlaps": {name: shared}})
        return KnownPeople(name, len(texts), overlaps)

    def register_dev(self, texts: ManyTexts) -> None:
        """Remember which records were dev rows, hence shown without any privacy.

        As with sets: stored before it is compared, so that of a dev set and a training set that
        are stored at once, the later one's writer sees the other.
        """
        if not texts:
            return
        name, prints = self._fingerprints(texts)
        if any(file.split(".")[0] == name for file in self._notes(DEV)):
            return
        self._store(DEV, name, prints)
        self._note(DEV, name, {"overlaps": self._shared_with(SETS, prints)})

    def dev_rows(self, data_sets: Iterable[str]) -> int:
        """How many texts of `data_sets` were dev rows as well: of the largest overlap."""
        wanted = set(data_sets)
        overlaps = [self._read_links(DEV, file) for file in self._notes(DEV)]
        return max((n for one in overlaps for name, n in one.items() if name in wanted), default=0)

    def shared(self, texts: ManyTexts) -> dict[str, int]:
        """Stored sets, and how many of these texts each of them has; nothing is stored."""
        if not self.files.names(KEYS):
            return {}
        return self._shared_with(SETS, fingerprints(texts, self.key()))

    def _fingerprints(self, texts: ManyTexts) -> tuple[str, Fingerprints]:
        """The name of a data set of these texts, and its fingerprints."""
        key = self.key()
        prints = fingerprints(texts, key)
        return hashlib.blake2b(prints.tobytes(), key=key, digest_size=8).hexdigest(), prints

    def _store(self, folder: str, name: str, prints: Fingerprints) -> None:
        buffer = io.BytesIO()
        np.save(buffer, self._sample(prints), allow_pickle=False)
        self.files.write(f"{folder}/{name}.npy", buffer.getvalue())

    def _note(self, folder: str, name: str, facts: dict[str, Any]) -> None:
        self.files.write_json(f"{folder}/{name}.{secrets.token_hex(4)}.json", facts)

    def _notes(self, folder: str) -> list[str]:
        return [file for file in self.files.names(folder) if file.endswith(".json")]

    def key(self) -> bytes:
        """The key of all fingerprints; the first call makes it."""
        written = [*self.files.names(SETS), *self.files.names(ENTRIES)]  # after the key
        keys = self.files.names(KEYS)
        if not keys and not written:
            with suppress(UserError):  # another writer was faster
                self.files.write(f"{KEYS}/{KEY}", secrets.token_bytes(32))
        elif KEY not in keys:
            raise UserError(
                f"the ledger {self.files.name} has entries but no key to recognise people by; "
                f"restore its folders {KEYS!r} and {SETS!r} from a backup, or move it away if a "
                f"development version made it"
            )
        return self.files.read(f"{KEYS}/{KEY}")

    def links(self) -> dict[str, dict[str, int]]:
        """Set → the sets known before it that it overlaps with, and in how many texts."""
        links: dict[str, dict[str, int]] = {}
        for file in self._notes(SETS):
            links.setdefault(file.split(".")[0], {}).update(self._read_links(SETS, file))
        return links

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

    def _read_links(self, folder: str, file: str) -> dict[str, int]:
        links: dict[str, int] = self.files.read_json(f"{folder}/{file}")["overlaps"]
        return links

    def _overlaps(self, name: str, prints: Fingerprints) -> dict[str, int]:
        """Texts shared with every other stored set, those without links yet included."""
        linked = self.links().keys()  # before the listing: what is linked has been stored
        lost = sorted(linked - set(self._stored(SETS)))
        if lost:
            raise UserError(
                f"the fingerprints of data set {lost[0]} are gone from the ledger "
                f"{self.files.name}; restore its folder {SETS!r} from a backup"
            )
        return self._shared_with(SETS, prints, but=name)

    def _stored(self, folder: str) -> list[str]:
        """The sets in `folder`."""
        names = self.files.names(folder)
        return [name.removesuffix(".npy") for name in names if name.endswith(".npy")]

    def _shared_with(self, folder: str, prints: Fingerprints, but: str = "") -> dict[str, int]:
        """Sets in `folder` that share texts with these, and how many."""
        own = self._sample(prints)
        shared = {
            name: self._shared(own, self._load(folder, name))
            for name in self._stored(folder)
            if name != but
        }
        return {name: count for name, count in shared.items() if count}

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

    def _load(self, folder: str, name: str) -> Fingerprints:
        content = self.files.read(f"{folder}/{name}.npy")
        return np.load(io.BytesIO(content), allow_pickle=False).astype(np.uint64)


def fingerprints(texts: Iterable[str], key: bytes) -> Fingerprints:
    """The distinct fingerprints of all texts that are not empty, sorted.

    A set of nothing but empty texts keeps the empty one: its records must be of some people.
    """
    prints = np.unique(hashes(filter(None, map(normal, texts)), key=key))
    return prints if len(prints) else np.unique(hashes([""], key=key))
