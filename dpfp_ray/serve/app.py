"""The service as one ASGI application that only reads: the report's page, live, and one JSON route.

`where`, `sort`, `limit` and `offset` mean what they mean in `dpfp results`. The page works without
JavaScript; its script only asks whether something changed, and then fetches the page again.
"""

import functools
import mimetypes
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Depends, FastAPI, HTTPException, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from dpfp_ray import __version__
from dpfp_ray.data.storage import public
from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError
from dpfp_ray.report.cost_tables import MARKS, runs_table
from dpfp_ray.report.formats import Column, Row, Table, number
from dpfp_ray.report.page import TEMPLATES, data_files, page_text, report_of, templates
from dpfp_ray.results.query import MAX_LENGTH, compile_where
from dpfp_ray.results.rows import scalar
from dpfp_ray.results.runs import Run
from dpfp_ray.serve import SERVICE
from dpfp_ray.serve.guard import base_of, guard, login_routes
from dpfp_ray.serve.snapshot import LiveRecords, LiveReport, Snapshot

PAGE, LARGEST = 100, 1000  # rows of an answer
FILTERS = 8  # reports that are kept
FOLDER = Path(__file__).parent
STATIC = {
    "page.css": TEMPLATES / "page.css",
    "page.js": TEMPLATES / "page.js",
    "live.css": FOLDER / "live.css",
    "live.js": FOLDER / "live.js",
}
# A picture that is opened by itself may style itself and run nothing.
PICTURE_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


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


class Version(BaseModel):
    """`status` is loading until storage was looked at once; `looked_at` is the last time."""

    version: str
    status: Literal["loading", "ready"]
    trials: int
    running: int
    looked_at: str | None


class Results(BaseModel):
    """Rows in the order asked for. An infinite number is the text "inf"."""

    version: str
    status: Literal["loading", "ready"]
    total: int
    offset: int
    columns: list[str]
    rows: list[dict[str, str | int | float | None]]
    nominal: list[bool]
    legend: str
    records: list[dict[str, Any]] | None


def each_once(request: Request) -> None:
    counts = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in counts.items():
        if count > 1:
            raise UserError(f"{name[:40]!r} is given {count} times; give it once")


