"""The few things that records need of storage, on a local folder or behind a URI.

A file that is written appears whole or not at all: by a rename where there are folders, by nature
on object stores.
"""

import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol
from uuid import uuid4

from dpfp_ray.data.disk import NoRoom, trouble
from dpfp_ray.data.s3 import new_objects, patient
from dpfp_ray.data.whole_files import PRIVATE, PUBLIC, new_file, private_folder, whole_file
from dpfp_ray.plan.errors import UserError

RECORDS = "records"
RESULT = "result.json"
# What must not be read with the rest: the unfinished trials of a selection. Owner-only throughout.
SEALED = "sealed"
OBJECT_STORES = {"s3", "gcs", "abfs"}  # pyarrow's names; an upload shows only when complete
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
        scratch = path.with_name(f".{path.name}.{uuid4().hex}")
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


class RemoteFiles:
    """A pyarrow file system below `root`; only its records/ is looked at, never all of a bucket."""

    local = False

    def __init__(self, filesystem: Any, root: str, name: str) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")
        self.name = name
        self._s3 = new_objects(filesystem, root, name) if filesystem.type_name == "s3" else None

    def exists(self) -> bool:
        from pyarrow.fs import FileType

        with reachable(self.name):
            return bool(self.filesystem.get_file_info(self.root or "/").type != FileType.NotFound)

    def find(self) -> list[Found]:
        from pyarrow.fs import FileSelector, FileType

        with reachable(self.name):
            infos = self.filesystem.get_file_info(
                FileSelector(self._path(RECORDS), allow_not_found=True)
            )
        chosen = [i for i in infos if i.type == FileType.File and is_record(i.base_name)]
        found = [Found(i.path, i.mtime.timestamp() if i.mtime else 0.0) for i in chosen]
        return sorted(found, key=lambda file: file.path)

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector

        with reachable(self.name):
            found = self.filesystem.get_file_info(FileSelector(self.root, allow_not_found=True))
        return [info.base_name for info in found]

    def read(self, path: str) -> bytes:
        missing: FileNotFoundError
        # Only what is not there is an OSError: of the rest nobody knows what it holds.
        with reachable(self.name):
            try:
                with self.filesystem.open_input_stream(path) as stream:
                    return bytes(stream.read())
            except FileNotFoundError as error:
                missing = error
        raise missing

    def read_name(self, name: str) -> bytes:
        return self.read(self._path(name))

    @contextmanager
    def writing(self, name: str, mode: int = PUBLIC) -> Iterator[IO[bytes]]:
        buffer = io.BytesIO()  # a stream to an object store that is closed early would be kept
        yield buffer
        self.write(name, buffer.getvalue())

    def write(self, name: str, content: bytes, mode: int = PUBLIC) -> None:
        path = self._path(name)
        with reachable(self.name):
            if self.filesystem.type_name in OBJECT_STORES:
                self._upload(path, content)
                return
            folder, slash, base = path.rpartition("/")
            if folder:
                self.filesystem.create_dir(folder, recursive=True)
            scratch = f"{folder}{slash}.{base}.{uuid4().hex}"
            self._upload(scratch, content)
            self.filesystem.move(scratch, path)

    def create(self, name: str, content: bytes, mode: int = PUBLIC) -> bool:
        with reachable(self.name):
            if self._s3 is not None and self.exclusive():
                if self._s3.put(self._path(name), content):
                    return True
                with suppress(FileNotFoundError):
                    # It may be ours: the answer to a write that succeeded can get lost.
                    return self.read_name(name) == content
                return False
            try:
                return self.read_name(name) == content
            except FileNotFoundError:
                self.write(name, content)
                return True

    def exclusive(self) -> bool:
        with reachable(self.name):
            return self._s3 is not None and self._s3.honoured(self.root)

    def keep(self, name: str) -> None:
        from pyarrow.fs import FileType

        with reachable(self.name):
            try:
                self.filesystem.copy_file(self._path(name), self._path(previous(name)))
            except OSError:  # S3 does not say in a way of its own that nothing is there
                if self.filesystem.get_file_info(self._path(name)).type != FileType.NotFound:
                    raise

    def delete(self, name: str) -> None:
        with reachable(self.name), suppress(FileNotFoundError):
            self.filesystem.delete_file(self._path(name))

    def delete_folder(self, name: str) -> None:
        with reachable(self.name), suppress(FileNotFoundError):
            self.filesystem.delete_dir(self._path(name))

    def _upload(self, path: str, content: bytes) -> None:
        with self.filesystem.open_output_stream(path) as stream:
            stream.write(content)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if self.root else name


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
