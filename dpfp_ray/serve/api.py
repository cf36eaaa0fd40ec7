"""The JSON API: the same rows, filters and order as `dpfp results`. Described by /openapi.json."""

from typing import Annotated, Any

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
from dpfp_ray.results.runs import Run
from dpfp_ray.serve import SERVICE
from dpfp_ray.serve.figures import Figures
from dpfp_ray.serve.parameters import LARGEST, PAGE, check_names, matching, read_request
from dpfp_ray.serve.snapshot import LiveRecords, Snapshot

LEGEND = MARKS[0]
Cell = str | int | float | None


class About(BaseModel):
    service: str
    version: str


class Version(BaseModel):
    """Changes whenever a record or a figure does; ask for it often, and for the rest rarely."""

    version: str
    trials: int
    running: int


class Results(BaseModel):
    """Rows in the order asked for. An infinite number is the text "inf"."""

    version: str
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
        "trials": len(now.runs),
        "running": now.running,
    }


def find(now: Snapshot, identity: str) -> Run:
    run = now.by_id.get(identity)
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
