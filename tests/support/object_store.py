"""An S3 server for tests (moto), behind a proxy that lets some requests fail."""

import http.client
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
KEY_ID, SECRET_KEY = "AKIDTESTTESTTEST", "wJalrSECRETSECRETxyz"
DROPPED = ("connection", "transfer-encoding", "keep-alive", "content-length", "date", "server")


@dataclass
class Faults:
    """How many of all requests fail, and how; the same for the same seed and order."""

    seed: int = 0
    refused: float = 0.0  # answered 500, not done
    unanswered: float = 0.0  # done, and answered 500
    late: float = 0.0  # answered after `pause` seconds, when the client has hung up
    pause: float = 25.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def draw(self) -> str:
        chance = self.random.random()
        for kind in ("refused", "unanswered", "late"):
            chance -= getattr(self, kind)
            if chance < 0:
                return kind
        return ""


@dataclass
class ObjectStore:
    """`endpoint` is the proxy's address, `client` goes past it."""

    endpoint: str
    client: Any
    faults: Faults = field(default_factory=Faults)
    failed: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [one["Key"] for page in pages for one in page.get("Contents", [])]
        return [key for key in keys if not key.endswith("/")]  # pyarrow's marks of folders

    def read(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def records(self, prefix: str) -> dict[str, Any]:
        found = [json.loads(self.read(name)) for name in self.names(f"{prefix}/records/")]
        return {record["trial"]["id"]: record for record in found}


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    import botocore.session
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    address = moto.get_host_and_port()
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url="http://{}:{}".format(*address),
        region_name="us-east-1",
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET_KEY,
    )
    client.create_bucket(Bucket=BUCKET)
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    store = ObjectStore(f"http://127.0.0.1:{proxy.server_address[1]}", client)
    proxy.store, proxy.target = store, address  # type: ignore[attr-defined]
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield store
    finally:
        proxy.shutdown()
        proxy.server_close()
        moto.stop()


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def forward(self) -> None:
        body = self._body()
        store: ObjectStore = self.server.store
        with store.lock:
            fault = store.faults.draw()
            store.failed[fault] += bool(fault)
        if fault == "refused":
            return self._answer(500, [], b"")
        if self.headers.get("If-None-Match"):
            with store.lock:  # moto looks, then writes; S3 does both at once
                status, headers, answer = self._ask(body)
        else:
            status, headers, answer = self._ask(body)
        if fault == "unanswered":
            return self._answer(500, [], b"")
        if fault == "late":
            time.sleep(store.faults.pause)
            self.close_connection = True
            return None
        return self._answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        target = http.client.HTTPConnection(*self.server.target, timeout=60)
        headers = {n: v for n, v in self.headers.items() if n.lower() not in (*DROPPED, "expect")}
        target.request(self.command, self.path, body, headers)
        answer = target.getresponse()
        content = answer.read()
        target.close()
        return answer.status, answer.getheaders(), content

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(pieces)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        length = str(len(content))
        with suppress(OSError):
            self.send_response(status)
            for name, value in headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = value
                elif name.lower() not in DROPPED:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass
