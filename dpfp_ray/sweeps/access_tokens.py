"""Tokens, of the results service and of Ray: read from a file or the environment, never a flag.

A flag would show them to everyone who can list processes. The service itself keeps only a digest.
"""

import hashlib
import hmac
import os
from pathlib import Path
from urllib.parse import urlsplit

from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import public

LOOPBACK = ("localhost", "127.0.0.1", "::1")
VARIABLE = "DPFP_TOKEN"
SHORTEST = 16  # characters; fewer can be guessed
LONGEST = 4096
RAY_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # what every client asks first
PROBE_SECONDS = 10.0


def read_token(file: str | None) -> str | None:
    """The token of `file`, else of $DPFP_TOKEN, else None."""
    if file is None:
        token, origin = os.environ.get(VARIABLE, "").strip(), f"${VARIABLE}"
        if not token:
            return None
    else:
        origin = file
        try:
            token = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UserError(f"cannot read the token file {file}: {reason}") from None
    if not SHORTEST <= len(token) <= LONGEST:
        raise UserError(
            f"the token in {origin} has {len(token)} characters; use {SHORTEST} or more, such as "
            "the output of: openssl rand -hex 32"
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError(f"the token in {origin} holds spaces or odd characters; use letters, 0-9")
    return token


def header(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def is_authorised(authorization: str | None, expected: str) -> bool:
    """Is this header `Bearer TOKEN` with the token of the digest `expected`? In constant time."""
    scheme, _, token = (authorization or "").partition(" ")
    return hmac.compare_digest(digest(token.strip()), expected) and scheme.lower() == "bearer"


def session(expected: str, until: int) -> str:
    """A cookie for a browser, which cannot send the header: says until when, signed."""
    mark = hmac.new(bytes.fromhex(expected), f"session {until}".encode(), hashlib.sha256)
    return f"{until}.{mark.hexdigest()}"


def session_holds(cookie: str | None, expected: str, now: float) -> bool:
    until = (cookie or "").partition(".")[0]
    if not (until.isascii() and until.isdigit()) or len(until) > 12:
        return False
    return hmac.compare_digest(
        (cookie or "").encode("utf-8", "replace"), session(expected, int(until)).encode()
    ) and now < int(until)


def ray_token(address: str, file: str | None) -> str | None:
    """The token of a Ray cluster itself, for its dashboard and Jobs API; found as Ray finds it.

    It lets its holder run code on the cluster, so the one in the home folder goes to other machines
    only if RAY_AUTH_MODE=token says that it is meant to.
    """
    if file is not None:
        return read_token(file)
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if mode == "disabled":
        return None
    given = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if given:
        return given
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return read_token(path)
    home = Path.home() / ".ray" / "auth_token"
    if (mode == "token" or host_of(address) in LOOPBACK) and home.is_file():
        return read_token(str(home))
    return None


def refused(address: str, token: str | None = None) -> bool:
    """Whether the Ray at HOST:PORT, its control service, answers nobody without another token."""
    import grpc

    sent = tuple((key.lower(), value) for key, value in header(token).items()) if token else None
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(RAY_QUESTION)(b"", timeout=PROBE_SECONDS, metadata=sent)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def advice(address: str, *, given: bool) -> str:
    wrong = "is not the right one" if given else "is needed"
    return (
        f"a token {wrong} for Ray at {address}: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or "
        f"RAY_AUTH_TOKEN_PATH) to the cluster's; its head has it in ~/.ray/auth_token"
    )


def host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def check_http(address: str) -> str:
    """`http://host:port`, checked: a web address without a password in it."""
    shown = public(address)[:100]
    if not address.startswith(("http://", "https://")) or not host_of(address):
        raise UserError(f"address is {shown!r}; give one such as http://head:8265")
    if "@" in urlsplit(address).netloc:
        raise UserError(f"{shown} holds a password, which others would see; use a token")
    return address.rstrip("/")
