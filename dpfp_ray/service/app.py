"""The service as one ASGI application that only reads: the report's page, live, and one JSON route.

`where`, `sort`, `limit` and `offset` mean what they mean in `dpfp results`. The page works without
JavaScript; its script only asks whether something changed, and then fetches the page again.

Without a token the service answers only to the names of this machine: a hostile page that points
its own name at 127.0.0.1 (DNS rebinding) gets nothing. With one, every path but `PUBLIC` needs it.
"""

import functools
import hashlib
import hmac
import mimetypes
import re
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlencode

from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from dpfp_ray import __version__
from dpfp_ray.reports.cell_tables import MARKS, epochs_table, runs_table
from dpfp_ray.reports.page import TEMPLATES, data_files, page_text, report_of, templates
from dpfp_ray.results.query import MAX_LENGTH, compile_where
from dpfp_ray.service import SERVICE, digest_of
from dpfp_ray.service.snapshot import LiveRecords, LiveReport, Snapshot
from dpfp_ray.sweeps.submit import LOOPBACK
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import public
from dpfp_ray.system.terminal import time_left
from dpfp_ray.system.whole_files import to_json

PAGE, LARGEST, FILTERS = 100, 1000, 8  # rows of an answer; reports that are kept
TICK_SECONDS = 10  # after which the page shows another time left of the trials that run
FOLDER = Path(__file__).parent
STATIC = {"page.css": TEMPLATES, "page.js": TEMPLATES, "live.css": FOLDER, "live.js": FOLDER}
# A picture that is opened by itself may style itself and run nothing.
PICTURE_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
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


