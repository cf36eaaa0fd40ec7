"""A report from the records of any number of runs, comparisons, sweeps and audits: one page that
needs nothing else, with every table and figure also as files of their own.

OUT/index.html                 opens from disk; loads nothing from anywhere
OUT/tables/NAME.{csv,md,tex}   each table; all.tex sets them all
OUT/figures/NAME.{svg,png}     each figure
OUT/report.json                what was written, so that the next build removes what is stale
"""

import base64
import functools
import hashlib
import json
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfp_ray import __version__
from dpfp_ray.models.download import PRETRAINING_OVERLAP
from dpfp_ray.reports.best_setting import SweepOutcome, settings_table
from dpfp_ray.reports.bundle import Contents, portable_record, write_bundle
from dpfp_ray.reports.cell_tables import (
    accounting_table,
    audit_table,
    cost_table,
    guarantee_text,
    noise_table,
    overview,
    pairs_table,
    runs_table,
    scores_table,
)
from dpfp_ray.reports.glossary import glossary
from dpfp_ray.reports.headline import headline
from dpfp_ray.reports.ledger import Paid, known_ledger, ledger_figure, spent_of_total, spent_on
from dpfp_ray.reports.main_table import main_table
from dpfp_ray.reports.paper import paper_table
from dpfp_ray.reports.plots import Drawing
from dpfp_ray.reports.statements import statement_text
from dpfp_ray.reports.tables import Table, latex_document, to_csv, to_latex, to_markdown
from dpfp_ray.results.cells import Cell, cells_of
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import Run, read_runs
from dpfp_ray.results.store import load_records
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json
from dpfp_ray.training.record import Record, Select


@dataclass(frozen=True)
class WrittenReport:
    """Where a report is: `index` opens in a browser, `files` are below its folder.

    `index` is None where only a `bundle` was asked for.
    """

    index: Path | None
    files: list[str]
    headline: str
    bundle: Path | None = None


def report(
    places: str | Path | Iterable[str | Path],
    *,
    output: str | Path | None = None,
    title: str | None = None,
    ledger: str | Path | None = None,
    select: Select = "last",
    bundle: str | Path | None = None,
) -> WrittenReport:
    """Write tables, figures and one page about all results below `places` into `output`.

    The same records give the same report. What was not run is shown as missing. `ledger` says what
    the people behind the records have paid in all (default: the user's own, if it has entries).
    `select` is the epoch that every run quotes: the last, or the best on dev. `bundle` is a zip
    for others (`report.bundle`), in place of `output` or beside it.
    """
    if output is None and bundle is None:
        raise UserError("nothing to write; give output= or bundle=")
    places = [places] if isinstance(places, str | Path) else list(places)
    records = load_records(*places)
    book = known_ledger(None if ledger is None else str(ledger))
    paid = Paid() if book is None else spent_on(book, records)
    rule = "" if select == "last" else f" --select {select}"

    def made_of(shown: list[Record], command: str) -> Report:
        # A single use is a point; the sentence above it says as much.
        many = [one for one in paid.sums[:1] if len(one.used) > 1]
        figures = [ledger_figure(one, book.total(), command) for one in many] if book else []
        return make_report(shown, command, title, select, paid, figures)

    index, files = None, []
    if output is not None:
        folder = Path(output).expanduser()
        command = shlex.join(["dpfp", "report", *map(str, places), "--output", str(output)])
        made = made_of(records, command + rule)
        index, files = folder / "index.html", write_report(made, folder)
    zipped = None
    if bundle is not None:
        zipped = Path(bundle).expanduser()
        shown = [portable_record(record) for record in records]
        made = made_of(shown, "dpfp report . --output again" + rule)
        write_bundle(zipped, Contents(shown, report_files(made), select))
    return WrittenReport(index, files, made.headline, zipped)


MANIFEST = "report.json"
TEMPLATES = Path(__file__).parent
TITLE = "Differentially private fine-tuning: results"
_OURS = re.compile(r"(index\.html|(tables|figures)/[a-z0-9-]+\.(csv|md|tex|svg|png))")


@dataclass(frozen=True)
class Statement:
    """One setting's privacy statement; repetitions share it."""

    title: str
    guarantee: str
    text: str
    runs: str


@dataclass(frozen=True)
class Report:
    """Everything a page shows, before it is written."""

    title: str
    command: str
    headline: str
    contests: Sequence[Contest]
    first: str  # the table of the first screen
    tables: Mapping[str, Table]
    figures: Sequence[Drawing]
    statements: Sequence[Statement]
    refuted: Sequence[Run]
    remarks: Sequence[str]
    paid: Paid  # by the people behind the records, for everything


def make_report(
    records: Sequence[Record],
    command: str,
    title: str | None = None,
    select: Select = "last",
    paid: Paid | None = None,
    more_figures: Sequence[Drawing] = (),
) -> Report:
    runs = read_runs(records, select)
    cells = cells_of(runs)
    report = report_of(runs, cells, command, title, select, paid)
    return replace(report, figures=[*draw_figures(report, runs, cells), *more_figures])


