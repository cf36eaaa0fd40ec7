"""A folder or bucket of small objects, each of which is written once and never changed.

Local objects are for their owner only (0600 in folders of 0700), whatever the umask; behind a URI
that is the bucket's policy to say. A name can be written once: a second writer of the same name
fails, on folders and on S3. On other stores names carry random digits, so that no two writers
choose the same.

Every object carries a checksum, JSON as a field and other bytes at their end, so that a changed
number is noticed and not summed. It covers the object's name too: a copy under another name is
damage. It is no signature: the owner of the folder can make another one.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dpfp_ray.system.cache import explained
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import Files, LocalFiles, open_files
from dpfp_ray.system.whole_files import PRIVATE, locked

DIGEST = 16  # bytes of a checksum
CHECKSUM = "checksum"


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
        """The bytes that `write` was given."""
        stored = self._stored(name)
        content, digest = stored[:-DIGEST], stored[-DIGEST:]
        with self.intact(name):
            if digest != _digest(name, content):
                raise ValueError("its checksum does not match")
        return content

    def read_json(self, name: str) -> dict[str, Any]:
        """The facts that `write_json` was given."""
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
        checksum = _digest(name, _canonical(facts)).hex()
        sealed = {**facts, CHECKSUM: checksum}
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
