"""Records and small files in a local folder or behind a URI, through one interface.

A file that is written appears whole or not at all: by a rename where there are folders, by nature
on object stores. A URI is a store of obstore's (`s3://`, `gs://`, `abfs://`): it repeats requests
that fail, and has writes that fail where something is. Keys and endpoints come from the environment
(or, for S3, from `~/.aws` with `dpfp-ray[remote]`), never from the URI, which others may see.

Listing must show what was written before it: true of local folders, and of S3 (since December
2020), Google Cloud Storage and Azure.
"""

import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from dpfp_ray.system.cache import NoRoom, trouble
from dpfp_ray.system.errors import UserError, require
from dpfp_ray.system.whole_files import (
    PRIVATE,
    PUBLIC,
    new_file,
    private_folder,
    whole_file,
)

RECORDS = "records"
RESULT = "result.json"
# What must not be read with the rest: the unfinished trials of a selection. Owner-only throughout.
SEALED = "sealed"
# Ray Tune leaves a result.json of its own (JSON lines) in each trial's folder, always beside this.
TUNE_MARK = "params.json"
RETRIES = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
TIMEOUTS = {"connect_timeout": "10s", "timeout": "30s"}


@dataclass(frozen=True)
class Found:
    path: str
    modified: float  # seconds since the epoch


def open_files(location: str | Path) -> "Files":
    """The storage at a path or URI; nothing is created or read yet."""
    text = str(location)
    if "://" not in text:
        return LocalFiles(Path(text).expanduser())
    if text.startswith("file:///"):
        return LocalFiles(Path(text.removeprefix("file://")))
    if "?" in text or (text.startswith("s3://") and "@" in text):
        raise UserError(
            f"{public(text)}: keys and settings do not belong in a URI; set them in the "
            "environment, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
        )
    return RemoteFiles(open_store(text), text)


def open_store(uri: str) -> Any:
    """The object store behind a URI, with the settings of the environment."""
    require("obstore", "remote", public(uri))
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    client = TIMEOUTS | {"allow_http": endpoint.startswith("http://")}
    options: dict[str, Any] = {"client_options": client, "retry_config": RETRIES}
    if uri.startswith("s3://") and "AWS_ACCESS_KEY_ID" not in os.environ:
        with suppress(ImportError, ValueError):  # boto3 reads ~/.aws; without keys there, roles
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
    try:
        return from_url(uri, **options)
    except (BaseError, ValueError) as error:
        reason = one_line(str(error).partition("\n")[0])
        example = "give one such as s3://bucket/folder"
        raise UserError(f"{public(uri)} is no usable URI: {reason}; {example}") from None


def below(location: str, name: str) -> str:
    """The path or URI of what is called `name` in the storage at `location`."""
    return f"{location.rstrip('/')}/{name}"


