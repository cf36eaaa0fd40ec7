"""A folder or bucket of small objects, each of which is written once and never changed.

Local objects are for their owner only (0600 in folders of 0700), whatever the umask; behind a URI
that is the bucket's policy to say. A name can be written once: a second writer of the same name
fails, on folders and on S3. On other stores names carry random digits, so that no two writers
choose the same.

Every object carries a checksum, JSON as a field and other bytes at their end, so that a changed
number is noticed and not summed. It covers the object's name too: a copy under another name is
damage. It is no signature: the owner of the folder can make another one.

Listing must show what was written before it: true of local folders, and of S3 (since December
2020), Google Cloud Storage and Azure.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpfp_ray.system.errors import UserError
from dpfp_ray.system.remote_files import RemoteFiles
from dpfp_ray.system.storage import LocalFiles, open_files, reachable
from dpfp_ray.system.whole_files import PRIVATE, new_file

Place = LocalFiles | RemoteFiles
LISTINGS = 100  # tries
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

    def __init__(self, place: str | Path | Place) -> None:
        files = open_files(place) if isinstance(place, str | Path) else place
        assert isinstance(files, LocalFiles | RemoteFiles)
        self.files: Place = files
        self.name = files.name

    def names(self, folder: str) -> list[str]:
        """The names in `folder`, sorted; scratch files are left out."""
        if isinstance(self.files, LocalFiles):
            try:
                found = os.listdir(self.files.root / folder)
            except FileNotFoundError:
                found = []
            except OSError as error:
                raise self._trouble("read", folder, error) from None
        else:
            found = self._remote_names(self.files, folder)
        return sorted(name for name in found if not name.startswith("."))

    def _remote_names(self, files: RemoteFiles, folder: str) -> list[str]:
        from pyarrow.fs import FileSelector, FileType

        where = FileSelector(
            f"{files.root}/{folder}" if files.root else folder, allow_not_found=True
        )
        for _ in range(LISTINGS):
            # A missing folder is an empty listing; what else is not found is a scratch file that
            # another writer has just renamed, which breaks listings of file systems with folders.
            with reachable(self.name), suppress(FileNotFoundError):
                infos = files.filesystem.get_file_info(where)
                return [info.base_name for info in infos if info.type == FileType.File]
        raise UserError(f"cannot list {folder} of the ledger {self.name}; try again")

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
            raise self._trouble("read", name, error) from None

    def _store(self, name: str, content: bytes) -> None:
        if isinstance(self.files, LocalFiles):
            path = self.files.root / name
            try:
                self._make_folder(path.parent)
                # The same thing twice is fine.
                made = new_file(path, content, PRIVATE) or path.read_bytes() == content
            except OSError as error:
                raise self._trouble("write", name, error) from None
        else:
            made = self.files.create(name, content)
        if not made:
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
        if isinstance(self.files, RemoteFiles):
            yield
            return
        try:
            self._make_folder(self.files.root)
            descriptor = os.open(self.files.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._trouble("write", "lock", error) from None
        try:
            os.fchmod(descriptor, 0o600)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_folder(self, folder: Path) -> None:
        """`folder`, owner-only from the ledger's own on down; folders above it are the user's."""
        assert isinstance(self.files, LocalFiles)
        root = self.files.root
        root.parent.mkdir(parents=True, exist_ok=True)
        own = [root, *(root / part for part in folder.relative_to(root).parents if part.name)]
        for path in [*own, folder]:
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            path.chmod(0o700)

    def _trouble(self, verb: str, name: str, error: OSError) -> UserError:
        return UserError(f"cannot {verb} {name} of the ledger {self.name}: {error.strerror}")
