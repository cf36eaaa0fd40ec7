"""The pages: all trials with filters, order and figures; one trial; the login.

They work without JavaScript; the script only asks whether something changed, and if so fetches the
page again. Whatever comes from records is escaped by the template engine.
"""

import functools
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from dpfp_ray import __version__
from dpfp_ray.plan.errors import UserError
from dpfp_ray.report import winners
from dpfp_ray.report.cost_tables import MARKS
from dpfp_ray.report.page import TEMPLATES, shown_contests, templates
from dpfp_ray.serve.api import (
    PAGE,
    NotThere,
    Wanted,
    check_names,
    find,
    matching,
    picks_by_score,
    read_request,
    version_facts,
)
from dpfp_ray.serve.figures import Figures, TrialCurves
from dpfp_ray.serve.guard import COOKIE, SESSION_SECONDS
from dpfp_ray.serve.snapshot import Filtered, LiveRecords, Payments, Snapshot
from dpfp_ray.serve.trials import CHOICES, QUERY_NAMES, choices, trial_facts, trials_table
from dpfp_ray.sweeps import access_tokens

FOLDER = Path(__file__).parent
STATIC = {
    "page.css": (TEMPLATES / "page.css", "text/css"),
    "live.css": (FOLDER / "live.css", "text/css"),
    "live.js": (FOLDER / "live.js", "text/javascript"),
}
PAGES_KEPT = 32
LONGEST_FORM = 8192  # bytes; a token is shorter


