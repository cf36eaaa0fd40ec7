"""Records and small files in a local folder or behind a URI, through one interface.

A file that is written appears whole or not at all: by a rename where there are folders, by nature
on object stores. A URI is a pyarrow file system, and for S3 what pyarrow does not ask for:
patience, and a write that fails where something is. Its settings (endpoint, region, keys, if the
URI has any) are those that pyarrow has read from URI and environment; it tells them only to pickle.

Listing must show what was written before it: true of local folders, and of S3 (since December
2020), Google Cloud Storage and Azure.
"""

import io
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any
from uuid import uuid4

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
OBJECT_STORES = {"s3", "gcs", "abfs"}  # pyarrow's names; an upload shows only when complete
ATTEMPTS = 5  # of each request; waits in between grow, to about 10 seconds in all
LISTINGS = 100  # tries
CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")  # another write at this moment


@dataclass(frozen=True)
class Found:
    path: str
    modified: float  # seconds since the epoch


class Files(ABC):
    """Files below a path or URI. Names are relative to it.

    Behind a URI, OSErrors (but for a missing file) are UserErrors: the store cannot be reached.
    `mode` is for local files only; who may read an object is the store's own setting.
    """

    name: str
    local: bool

    @abstractmethod
    def exists(self) -> bool: ...

    @abstractmethod
    def find(self) -> list[Found]:
        """Files that should hold a record, by path."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Names of the files in `folder`, without those in folders below it."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a file that `find` gave; OSError if it cannot be had."""

    @abstractmethod
    def read_name(self, name: str) -> bytes:
        """The content under `name`, as `read`."""

    @abstractmethod
    def writing(self, name: str, mode: int = PUBLIC) -> AbstractContextManager[IO[bytes]]:
        """A stream that replaces what is under `name` in one step, at the block's end."""

    def write(self, name: str, content: bytes, mode: int = PUBLIC) -> None:
        """Put `content` under `name`, as `writing` does."""
        with self.writing(name, mode) as file:
            file.write(content)

    @abstractmethod
    def create(self, name: str, content: bytes, mode: int = PUBLIC) -> bool:
        """Put `content` under `name` unless something else is there; whether it is there now.

        Of several who try at once with contents of their own, one succeeds, if `exclusive()`.
        """

    @abstractmethod
    def exclusive(self) -> bool:
        """Whether `create` is one step: on folders and on S3, not on other object stores."""

    @abstractmethod
    def keep(self, name: str) -> None:
        """What is under `name`, if anything, is from now on also under `previous(name)`."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the file under `name`, if it is there; OSError if it cannot be removed."""

    @abstractmethod
    def delete_folder(self, name: str) -> None:
        """Remove all that is below `name`, if it is there, as `delete`."""


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


class LocalFiles(Files):
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

    def names(self, folder: str = "") -> list[str]:
        try:
            return os.listdir(self.root / folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self.root / folder}: {error.strerror}") from None

    def read(self, path: str) -> bytes:
        return Path(path).read_bytes()

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


class RemoteFiles(Files):
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
        chosen = [info for info in self._list(RECORDS) if is_record(info.base_name)]
        found = [Found(i.path, i.mtime.timestamp() if i.mtime else 0.0) for i in chosen]
        return sorted(found, key=lambda file: file.path)

    def names(self, folder: str = "") -> list[str]:
        return [info.base_name for info in self._list(folder)]

    def _list(self, folder: str) -> list[Any]:
        from pyarrow.fs import FileSelector, FileType

        for _ in range(LISTINGS):
            # A missing folder is an empty listing; what else is not found is a scratch file that
            # another writer has just renamed, which breaks listings of file systems with folders.
            with reachable(self.name), suppress(FileNotFoundError):
                selector = FileSelector(self._path(folder), allow_not_found=True)
                infos = self.filesystem.get_file_info(selector)
                return [info for info in infos if info.type == FileType.File]
        raise UserError(f"cannot list {folder} of {self.name}; try again")

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
        path, content = self._path(name), buffer.getvalue()
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
        return "/".join(part for part in (self.root, name) if part)


def patient(filesystem: Any) -> Any:
    """The same pyarrow file system, which repeats requests that fail more often."""
    from pyarrow import fs

    strategy = fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
    return fs.S3FileSystem(**_settings(filesystem), retry_strategy=strategy)


_KNOWN: dict[str, "NewObjects"] = {}  # by settings and bucket: a client takes a moment to make


def new_objects(filesystem: Any, root: str, name: str) -> "NewObjects":
    settings = _settings(filesystem)
    key = json.dumps([settings, root.partition("/")[0]], sort_keys=True, default=str)
    return _KNOWN.setdefault(key, NewObjects(settings, name))


class NewObjects:
    """Makes objects that are not there yet; of several who try, one succeeds."""

    def __init__(self, settings: dict[str, Any], name: str) -> None:
        self.settings, self.name = settings, name
        self._lock = Lock()
        self._known_client: Any = None
        self._honoured: bool | None = None

    def honoured(self, folder: str) -> bool:
        """Whether this store keeps to the condition; some S3-compatible ones ignore it."""
        with self._lock:
            if self._honoured is None:
                path = f"{folder}/.probe-{uuid4().hex}"
                self._honoured = self.put(path, b"1") and not self.put(path, b"2")
                bucket, _, key = path.partition("/")
                with suppress(Exception):  # it is empty, and hidden
                    self._client().delete_object(Bucket=bucket, Key=key)
            return self._honoured

    def put(self, path: str, content: bytes) -> bool:
        """False if something is there; OSError if that cannot be found out."""
        client = self._client()
        from botocore.exceptions import BotoCoreError, ClientError

        bucket, _, key = path.partition("/")
        for _ in range(ATTEMPTS):
            try:
                client.put_object(Bucket=bucket, Key=key, Body=content, IfNoneMatch="*")
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code", "")
                if code in CONFLICTS:
                    continue
                if code in ("PreconditionFailed", "412"):
                    return False
                raise OSError(str(error)) from None
            except BotoCoreError as error:
                raise OSError(str(error)) from None
            return True
        raise OSError(f"others write {path} all the time")

    def _client(self) -> Any:
        if self._known_client is None:
            try:
                import botocore.session
                from botocore.config import Config
            except ImportError:
                raise UserError(
                    f"{self.name} needs botocore, so that two drivers cannot both begin there; "
                    f"pip install 'dpfp-ray[s3]'"
                ) from None
            known = self.settings
            endpoint = known["endpoint_override"] or None
            if endpoint and "://" not in endpoint:
                endpoint = f"{known['scheme']}://{endpoint}"
            style = "path" if endpoint and not known["force_virtual_addressing"] else "auto"
            self._known_client = botocore.session.get_session().create_client(
                "s3",
                region_name=known["region"] or None,
                endpoint_url=endpoint,
                aws_access_key_id=known["access_key"] or None,
                aws_secret_access_key=known["secret_key"] or None,
                aws_session_token=known["session_token"] or None,
                verify=known["tls_ca_file_path"] or None,
                config=Config(
                    retries={"mode": "standard", "max_attempts": ATTEMPTS},
                    s3={"addressing_style": style},
                    connect_timeout=10,
                    read_timeout=20,
                ),
            )
        return self._known_client


def _settings(filesystem: Any) -> dict[str, Any]:
    _, (settings,) = filesystem.__reduce__()
    return dict(settings)


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
