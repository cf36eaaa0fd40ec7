"""A report from the records of any number of runs, comparisons, sweeps and audits."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dpfp_ray.reports.bundle import Contents, write_bundle
from dpfp_ray.reports.ledger import Paid, known_ledger, ledger_figure, spent_on
from dpfp_ray.reports.page import Report, make_report, report_files, write_report
from dpfp_ray.reports.portable import portable_record
from dpfp_ray.results.store import load_records
from dpfp_ray.system.errors import UserError
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