class Filter(BaseModel):
    """A misspelt parameter is refused: a result would look filtered and would not be."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)
    where: str = Field("", max_length=MAX_LENGTH, description="as in dpfp results --help")


class Question(Filter):
    sort: str = Field("", max_length=MAX_LENGTH, description="such as task,-accuracy")
    limit: int = Field(PAGE, ge=1, le=LARGEST)
    offset: int = Field(0, ge=0, le=10**9)


class ResultsQuestion(Question):
    records: bool = Field(False, description=f"whole records too; then limit is {PAGE} at most")


class FileQuestion(Filter):
    v: str = ""  # so that a browser fetches a figure again when it changed


def each_once(request: Request) -> None:
    if len(request.query_params) < len(request.query_params.multi_items()):
        raise UserError("a parameter is given more than once; give each once")


def build_app(storage: str, digest: str | None = None, ledger: str | None = None) -> Any:
    """`digest` is that of the token that readers need; without one only localhost is answered.

    `ledger` is where to read what the people in the data have paid (default: the user's own).
    """
    records = LiveRecords(storage)
    command = f"dpfp serve --storage {public(storage)}"
    title = f"Results in {records.store.name}"

    @functools.lru_cache(maxsize=FILTERS)
    def report_for(where: str | None) -> LiveReport:
        return LiveReport(title, command, ledger, where)

    def look(where: str) -> tuple[Snapshot, LiveReport, dict[str, Any]]:
        """The records now, the last report of those that `where` matches, and the news."""
        snapshot = records.now()
        if where and snapshot.status == "ready":
            compile_where(where, snapshot.columns)
        live = report_for(where or None)
        live.renew(snapshot)
        now = time.time()
        ticks = f"-{now // TICK_SECONDS:.0f}" if snapshot.running else ""
        news = {
            "version": f"{snapshot.version}-{live.number}{ticks}",
            "status": snapshot.status,
            "trials": len(snapshot.runs),
            "running": snapshot.running,
            "time_left": time_left(snapshot.seconds_left(now)),
            "looked_at": records.looked_at,
        }
        return snapshot, live, news

    app = FastAPI(
        title=SERVICE,
        version=__version__,
        description="Only reads. An ε with `nominal: true` is no proved guarantee.",
        # Their pages load scripts from elsewhere; /openapi.json says the same.
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(each_once)],
        responses={400: {"description": "a bad parameter; `error` gives the reason"}},
    )

    @app.get("/api/about", summary="What answers here; needs no token")
    def about() -> dict[str, str]:
        return {"service": SERVICE, "version": __version__}

    @app.get("/api/version", summary="Has anything changed?")
    def version(question: Annotated[Filter, Query()]) -> Response:
        """`version` changes whenever a record or the report does, and every ten seconds while
        trials run; `status` is "loading" until storage was looked at once, then "ready";
        `looked_at` is when that was done last; `time_left` is of the sweeps that run."""
        return json_response(look(question.where)[2])

    @app.get("/api/results", summary="Trials as flat rows")
    def results(question: Annotated[ResultsQuestion, Query()]) -> Response:
        """`rows` in the order asked for, `total` that match, `nominal` one flag for each row,
        `version` and `status` of the records. An infinite number is the text "inf"."""
        if question.records and question.limit > PAGE:
            raise UserError(f"limit is {question.limit}; with records it is {PAGE} at most")
        snapshot = records.now()
        chosen = snapshot.choose(question.where or None, question.sort or None)
        part = chosen[question.offset : question.offset + question.limit]
        facts = {
            "version": snapshot.version,
            "status": snapshot.status,
            "total": len(chosen),
            "offset": question.offset,
            "columns": snapshot.columns,
            "rows": [{name: run.row.get(name) for name in snapshot.columns} for run in part],
            "nominal": [bool(run.mark) for run in part],
            "legend": MARKS[0],
            "records": [run.record for run in part] if question.records else None,
        }
        return json_response(facts)

    @app.get("/", include_in_schema=False)
    def page(request: Request, question: Annotated[Question, Query()]) -> Response:
        base, chosen, complaint = base_of(request), [], ""
        try:
            snapshot, live, news = look(question.where)
            chosen = snapshot.choose(question.where or None, question.sort or None)
        except UserError as error:
            complaint, (snapshot, live, news) = str(error), look("")
        if not question.sort:  # people come to watch the trials that run
            chosen.sort(key=lambda run: run.row["status"] != "running")
        only, report = chosen[0] if len(chosen) == 1 else None, live.report
        where = {"where": question.where} if question.where else {}

        def link(path: str, **values: Any) -> str:
            return f"{base}/{path}?{urlencode(values)}" if values else f"{base}/{path}"

        content = page_text(
            templates(FOLDER).get_template("live.html"),
            report if report and not complaint else report_of([], [], command, title),
            base=base,
            question=question,
            complaint=complaint,
            warnings=snapshot.warnings,
            made=report is not None and not complaint,
            drawing=live.drawing,
            news=news,
            total=len(chosen),
            table=runs_table(
                chosen[question.offset : question.offset + question.limit], progress=True
            ),
            epochs=epochs_table(only) if only else None,
            only=only,
            page_link=lambda at: link("", **question.model_dump(exclude_defaults=True) | at),
            file=lambda name: link(name, **where),
            picture=lambda name: link(f"figures/{name}.svg", v=live.number, **where),
            run_link=lambda identity: link("", where=f"id == {identity!r}"),
        )
        return HTMLResponse(content.encode("utf-8", "replace"), 400 if complaint else 200)

    @app.get("/{folder}/{name}", include_in_schema=False)
    def file(folder: str, name: str, question: Annotated[FileQuestion, Query()]) -> Response:
        """The script and style of the page, and its tables and figures to download."""
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        if folder == "static" and name in STATIC:
            return Response((STATIC[name] / name).read_bytes(), media_type=kind)
        report = look(question.where)[1].report if folder in ("tables", "figures") else None
        content = data_files(report).get(f"{folder}/{name}") if report else None
        if content is None:
            raise HTTPException(404, f"there is no file {name[:80]!r}")
        return Response(content(), media_type=kind, headers=PICTURE_POLICY)

    app.include_router(login_routes(digest))
    for kind in (UserError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, problem)

    @app.middleware("http")
    async def guarded(request: Request, answer: Any) -> Response:
        response: Response = refusal(request, digest) or await answer(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return app


def problem(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return json_response({"error": str(error.detail)}, error.status_code)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return json_response({"error": f"{str(first['loc'][-1])[:40]}: {first['msg']}"}, 400)
    # Storage that cannot be reached is not the fault of the request.
    status = 503 if str(error).startswith("cannot reach") else 400
    return json_response({"error": str(error)}, status)


def json_response(facts: Any, status: int = 200) -> Response:
    """Strict JSON, also of numbers that are infinite and of text that is no valid Unicode."""
    content = to_json(facts).encode("utf-8", "backslashreplace")
    return Response(content, status, media_type="application/json")


def refusal(request: Request, digest: str | None) -> Response | None:
    """What a client gets who may not read; None if it may."""
    base = base_of(request)
    path = str(request.scope["path"]).removeprefix(base)
    if digest is None:
        name = host_name(request.headers.get("host", ""))
        error = f"this service answers to localhost only, not to {name[:80]!r}"
        return None if name in LOOPBACK else JSONResponse({"error": error}, 403)
    if path in PUBLIC or path.startswith("/static/"):
        return None
    if is_authorised(request.headers.get("authorization"), digest):
        return None
    if session_holds(request.cookies.get(COOKIE), digest, time.time()):
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
        template = templates(FOLDER).get_template("login.html")
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
        if digest is None or not is_authorised(f"Bearer {token}", digest):
            return form(request, 401)
        response = RedirectResponse(f"{base_of(request)}/", 303)
        response.set_cookie(
            COOKIE,
            session(digest, int(time.time()) + SESSION_SECONDS),
            max_age=SESSION_SECONDS,
            path=f"{base_of(request)}/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    return router


def is_authorised(authorization: str | None, expected: str) -> bool:
    """Is this header `Bearer TOKEN` with the token of the digest `expected`? In constant time."""
    scheme, _, token = (authorization or "").partition(" ")
    return hmac.compare_digest(digest_of(token.strip()), expected) and scheme.lower() == "bearer"


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
