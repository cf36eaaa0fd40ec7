"""Parameters of a request, checked; and the runs that they ask for."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from dpfp_ray.plan.errors import UserError
from dpfp_ray.report.runs import Run
from dpfp_ray.results import query
from dpfp_ray.serve.snapshot import Snapshot

PAGE, LARGEST = 100, 1000
ASKING = ("where", "sort", "limit", "offset")


@dataclass(frozen=True)
class Question:
    where: str | None = None
    sort: str | None = None
    limit: int = PAGE
    offset: int = 0


@dataclass(frozen=True)
class Answer:
    runs: list[Run]
    total: int


def known_parameters(request: Request, names: tuple[str, ...]) -> None:
    """A misspelt filter must not look like an answer."""
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in names:
            listed = ", ".join(names) if names else "none"
            raise UserError(f"unknown parameter {name[:40]!r}; the parameters are: {listed}")
        if given.count(name) > 1:
            raise UserError(f"{name} is given {given.count(name)} times; give it once")


def question(request: Request, more: tuple[str, ...] = ()) -> Question:
    known_parameters(request, (*ASKING, *more))
    asked = request.query_params
    return Question(
        asked.get("where", "").strip() or None,
        asked.get("sort", "").strip() or None,
        whole("limit", asked.get("limit"), PAGE, 1, LARGEST),
        whole("offset", asked.get("offset"), 0, 0, 10**9),
    )


def whole(name: str, text: str | None, default: int, least: int, most: int) -> int:
    if text is None or not text.strip():
        return default
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise UserError(f"{name} is {text[:20]!r}; give a whole number from {least} to {most:,}")
    if not least <= int(text) <= most:
        raise UserError(f"{name} is {int(text):,}; give a whole number from {least} to {most:,}")
    return int(text)


def answer(
    snapshot: Snapshot, asked: Question, chosen: Mapping[str, str | None] | None = None
) -> Answer:
    """`chosen` are exact values of columns, from the page's lists."""
    rows = query.filter_rows(snapshot.rows, asked.where, snapshot.columns)
    for name, value in (chosen or {}).items():
        rows = [row for row in rows if not value or row[name] == value]
    rows = query.sort_rows(rows, asked.sort, snapshot.columns)
    shown = rows[asked.offset : asked.offset + asked.limit]
    return Answer([snapshot.by_id[str(row["id"])] for row in shown], len(rows))
