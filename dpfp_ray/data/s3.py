"""What S3 can do and pyarrow does not ask for: patience, and a write that fails where something is.

The settings (endpoint, region, keys of the URI, if it has any) are those that pyarrow has read from
the URI and the environment; it tells them only to pickle.
"""

import json
from contextlib import suppress
from threading import Lock
from typing import Any
from uuid import uuid4

from dpfp_ray.plan.errors import UserError

ATTEMPTS = 5  # of each request; waits in between grow, to about 10 seconds in all
CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")  # another write at this moment


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
