"""Storage behind a URI: a pyarrow file system, and for S3 what pyarrow does not ask for: patience,
and a write that fails where something is.

The settings (endpoint, region, keys of the URI, if it has any) are those that pyarrow has read from
the URI and the environment; it tells them only to pickle.
"""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import IO, Any
from uuid import uuid4

from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import RECORDS, Found, is_record, previous, reachable
from dpfp_ray.system.whole_files import PUBLIC

OBJECT_STORES = {"s3", "gcs", "abfs"}  # pyarrow's names; an upload shows only when complete
ATTEMPTS = 5  # of each request; waits in between grow, to about 10 seconds in all
CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")  # another write at this moment


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
