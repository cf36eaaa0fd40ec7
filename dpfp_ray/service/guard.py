"""Who may read, from where, and what a browser may do with what it got; the login.

Without a token the service answers only to the names of this machine: a hostile page that points
its own name at 127.0.0.1 (DNS rebinding) gets nothing. With one, every path but `PUBLIC` needs it.
"""

import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from dpfp_ray.reports.page import templates
from dpfp_ray.sweeps import access_tokens
from dpfp_ray.system.errors import UserError

HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?")
COOKIE = "dpfp_session"
SESSION_SECONDS = 12 * 3600
LONGEST_FORM = 8192  # bytes; a token is shorter
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
    "Cache-Control": "private, no-cache",
}


def guard(app: FastAPI, digest: str | None) -> None:
    """Put the guard around the whole application."""

    @app.middleware("http")
    async def guarded(request: Request, answer: Any) -> Response:
        response: Response = refusal(request, digest) or await answer(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response


def refusal(request: Request, digest: str | None) -> Response | None:
    """What a client gets who may not read; None if it may."""
    base = base_of(request)
    path = str(request.scope["path"]).removeprefix(base)
    if digest is None:
        name = host_name(request.headers.get("host", ""))
        error = f"this service answers to localhost only, not to {name[:80]!r}"
        return None if name in access_tokens.LOOPBACK else JSONResponse({"error": error}, 403)
    if path in PUBLIC or path.startswith("/static/"):
        return None
    if access_tokens.is_authorised(request.headers.get("authorization"), digest):
        return None
    if access_tokens.session_holds(request.cookies.get(COOKIE), digest, time.time()):
        return None
    if "text/html" in request.headers.get("accept", "") and not path.startswith("/api/"):
        return RedirectResponse(f"{base}/login", 303)
    error = "a token is needed: Authorization: Bearer TOKEN"
    return JSONResponse({"error": error}, 401, {"WWW-Authenticate": "Bearer"})


def host_name(host: str) -> str:
    """`localhost` of `localhost:8000`, `::1` of `[::1]:8000`; what is no host stays as it is.

    Not by the rules of URLs: to these, `evil.com@localhost` and `localhost#evil` are localhost.
    """
    match = HOST.fullmatch(host)
    return (match["name"].strip("[]") if match else host).lower()


def base_of(request: Request) -> str:
    """The path below which the service is reached, such as /results."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def login_routes(digest: str | None) -> APIRouter:
    """A form for browsers, which cannot send a header. The service itself stores nothing."""
    router = APIRouter(include_in_schema=False)

    def form(request: Request, status: int = 200) -> Response:
        template = templates(Path(__file__).parent).get_template("login.html")
        return HTMLResponse(template.render(base=base_of(request), wrong=status == 401), status)

    @router.get("/login")
    def login_form(request: Request) -> Response:
        return form(request) if digest else RedirectResponse(f"{base_of(request)}/", 303)

    @router.post("/login")
    async def login(request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST_FORM:
                raise UserError("the form is too long")
        token = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if digest is None or not access_tokens.is_authorised(f"Bearer {token}", digest):
            return form(request, 401)
        response = RedirectResponse(f"{base_of(request)}/", 303)
        response.set_cookie(
            COOKIE,
            access_tokens.session(digest, int(time.time()) + SESSION_SECONDS),
            max_age=SESSION_SECONDS,
            path=f"{base_of(request)}/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    return router
