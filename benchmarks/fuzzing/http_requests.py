"""HTTP requests, given to the service's application as its server would give them."""

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

from fuzzing.cases import Case, Inputs
from fuzzing.values import odd, odd_text, spoil_bytes

PLACES = (
    "/",
    "/api/about",
    "/api/version",
    "/api/results",
    "/static/",
    "/tables/",
    "/figures/",
    "/login",
    "/ledger",
    "/openapi.json",
    "/nothing",
)
NAMES = ("where", "sort", "limit", "offset", "records", "v", "x", "")
STATUSES = (200, 303, 304, 307, 400, 401, 403, 404, 405, 431)


def http(inputs: Inputs, rng: Random) -> Case:
    method = rng.choice(("GET", "GET", "GET", "GET", "POST", "HEAD", "PUT", "PATCH\0", "x" * 100))
    path = rng.choice(PLACES)
    if path.endswith("/") or rng.random() < 0.2:
        path += quoted(odd_text(rng)) if rng.random() < 0.7 else "../" * rng.randrange(9) + "x"
    query = "&".join(
        f"{rng.choice(NAMES)}={quoted(odd_where(rng))}" for _ in range(rng.randrange(4))
    )
    headers = {"host": "localhost"}
    for _ in range(rng.randrange(3)):
        name = rng.choice(("host", "accept", "cookie", "authorization", "if-none-match", "range"))
        headers[name] = rng.choice(
            ("text/html", "W/x", "bytes=0-1", "dpfp_session=x", odd_text(rng))
        )
    lines = [f"{method} {path}?{query}", *(f"{name}: {value}" for name, value in headers.items())]
    payload = "\n".join(line.replace("\n", " ") for line in lines).encode("utf-8", "replace")
    if rng.random() < 0.2:
        payload = spoil_bytes(payload, rng)

    def run(request: bytes, folder: Path) -> str | None:
        if inputs.app is None:
            from dpfp_ray.service.app import build_app

            inputs.app = build_app(str(inputs.served), None, str(inputs.ledger))
        return judge(*asyncio.run(ask(inputs.app, request)))

    return Case("http", "a request to the service", payload, run)


def odd_where(rng: Random) -> str:
    if rng.random() < 0.6:
        return odd_text(rng)
    column = rng.choice(("method", "accuracy", "epsilon", "id", "nothing"))
    how = rng.choice(("==", "<", ">=", "in", "is", "!=", "and", "or not"))
    return f"{column} {how} {odd(rng)!r}"


def quoted(text: str) -> str:
    return quote_from_bytes(text.encode("utf-8", "surrogatepass"), safe="/")


async def ask(app: Any, request: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """What the application answers: status, headers, body."""
    first, *rest = request.split(b"\n")
    method, _, target = first.partition(b" ")
    raw, _, query = target.partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method.decode("latin1"),
        "scheme": "http",
        "path": unquote_to_bytes(raw).decode("utf-8", "replace"),
        "raw_path": raw,
        "root_path": "",
        "query_string": query,
        "headers": [
            (name.strip().lower(), value.strip())
            for name, _, value in (line.partition(b":") for line in rest)
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    body = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return sent[0]["status"], dict(sent[0]["headers"]), body


def judge(status: int, headers: dict[bytes, bytes], body: bytes) -> str | None:
    if status not in STATUSES:
        return f"status: {status} {body[:100]!r}"
    if b"Traceback" in body:
        return f"traceback: {body[-300:]!r}"
    if headers.get(b"content-type", b"").startswith(b"application/json") and body:
        try:
            json.loads(body)
        except ValueError as error:
            return f"no JSON: {error}"
    if any(b"\n" in value or b"\r" in value for value in headers.values()):
        return "header: has a line break"
    return None
