"""The parameters of a request, checked, and the runs that they select."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from dpfp_ray.plan.errors import UserError
from dpfp_ray.results import query
from dpfp_ray.results.rows import SPLIT
from dpfp_ray.results.runs import Run
from dpfp_ray.serve.snapshot import Snapshot

PAGE, LARGEST = 100, 1000
NAMES = ("where", "sort", "limit", "offset")
SCORES = ("accuracy", "f1", "matthews", "calibration_error")


@dataclass(frozen=True)
class Query:
    where: str | None = None
    sort: str | None = None
    limit: int = PAGE
    offset: int = 0


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


def read_request(request: Request, more: tuple[str, ...] = ()) -> Query:
    check_names(request, (*NAMES, *more))
    asked = request.query_params
    return Query(
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
    snapshot: Snapshot, asked: Query, chosen: Mapping[str, str | None] | None = None
) -> Matches:
    """`chosen` are exact values of columns, from the page's lists; the page shows trials that are
    at work first, since those are what people come to see."""
    rows = query.filter_rows(snapshot.rows, asked.where, snapshot.columns)
    for name, value in (chosen or {}).items():
        rows = [row for row in rows if not value or row[name] == value]
    rows = query.sort_rows(rows, asked.sort, snapshot.columns)
    if asked.sort is None and chosen is not None:
        rows.sort(key=lambda row: row["status"] != "running")
    found = [snapshot.by_id[str(row["id"])] for row in rows]
    return Matches(found[asked.offset : asked.offset + asked.limit], found)
