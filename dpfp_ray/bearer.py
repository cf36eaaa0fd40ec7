"""The token that opens the results service: read from a file or the environment, never a flag.

A flag would show it to everyone who can list processes. The service itself keeps only a digest.
"""

import hashlib
import hmac
import os
from pathlib import Path

from dpfp_ray.errors import UserError

VARIABLE = "DPFP_TOKEN"
SHORTEST = 16  # characters; fewer can be guessed
LONGEST = 4096


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


def opens(authorization: str | None, expected: str) -> bool:
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
