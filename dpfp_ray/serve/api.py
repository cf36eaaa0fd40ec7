"""The JSON API: the same rows, filters and order as `dpfp results`. Described by /openapi.json.

The pages read their parameters as it does: every one is checked, none ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from dpfp_ray import __version__
from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError
from dpfp_ray.report.cost_tables import MARKS
from dpfp_ray.report.statements import statement_text
from dpfp_ray.results import query
from dpfp_ray.results.rows import SPLIT
from dpfp_ray.results.runs import Run
from dpfp_ray.serve import SERVICE
from dpfp_ray.serve.figures import Figures
from dpfp_ray.serve.snapshot import LiveRecords, Snapshot

PAGE, LARGEST = 100, 1000
NAMES = ("where", "sort", "limit", "offset")
SCORES = ("accuracy", "f1", "matthews", "calibration_error")


@dataclass(frozen=True)
class Wanted:
    where: str | None = None
    sort: str | None = None
    limit: int = PAGE
    offset: int = 0


ANSWERS = 8  # questions whose matches are kept: the next page of rows is a slice of them


@dataclass(frozen=True)
class Matches:
    """`runs` are those of the page asked for, `all` those of every page."""

    runs: list[Run]
    all: list[Run]

    @property
    def total(self) -> int:
        return len(self.all)


def check_names(request: Request, names: tuple[str, ...]) -> None:
    """A misspelt filter must not be ignored: its result would look filtered."""
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in names:
            listed = ", ".join(names) if names else "none"
            raise UserError(f"unknown parameter {name[:40]!r}; the parameters are: {listed}")
        if given.count(name) > 1:
            raise UserError(f"{name} is given {given.count(name)} times; give it once")


def read_request(request: Request, more: tuple[str, ...] = ()) -> Wanted:
    check_names(request, (*NAMES, *more))
    asked = request.query_params
    return Wanted(
        asked.get("where", "").strip() or None,
        asked.get("sort", "").strip() or None,
        whole_number("limit", asked.get("limit"), PAGE, 1, LARGEST),
        whole_number("offset", asked.get("offset"), 0, 0, 10**9),
    )


def whole_number(name: str, text: str | None, default: int, least: int, most: int) -> int:
    if text is None or not text.strip():
        return default
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise UserError(f"{name} is {text[:20]!r}; give a whole number from {least} to {most:,}")
    if not least <= int(text) <= most:
        raise UserError(f"{name} is {int(text):,}; give a whole number from {least} to {most:,}")
    return int(text)


def picks_by_score(where: str | None, columns: Sequence[str]) -> bool:
    """Does the filter look at what came out, and not only at what was run?"""
    named = query.columns_in(where, columns) if where else set()
    return any(name in SCORES or name.startswith(SPLIT) for name in named)


def matching(
    snapshot: Snapshot, asked: Wanted, chosen: Mapping[str, str | None] | None = None
) -> Matches:
    """`chosen` are exact values of columns, from the page's lists; the page shows trials that are
    at work first, since those are what people come to see."""
    lists = None if chosen is None else tuple(chosen.items())
    question = (asked.where, asked.sort, lists)
    found = snapshot.answers.get(question)
    if found is None:
        found = answer(snapshot, asked.where, asked.sort, lists)
        for old in list(snapshot.answers)[: 1 - ANSWERS]:
            snapshot.answers.pop(old, None)  # another thread may have been first
        snapshot.answers[question] = found
    return Matches(found[asked.offset : asked.offset + asked.limit], found)


def answer(
    snapshot: Snapshot,
    where: str | None,
    sort: str | None,
    chosen: tuple[tuple[str, str | None], ...] | None,
) -> list[Run]:
    rows = query.filter_rows(snapshot.rows, where, snapshot.columns)
    for name, value in chosen or ():
        rows = [row for row in rows if not value or row[name] == value]
    rows = query.sort_rows(rows, sort, snapshot.columns)
    if sort is None and chosen is not None:
        rows.sort(key=lambda row: row["status"] != "running")
    return [snapshot.by_id[str(row["id"])] for row in rows]


LEGEND = MARKS[0]
Cell = str | int | float | None
Status = Literal["loading", "ready"]


class About(BaseModel):
    service: str
    version: str


class Version(BaseModel):
    """Changes whenever a record or a figure does; ask for it often, and for the rest rarely."""

    version: str
    status: Status
    trials: int
    running: int


class Results(BaseModel):
    """Rows in the order asked for. An infinite number is the text "inf".

    `status` is loading until the records have been read once: `total` says nothing before.
    """

    version: str
    status: Status
    total: int
    offset: int
    columns: list[str]
    rows: list[dict[str, Cell]]
    nominal: list[bool]
    legend: str


class Trial(BaseModel):
    id: str
    nominal: bool
    legend: str | None
    record: dict[str, Any]


class Statement(BaseModel):
    id: str
    guarantee: str | None
    nominal: bool
    legend: str | None
    text: str
    statement: dict[str, Any]


class Problem(BaseModel):
    error: str


class NotThere(Exception):
    """Answered with 404 and the reason."""


BAD: dict[int | str, dict[str, Any]] = {400: {"model": Problem, "description": "a bad request"}}
MISSING: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "no such trial"}}
WHERE = "such as: method == 'dpfp' and epsilon <= 3; knows columns, numbers, 'text', lists, None, "
WHERE += "== != < <= > >= in, is None, and, or, not"


def routes(records: LiveRecords, figures: Figures) -> APIRouter:
    api = APIRouter(prefix="/api", tags=["results"])

    @api.get("/about", response_model=About, summary="What answers here; needs no token")
    async def about(request: Request) -> Response:
        check_names(request, ())
        return reply({"service": SERVICE, "version": __version__})

    @api.get("/version", response_model=Version, summary="Has anything changed?")
    async def version(request: Request) -> Response:
        """Asked for all the time: not in a thread, where it would wait for those of other pages."""
        check_names(request, ())
        now = records.at_hand()
        if now is None:
            now = await run_in_threadpool(records.now)
        return reply(version_facts(now, figures))

    @api.get("/results", response_model=Results, responses=BAD, summary="Trials as flat rows")
    def results(
        request: Request,
        where: Annotated[str | None, Query(max_length=query.MAX_LENGTH, description=WHERE)] = None,
        sort: Annotated[
            str | None, Query(max_length=query.MAX_LENGTH, description="such as task,-accuracy")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=LARGEST)] = PAGE,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> Response:
        asked = read_request(request)
        now = records.now()
        found = matching(now, asked)
        facts = {
            "version": now.version,
            "status": status_of(now),
            "total": found.total,
            "offset": asked.offset,
            "columns": now.columns,
            "rows": [{name: run.row.get(name) for name in now.columns} for run in found.runs],
            "nominal": [run.nominal for run in found.runs],
            "legend": LEGEND,
        }
        return reply(facts, request, now.version)

    @api.get(
        "/trials/{trial_id:path}",
        response_model=Trial,
        responses={**BAD, **MISSING},
        summary="One trial's whole record: plan, history (the ledger), privacy, cost, statement",
    )
    def trial(request: Request, trial_id: Annotated[str, Path(max_length=500)]) -> Response:
        check_names(request, ())
        now = records.now()
        run = find(now, trial_id)
        return reply({**marked(run), "record": dict(run.record)}, request, now.version)

    @api.get(
        "/statement/{trial_id:path}",
        response_model=Statement,
        responses={**BAD, **MISSING},
        summary="One trial's privacy statement, as facts and as text",
    )
    def statement(request: Request, trial_id: Annotated[str, Path(max_length=500)]) -> Response:
        check_names(request, ())
        now = records.now()
        run = find(now, trial_id)
        shown = statement_text(run)
        if shown is None:
            raise NotThere(f"trial {trial_id[:80]!r} carries no privacy statement")
        facts = {
            **marked(run),
            "guarantee": run.row["guarantee"],
            "text": shown,
            "statement": dict(run.part("statement")),
        }
        return reply(facts, request, now.version)

    return api


def version_facts(now: Snapshot, figures: Figures) -> dict[str, Any]:
    figures.now(now, everything=True)
    return {
        "version": f"{now.version}-{figures.version}",
        "status": status_of(now),
        "trials": len(now.runs),
        "running": now.running,
    }


def status_of(now: Snapshot) -> Status:
    return "loading" if now.loading else "ready"


def find(now: Snapshot, identity: str) -> Run:
    run = now.by_id.get(identity)
    if run is None and now.loading:
        raise NotThere("the records are still being read; ask again in a moment")
    if run is None:
        raise NotThere(f"there is no trial {identity[:80]!r}")
    return run


def marked(run: Run) -> dict[str, Any]:
    return {
        "id": run.row["id"],
        "nominal": run.nominal,
        "legend": LEGEND if run.nominal else None,
    }


def reply(facts: Any, request: Request | None = None, version: str | None = None) -> Response:
    """Strict JSON; 304 if the client has this version already."""
    headers = {"ETag": f'W/"{version}"'} if version else {}
    if request is not None and version and request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    content = to_json(facts).encode("utf-8", "backslashreplace")
    return Response(content, media_type="application/json", headers=headers)


def problem(error: UserError | NotThere | str, status: int) -> Response:
    content = to_json({"error": str(error)}).encode("utf-8", "backslashreplace")
    return Response(content, status, media_type="application/json")