def report_of(
    runs: Sequence[Run],
    cells: Sequence[Cell],
    command: str,
    title: str | None = None,
    select: Select = "last",
    paid: Paid | None = None,
) -> Report:
    """A report without figures, which take most of the time."""
    contests = contests_of(cells)
    refuted = [run for run in runs if run.refuted]
    sweep = SweepOutcome(runs)
    compared = any(len(contest.ranked) > 1 for contest in contests)
    sentence = sweep.headline if sweep.searched and not compared else ""
    tables = [
        *([settings_table(sweep)] if sweep.searched else []),
        overview(cells, contests),
        main_table(cells, contests),
        scores_table(cells, contests),
        pairs_table(contests),
        cost_table(cells),
        noise_table(cells),
        accounting_table(cells),
        audit_table(runs),
        runs_table(runs),
        paper_table(),
    ]
    return Report(
        title or TITLE,
        command,
        sentence or headline(contests, refuted),
        contests,
        "settings" if sentence else "overview",
        {table.name: table for table in tables if table.rows},
        [],
        _statements(cells),
        refuted,
        _remarks(runs, cells, select),
        paid or Paid(),
    )


def draw_figures(report: Report, runs: Sequence[Run], cells: Sequence[Cell]) -> list[Drawing]:
    from dpfp_ray.reports.figures import all_figures

    return all_figures(cells, runs, report.command, report.contests)


def _statements(cells: Sequence[Cell]) -> list[Statement]:
    statements = []
    for cell in cells:
        words = statement_text(cell.first)
        if words is None:
            continue
        at = f" at {cell.budget}" if cell.budget else ""
        title = f"{cell.title} on {cell.key.task}{at}, {cell.key.model}"
        runs = ", ".join(str(run.row["id"]) for run in cell.runs)
        statements.append(Statement(title, guarantee_text(cell), words, runs))
    return statements


def _remarks(runs: Sequence[Run], cells: Sequence[Cell], select: Select) -> list[str]:
    """What a reader must know before believing a number."""
    remarks = []
    unfinished = [run for run in runs if not run.scored]
    if unfinished:
        states = sorted({str(run.row["status"] or "unknown") for run in unfinished})
        remarks.append(
            f"{len(unfinished)} of {len(runs)} runs have no result ({', '.join(states)}); they are "
            "listed under Every run and count nowhere else."
        )
    for model in sorted({run.model for run in runs} & set(PRETRAINING_OVERLAP)):
        remarks.append(f"{model} was {PRETRAINING_OVERLAP[model]}.")
    if select == "best":
        remarks.append(
            "Every run quotes its best epoch on dev (--select best), which flatters all of them."
        )
    return remarks


@functools.cache
def templates(*folders: Path) -> Any:
    """The report's templates, and those of other pages that share its parts, in `folders`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["glossary"] = glossary
    environment.filters["spent_of_total"] = spent_of_total
    return environment


def render(report: Report) -> str:
    """The page. Whatever comes from records is escaped by the template engine."""
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    # Should text ever get through as markup, the browser still runs only this one script.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pictures = {d.name: base64.b64encode(d.svg).decode() for d in report.figures}
    return page_text(
        templates().get_template("template.html"),
        report,
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=script,
        policy=(
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'"
        ),
        picture=lambda name: f"data:image/svg+xml;base64,{pictures[name]}",
        file=lambda name: name,
    )


def page_text(template: Any, report: Report, **facts: Any) -> str:
    """`template` filled with the report.

    facts   also what the template needs to link: `picture` gives a figure's address by its name,
            `file` that of a table or figure to download, `run_link` that of a run's own page
    """
    shared = {"report": report, "paid": report.paid, "refuted": report.refuted}
    text: str = template.render({"run_link": None, "package": __version__} | shared | facts)
    return text


def data_files(report: Report) -> dict[str, Callable[[], bytes]]:
    """Tables and figures to download: a file's name, and what makes its content."""
    forms = {"csv": to_csv, "md": to_markdown, "tex": to_latex}
    files: dict[str, Callable[[], bytes]] = {}
    for name, table in report.tables.items():
        for ending, form in forms.items():
            files[f"tables/{name}.{ending}"] = functools.partial(_table_bytes, form, table)
    for drawing in report.figures:
        for ending in ("svg", "png"):
            content = operator.attrgetter(ending)
            files[f"figures/{drawing.name}.{ending}"] = functools.partial(content, drawing)
    return files


def _table_bytes(form: Callable[[Table], str], table: Table) -> bytes:
    return _bytes(form(table))


def report_files(report: Report) -> dict[str, bytes]:
    """Everything that a report consists of, by name."""
    files = {name: content() for name, content in data_files(report).items()}
    files["tables/all.tex"] = _bytes(latex_document(list(report.tables)))
    files["index.html"] = _bytes(render(report))
    return files


def write_report(report: Report, folder: Path) -> list[str]:
    """All files of a report, and the names of them; stale ones of an earlier build go."""
    files = report_files(report)
    try:
        for name in ("tables", "figures"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in _earlier(folder) - set(files):
            (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        facts = {
            "headline": report.headline,
            "comparisons": [contest.as_json() for contest in report.contests],
            "files": list(files),
        }
        (folder / MANIFEST).write_bytes(_bytes(to_json(facts, indent=2) + "\n"))
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; use another --output"
        ) from None
    return list(files)


def _earlier(folder: Path) -> set[str]:
    """What the last build left here; only names that a build makes, whatever the file says."""
    try:
        names = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {name for name in names if isinstance(name, str) and _OURS.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # names of odd files may hold lone surrogates