def build_app(storage: str, digest: str | None = None, ledger: str | None = None) -> Any:
    """`digest` is that of the token that readers need; without one only localhost is answered.

    `ledger` is where to read what the people in the data have paid (default: the user's own).
    """
    records = LiveRecords(storage)
    command = f"dpfp serve --storage {public(storage)}"
    title = f"Results in {records.name}"

    @functools.lru_cache(maxsize=FILTERS)
    def report_for(where: str | None) -> LiveReport:
        return LiveReport(title, command, ledger, where)

    def look(where: str) -> tuple[Snapshot, LiveReport]:
        """The records now, and the last report of those that `where` matches."""
        snapshot = records.now()
        if where:
            compile_where(where, snapshot.columns)
        live = report_for(where or None)
        live.renew(snapshot)
        return snapshot, live

    def version_facts(snapshot: Snapshot, live: LiveReport) -> dict[str, Any]:
        at = records.looked_at
        return {
            "version": f"{snapshot.version}-{live.number}",
            "status": "loading" if snapshot.loading else "ready",
            "trials": len(snapshot.runs),
            "running": snapshot.running,
            "looked_at": at.isoformat(timespec="seconds") if at else None,
        }

    app = FastAPI(
        title=SERVICE,
        version=__version__,
        summary="Read-only results of differentially private fine-tuning",
        description="An ε of a trial with `nominal: true` is no guarantee and is shown with †.",
        # Their pages load scripts from elsewhere; /openapi.json says the same.
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(each_once)],
        responses={400: {"description": "a bad parameter; `error` gives the reason"}},
    )

    @app.get("/api/about", summary="What answers here; needs no token")
    def about() -> dict[str, str]:
        return {"service": SERVICE, "version": __version__}

    @app.get("/api/version", response_model=Version, summary="Has anything changed?")
    def version(question: Annotated[Filter, Query()]) -> Response:
        return json_response(version_facts(*look(question.where)))

    @app.get("/api/results", response_model=Results, summary="Trials as flat rows")
    def results(question: Annotated[ResultsQuestion, Query()]) -> Response:
        if question.records and question.limit > PAGE:
            raise UserError(f"limit is {question.limit}; with records it is {PAGE} at most")
        snapshot = records.now()
        chosen = snapshot.choose(question.where or None, question.sort or None)
        part = chosen[question.offset : question.offset + question.limit]
        facts = {
            "version": snapshot.version,
            "status": "loading" if snapshot.loading else "ready",
            "total": len(chosen),
            "offset": question.offset,
            "columns": snapshot.columns,
            "rows": [{name: run.row.get(name) for name in snapshot.columns} for run in part],
            "nominal": [run.nominal for run in part],
            "legend": MARKS[0],
            "records": [run.record for run in part] if question.records else None,
        }
        return json_response(facts)

    @app.get("/", include_in_schema=False)
    def page(request: Request, question: Annotated[Question, Query()]) -> Response:
        base, chosen, complaint = base_of(request), [], ""
        try:
            snapshot, live = look(question.where)
            chosen = snapshot.choose(question.where or None, question.sort or None)
        except UserError as error:
            complaint, (snapshot, live) = str(error), look("")
        if not question.sort:  # people come to watch the trials that run
            chosen.sort(key=lambda run: run.row["status"] != "running")
        only = chosen[0] if len(chosen) == 1 else None
        where = {"where": question.where} if question.where else {}

        def link(path: str, **values: Any) -> str:
            return f"{base}/{path}?{urlencode(values)}" if values else f"{base}/{path}"

        content = page_text(
            templates(FOLDER).get_template("live.html"),
            live.report if live.report and not complaint else report_of([], [], command, title),
            base=base,
            question=question,
            complaint=complaint,
            warnings=snapshot.warnings,
            made=live.report is not None and not complaint,
            drawing=live.drawing,
            facts=version_facts(snapshot, live),
            total=len(chosen),
            table=progress_table(chosen[question.offset : question.offset + question.limit]),
            epochs=epochs_table(only) if only else None,
            plan=plan_facts(only) if only else {},
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
            return Response(STATIC[name].read_bytes(), media_type=kind)
        report = look(question.where)[1].report if folder in ("tables", "figures") else None
        content = data_files(report).get(f"{folder}/{name}") if report else None
        if content is None:
            raise HTTPException(404, f"there is no file {name[:80]!r}")
        return Response(content(), media_type=kind, headers=PICTURE_POLICY)

    app.include_router(login_routes(digest))

    @app.exception_handler(UserError)
    async def bad_request(request: Request, error: UserError) -> Response:
        # Storage that cannot be reached is not the fault of the request.
        status = 503 if str(error).startswith("cannot reach") else 400
        return json_response({"error": str(error)}, status)

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        return json_response({"error": f"{name[:40]}: {first['msg']}"}, 400)

    @app.exception_handler(AnyHTTPException)
    async def other(request: Request, error: AnyHTTPException) -> Response:
        return json_response({"error": str(error.detail)}, error.status_code)

    guard(app, digest)
    return app


def json_response(facts: Any, status: int = 200) -> Response:
    """Strict JSON, also of numbers that are infinite and of text that is no valid Unicode."""
    content = to_json(facts).encode("utf-8", "backslashreplace")
    return Response(content, status, media_type="application/json")


def progress_table(runs: Sequence[Run]) -> Table:
    """The report's table of runs, with how far each has come."""
    table = runs_table(runs)
    at = [column.title for column in table.columns].index("Accuracy (%)") + 1
    columns = [*table.columns[:at], Column("Done"), Column("ε spent"), *table.columns[at:]]
    rows = []
    for run, row in zip(runs, table.rows, strict=True):
        last = run.history[-1].get("epoch") if run.history else None
        epoch, epochs = scalar(last, float), run.row["epochs"]
        spent = run.row.get(f"epsilon_{run.row['accountant']}") if run.private else None
        progress = [
            number(min(1.0, epoch / epochs) if epoch and epochs else None, ".0%"),
            number(spent, ".3f", run.mark),
        ]
        tone = "running" if run.row["status"] == "running" else row.tone
        rows.append(Row([*row.entries[:at], *progress, *row.entries[at:]], tone))
    return Table(table.name, table.title, columns, rows, notes=table.notes)


def epochs_table(run: Run) -> Table:
    """One run epoch by epoch, as its record has it: scores, and ε spent by then."""
    epochs = [dict(flat_items(entry)) for entry in run.history]
    titles = list(dict.fromkeys(title for epoch in epochs for title in epoch))
    rows = []
    for epoch in epochs:
        marks = {title: run.mark if title.startswith("epsilon") else "" for title in titles}
        rows.append(Row([number(epoch.get(t), ".4g", marks[t]) for t in titles]))
    return Table("epochs", "Epoch by epoch", [Column(title) for title in titles], rows)


def plan_facts(run: Run) -> dict[str, str]:
    marks = {"epsilon": run.mark}
    plan = run.part("plan").items()
    return {name: f"{value}{marks.get(name, '')}" for name, value in plan if value is not None}


def flat_items(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested facts, by names such as `dev dev accuracy`."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{name} ")
        elif (figure := scalar(value, float)) is not None:
            yield f"{prefix}{name}", figure
