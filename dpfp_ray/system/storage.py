"""The few things that records need of storage, on a local folder or behind a URI.

A file that is written appears whole or not at all: by a rename where there are folders, by nature
on object stores.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from dpfp_ray.system.cache import NoRoom, trouble
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import (
    PRIVATE,
    PUBLIC,
    new_file,
    private_folder,
    scratch_of,
    whole_file,
)

RECORDS = "records"
RESULT = "result.json"
# What must not be read with the rest: the unfinished trials of a selection. Owner-only throughout.
SEALED = "sealed"
# Ray Tune leaves a result.json of its own (JSON lines) in each trial's folder, always beside this.
TUNE_MARK = "params.json"


@dataclass(frozen=True)
class Found:
    path: str
    modified: float  # seconds since the epoch


class Files(Protocol):
    name: str
    local: bool

    def exists(self) -> bool: ...

    def find(self) -> list[Found]:
        """Files that should hold a record, by path."""
        ...

    def names(self) -> list[str]:
        """Of all files at the top, not of those in folders."""
        ...

    def read(self, path: str) -> bytes:
        """The content of a file that `find` gave; OSError if it cannot be had, or UserError if the
        store cannot be reached."""
        ...

    def read_name(self, name: str) -> bytes:
        """The content under `name` (relative), as `read`."""
        ...

    def writing(self, name: str, mode: int = PUBLIC) -> AbstractContextManager[IO[bytes]]:
        """A stream that replaces what is under `name` (relative) in one step, at the block's end.

        `mode` is for local files only; who may read an object is the store's own setting.
        """
        ...

    def write(self, name: str, content: bytes, mode: int = PUBLIC) -> None:
        """Put `content` under `name`, as `writing` does."""
        ...

    def create(self, name: str, content: bytes, mode: int = PUBLIC) -> bool:
        """Put `content` under `name` unless something else is there; whether it is there now.

        Of several who try at once with contents of their own, one succeeds, if `exclusive()`.
        """
        ...

    def exclusive(self) -> bool:
        """Whether `create` is one step: on folders and on S3, not on other object stores."""
        ...

    def keep(self, name: str) -> None:
        """What is under `name`, if anything, is from now on also under `previous(name)`."""
        ...

    def delete(self, name: str) -> None:
        """Remove the file under `name`, if it is there; OSError (behind a URI: UserError) if it
        cannot be removed."""
        ...

    def delete_folder(self, name: str) -> None:
        """Remove all that is below `name`, if it is there, as `delete`."""
        ...


def open_files(location: str | Path) -> Files:
    """The storage at a path or URI; nothing is created or read yet."""
    text = str(location)
    if "://" not in text:
        return LocalFiles(Path(text).expanduser())
    import pyarrow as pa
    from pyarrow import fs

    from dpfp_ray.system.remote_files import RemoteFiles, patient

    with reachable(text):
        try:
            filesystem, path = fs.FileSystem.from_uri(text)
        except pa.ArrowException as error:
            raise UserError(f"{public(text)} is no usable URI: {one_line(error)}") from None
    if isinstance(filesystem, fs.LocalFileSystem):
        return LocalFiles(Path(path))
    if not path:
        raise UserError(f"{public(text)} names no bucket; give a URI such as s3://bucket/folder")
    if isinstance(filesystem, fs.S3FileSystem):
        filesystem = patient(filesystem)
    return RemoteFiles(filesystem, path, public(text))


def below(location: str, name: str) -> str:
    """The path or URI of what is called `name` in the storage at `location`."""
    path, mark, query = location.partition("?") if "://" in location else (location, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


class LocalFiles:
    """A folder, searched to the bottom: runs, compares and sweeps below it are found."""

    local = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)

    def exists(self) -> bool:
        return self.root.is_dir()

    def find(self) -> list[Found]:
        found = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [n for n in subfolders if not n.startswith(".") and n != SEALED]
            if os.path.basename(os.path.abspath(folder)) == RECORDS:
                chosen = [name for name in names if is_record(name)]
            else:
                chosen = [RESULT] if RESULT in names and TUNE_MARK not in names else []
            for name in chosen:
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):  # a run that is being overwritten
                    found.append(Found(path, os.lstat(path).st_mtime))
        return sorted(found, key=lambda file: file.path)

    def names(self) -> list[str]:
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self.root}: {error.strerror}") from None

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def read_name(self, name: str) -> bytes:
        return self.read(str(self.root / name))

    @contextmanager
    def writing(self, name: str, mode: int = PUBLIC) -> Iterator[IO[bytes]]:
        path = self.root / name
        try:
            private_folder(self.root)  # its unfinished parts are secret
            with whole_file(path, PRIVATE if self.root.name == SEALED else mode) as file:
                yield file
        except OSError as error:
            raise trouble(path, error) from None

    def write(self, name: str, content: bytes, mode: int = PUBLIC) -> None:
        with self.writing(name, mode) as file:
            file.write(content)

    def create(self, name: str, content: bytes, mode: int = PUBLIC) -> bool:
        path = self.root / name
        try:
            private_folder(self.root)
            return new_file(path, content, mode) or path.read_bytes() == content
        except OSError as error:
            raise trouble(path, error) from None

    def exclusive(self) -> bool:
        return True

    def keep(self, name: str) -> None:
        path = self.root / name
        scratch = scratch_of(path)
        try:
            try:
                os.link(path, scratch)  # takes no room
            except FileNotFoundError:
                return
            except OSError:  # a file system without links
                shutil.copyfile(path, scratch)
                scratch.chmod(PRIVATE)
            os.replace(scratch, self.root / previous(name))
        except OSError as error:
            raise trouble(path, error) from None
        finally:
            # A link to a file is not replaced by another link to it; then it is still there.
            scratch.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def delete_folder(self, name: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.root / name)


def previous(name: str) -> str:
    """Where `Files.keep` puts what is under `name`."""
    return f"{name}.previous"


def is_record(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")


@contextmanager
def reachable(location: str) -> Iterator[None]:
    """A store that cannot be reached is the user's to fix: one line, no traceback, no password."""
    try:
        yield
    except OSError as error:
        raise NoRoom(f"cannot reach {public(location)}: {one_line(error)}") from None


def public(location: str) -> str:
    """A URI without what may be secret in it: `key:secret@` and the query."""
    return re.sub(r"\?\S*", "", re.sub(r"//[^/\s]*@", "//", location))


def one_line(error: Exception | Warning | str) -> str:
    return public(" ".join(str(error).split()))[:300]