def page_routes(
    records: LiveRecords,
    figures: Figures,
    curves: TrialCurves,
    digest: str | None,
    payments: Payments,
) -> APIRouter:
    pages = APIRouter(include_in_schema=False)
    filtered = Filtered()
    kept: dict[tuple[Any, ...], Response] = {}
    making = threading.Lock()

    @pages.get("/")
    def index(request: Request) -> Response:
        """The same page is made once, however many ask for it."""
        now = records.now()
        version = version_facts(now, figures)["version"]
        paid = payments.now(now)
        asked = (_base(request), str(request.query_params))
        key = (version, figures.busy, id(paid), *asked)
        made = kept.get(key)
        if made is None:
            with making:
                made = kept.get(key) or make_index(request, now, version, paid)
                kept[key] = made
                for old in list(kept)[:-PAGES_KEPT]:
                    del kept[old]
        return Response(made.body, made.status_code, media_type="text/html")

    def make_index(request: Request, now: Snapshot, version: str, paid: Any) -> Response:
        complaint = ""
        try:
            asked = read_request(request, CHOICES)
            found = matching(now, asked, {name: request.query_params.get(name) for name in CHOICES})
        except UserError as error:
            complaint, asked, found = str(error), Wanted(), None
        # Whatever the page says is about the trials that it shows.
        shown = now
        if found is not None and len(found.all) < len(now.runs):
            shown = filtered.of(now, found.all, picks_by_score(asked.where, now.columns))
        contests = shown.contests
        refuted = shown.refuted
        return page(
            request,
            "index.html",
            400 if complaint else 200,
            now=now,
            version=version,
            storage=records.name,
            given={name: request.query_params.get(name, "") for name in _FILTERS},
            choices=choices(now),
            complaint=complaint,
            found=found,
            asked=asked,
            table=trials_table(found.runs) if found else None,
            headline=(
                winners.headline(contests, refuted) if shown.cells else "No finished trial yet"
            ),
            filtered=shown is not now,
            refuted=refuted,
            cards=[winners.Card(contest) for contest in shown_contests(contests)],
            paid=paid,
            counts=_counts(now),
            figures=figures.now(shown, everything=shown is now),
            figures_of=figures.key(shown),
            drawing=figures.busy,
            sort_link=functools.partial(_sort_link, request),
            page_link=functools.partial(_page_link, request),
            marks=MARKS,
            QUERY_NAMES=QUERY_NAMES,
        )

    @pages.get("/trials/{trial_id:path}")
    def trial(request: Request, trial_id: str) -> Response:
        if trial_id.endswith("/curves.svg"):
            check_names(request, ("v",))
            svg = curves.svg(find(records.now(), trial_id.removesuffix("/curves.svg")))
            if svg is None:
                raise NotThere("this trial has no curve")
            return _picture(svg)
        check_names(request, ())
        now = records.now()
        run = find(now, trial_id)
        return page(
            request,
            "trial.html",
            now=now,
            version=version_facts(now, figures)["version"],
            storage=records.name,
            run=run,
            curves=curves.key(run),
            marks=MARKS,
            **trial_facts(run),
        )

    @pages.get("/figures/{name}.svg")
    def figure(request: Request, name: str) -> Response:
        check_names(request, ("v", "of"))
        drawing = figures.find(name, request.query_params.get("of"))
        if drawing is None:
            raise NotThere(f"there is no figure {name[:80]!r}")
        return _picture(drawing.svg)

    @pages.get("/static/{name}")
    def static(request: Request, name: str) -> Response:
        if name not in STATIC:
            raise NotThere("there is no such file")
        path, kind = STATIC[name]
        return Response(path.read_bytes(), media_type=kind)

    @pages.get("/login")
    def login_form(request: Request) -> Response:
        if digest is None:
            return RedirectResponse(f"{_base(request)}/", 303)
        return page(request, "login.html", wrong=False)

    @pages.post("/login")
    async def login(request: Request) -> Response:
        """Sets a cookie in the browser; the service itself stores nothing."""
        from urllib.parse import parse_qs

        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST_FORM:
                raise UserError("the form is too long")
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if digest is None or not access_tokens.is_authorised(f"Bearer {given}", digest):
            return page(request, "login.html", 401, wrong=True)
        response = RedirectResponse(f"{_base(request)}/", 303)
        response.set_cookie(
            COOKIE,
            access_tokens.session(digest, int(time.time()) + SESSION_SECONDS),
            max_age=SESSION_SECONDS,
            path=f"{_base(request)}/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    return pages


_FILTERS = ("where", "sort", *CHOICES)


def _counts(now: Snapshot) -> str:
    states: dict[str, int] = {}
    for run in now.runs:
        state = str(run.row["status"] or "unknown")
        states[state] = states.get(state, 0) + 1
    parts = [f"{count:,} {state}" for state, count in sorted(states.items())]
    noun = "trial" if len(now.runs) == 1 else "trials"
    return f"{len(now.runs):,} {noun}" + (f": {', '.join(parts)}" if parts else "")


def _link(request: Request, **changes: str) -> str:
    given = {name: request.query_params.get(name, "") for name in (*_FILTERS, "limit", "offset")}
    kept = {name: value for name, value in (given | changes).items() if value}
    return f"{_base(request)}/?{urlencode(kept)}#trials" if kept else f"{_base(request)}/#trials"


def _sort_link(request: Request, column: str) -> tuple[str, str]:
    """Where a click on a column's heading leads, and how the column is sorted now."""
    now = request.query_params.get("sort", "").strip()
    falling, rising = f"-{column}", f"+{column}"
    state = {falling: "descending", rising: "ascending"}.get(now, "none")
    following = {"descending": rising, "ascending": ""}.get(state, falling)
    return _link(request, sort=following, offset=""), state


def _page_link(request: Request, offset: int) -> str:
    return _link(request, offset=str(offset) if offset > 0 else "")


def _base(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


def _picture(svg: bytes) -> Response:
    # Its own page may run nothing at all, should someone open it by itself.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return Response(svg, media_type="image/svg+xml", headers={"Content-Security-Policy": policy})


def wants_page(request: Request) -> bool:
    path = str(request.scope["path"]).removeprefix(_base(request))
    return not path.startswith("/api/") and "text/html" in request.headers.get("accept", "")


def error_page(request: Request, reason: str, status: int) -> Response:
    return page(request, "error.html", status, reason=reason)


def page(request: Request, template: str, status: int = 200, **facts: Any) -> HTMLResponse:
    base = _base(request)
    text = (
        templates(FOLDER)
        .get_template(template)
        .render(
            base=base,
            package=__version__,
            trial_link=lambda identity: f"{base}/trials/{quote(str(identity), safe='')}",
            page_size=PAGE,
            **facts,
        )
    )
    return HTMLResponse(text.encode("utf-8", "replace"), status)
