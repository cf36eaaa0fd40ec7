"""Who may read, from where, and what a browser may do with what it got.

Without a token the service answers only to the names of this machine: a hostile page that points
its own name at 127.0.0.1 (DNS rebinding) gets nothing. With one, every path but `PUBLIC` needs it.
"""

import re
import time
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response

from dpfp_ray.sweeps import access_tokens
from dpfp_ray.sweeps.access_tokens import LOOPBACK

HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?")
COOKIE = "dpfp_session"
SESSION_SECONDS = 12 * 3600
PUBLIC = ("/api/about", "/login")  # and /static/, which holds nothing of anyone's
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: Any, digest: str | None) -> None:
        self.app = app
        self.digest = digest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "private, no-cache")
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)

    def _refusal(self, scope: Any) -> Response | None:
        headers = Headers(scope=scope)
        base = scope.get("root_path", "").rstrip("/")
        path = scope["path"].removeprefix(base)
        if self.digest is None:
            name = host_name(headers.get("host", ""))
            if name in LOOPBACK:
                return None
            return JSONResponse(
                {"error": f"this service answers to localhost only, not to {name[:80]!r}"}, 403
            )
        if path in PUBLIC or path.startswith("/static/"):
            return None
        if access_tokens.is_authorised(headers.get("authorization"), self.digest):
            return None
        if access_tokens.session_holds(
            _cookie(headers.get("cookie", "")), self.digest, time.time()
        ):
            return None
        if "text/html" in headers.get("accept", "") and not path.startswith("/api/"):
            return RedirectResponse(f"{base}/login", 303)
        return JSONResponse(
            {"error": "a token is needed: Authorization: Bearer TOKEN"},
            401,
            {"WWW-Authenticate": "Bearer"},
        )


def host_name(host: str) -> str:
    """`localhost` of `localhost:8000`, `::1` of `[::1]:8000`; what is no host stays as it is.

    Not by the rules of URLs: to these, `evil.com@localhost` and `localhost#evil` are localhost.
    """
    found = HOST.fullmatch(host)
    return (found["name"].strip("[]") if found else host).lower()


def _cookie(header: str) -> str | None:
    try:
        morsel = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return None
    return morsel.value if morsel else None
