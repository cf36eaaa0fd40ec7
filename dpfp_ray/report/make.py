"""A report from the records of any number of runs, comparisons, sweeps and audits."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dpfp_ray.report.ledger import Paid, known_ledger, ledger_figure, spent_on
from dpfp_ray.report.page import make_report, write_report
from dpfp_ray.results.store import load_records
from dpfp_ray.training.dev_scores import Select


@dataclass(frozen=True)
class WrittenReport:
    """Where a report is: `index` opens in a browser, `files` are below its folder."""

    index: Path
    files: list[str]
    headline: str


def report(
    places: str | Path | Iterable[str | Path],
    *,
    output: str | Path,
    title: str | None = None,
    ledger: str | Path | None = None,
    select: Select = "last",
) -> WrittenReport:
    """Write tables, figures and one page about all results below `places` into `output`.

    The same records give the same report. What was not run is shown as missing. `ledger` says what
    the people behind the records have paid in all (default: the user's own, if it has entries).
    `select` is the epoch that every run quotes: the last, or the best on dev.
    """
    places = [places] if isinstance(places, str | Path) else list(places)
    records = load_records(*places)
    command = shlex.join(["dpfp", "report", *map(str, places), "--output", str(output)])
    command += "" if select == "last" else f" --select {select}"
    book = known_ledger(None if ledger is None else str(ledger))
    paid = Paid() if book is None else spent_on(book, records)
    figures = [ledger_figure(one, book.total(), command) for one in paid.sums[:1]] if book else []
    made = make_report(records, command, title, select, paid, figures)
    folder = Path(output).expanduser()
    return WrittenReport(folder / "index.html", write_report(made, folder), made.headline)