class LocalFiles:
    """A folder, searched to the bottom: runs, compares and sweeps below it are found.

    Names are relative to it. `mode` is of a new file; behind a URI, who may read an object is the
    store's own setting.
    """

    local = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)

    def exists(self) -> bool:
        return self.root.is_dir()

    def find(self) -> list[Found]:
        """Files that should hold a record, by path."""
        records = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [n for n in subfolders if not n.startswith(".") and n != SEALED]
            if os.path.basename(os.path.abspath(folder)) == RECORDS:
                chosen = [name for name in names if is_record(name)]
            else:
                chosen = [RESULT] if RESULT in names and TUNE_MARK not in names else []
            for name in chosen:
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):  # a run that is being overwritten
                    records.append(Found(path, os.lstat(path).st_mtime))
        return sorted(records, key=lambda file: file.path)

    def names(self, folder: str = "") -> list[str]:
        """Names of the files in `folder`, without those in folders below it."""
        try:
            return os.listdir(self.root / folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self.root / folder}: {error.strerror}") from None

    def read(self, path: str) -> bytes:
        """The content of a file that `find` gave; OSError if it cannot be had."""
        return Path(path).read_bytes()

    def read_name(self, name: str) -> bytes:
        """The content under `name`, as `read`."""
        return self.read(str(self.root / name))

    @contextmanager
    def writing(self, name: str, mode: int = PUBLIC) -> Iterator[IO[bytes]]:
        """A stream that replaces what is under `name` in one step, at the block's end."""
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
        """Put `content` under `name` unless something else is there; whether it is there now.

        Of several who try at once with contents of their own, one succeeds.
        """
        path = self.root / name
        try:
            private_folder(self.root)
            return new_file(path, content, mode) or path.read_bytes() == content
        except OSError as error:
            raise trouble(path, error) from None

    def delete(self, name: str) -> None:
        """Remove the file under `name`, if it is there; OSError if it cannot be removed."""
        (self.root / name).unlink(missing_ok=True)

    def delete_folder(self, name: str) -> None:
        """Remove all that is below `name`, if it is there, as `delete`."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.root / name)


class RemoteFiles:
    """The same of an object store, its prefix included; only its records/ is looked at, never all
    of it. Errors but for a missing file are UserErrors: the store cannot be reached."""

    local = False

    def __init__(self, store: Any, name: str) -> None:
        self.store, self.name = store, public(name)

    def exists(self) -> bool:
        import obstore

        with reachable(self.name):
            return any(obstore.list(self.store, chunk_size=1))

    def find(self) -> list[Found]:
        records = [one for one in self._list(RECORDS) if is_record(one["path"].rpartition("/")[2])]
        records.sort(key=lambda one: str(one["path"]))
        return [Found(one["path"], one["last_modified"].timestamp()) for one in records]

    def names(self, folder: str = "") -> list[str]:
        return [one["path"].rpartition("/")[2] for one in self._list(folder)]

    def _list(self, folder: str) -> list[Any]:
        import obstore

        with reachable(self.name):
            return list(obstore.list_with_delimiter(self.store, folder or None)["objects"])

    def read(self, path: str) -> bytes:
        import obstore

        with reachable(self.name):
            return bytes(obstore.get(self.store, path).bytes())

    def read_name(self, name: str) -> bytes:
        return self.read(name)

    @contextmanager
    def writing(self, name: str, mode: int = PUBLIC) -> Iterator[IO[bytes]]:
        buffer = io.BytesIO()  # an upload that is closed early would be kept
        yield buffer
        self.write(name, buffer.getvalue())

    def write(self, name: str, content: bytes, mode: int = PUBLIC) -> None:
        import obstore

        with reachable(self.name):
            obstore.put(self.store, name, content)

    def create(self, name: str, content: bytes, mode: int = PUBLIC) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with reachable(self.name):
            try:
                obstore.put(self.store, name, content, mode="create")
                return True
            except AlreadyExistsError:
                # It may be ours: the answer to a write that succeeded can get lost.
                with suppress(FileNotFoundError):
                    return self.read(name) == content
                return False

    def delete(self, name: str) -> None:
        import obstore

        with reachable(self.name), suppress(FileNotFoundError):
            obstore.delete(self.store, name)

    def delete_folder(self, name: str) -> None:
        import obstore

        with reachable(self.name):
            for page in obstore.list(self.store, f"{name}/"):
                obstore.delete(self.store, [one["path"] for one in page])


Files = LocalFiles | RemoteFiles


def is_record(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")


@contextmanager
def reachable(location: str) -> Iterator[None]:
    """A store that cannot be reached is the user's to fix: one line, no traceback, no password. A
    missing object stays a FileNotFoundError."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, BaseError) as error:
        reason = one_line(str(error).partition("\n")[0])
        raise NoRoom(f"cannot reach {location}: {reason}") from None


def public(location: str) -> str:
    """A URI without what may be secret in it: `key:secret@` and the query."""
    return re.sub(r"\?\S*", "", re.sub(r"//[^/\s]*@", "//", location))


def one_line(error: Exception | Warning | str) -> str:
    return public(" ".join(str(error).split()))[:300]
