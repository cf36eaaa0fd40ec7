"""Tables, figures and one page from the records of any number of runs, compares, sweeps, audits.

Examples:

  dpfp report runs --output report
  dpfp report runs/compare runs/sweep --output report --title "SST-2 on MiniLM"

Writes OUT/index.html (one file that opens from disk, with nothing to load), every table as CSV,
Markdown and LaTeX under OUT/tables/, every figure as SVG and PNG under OUT/figures/. What was not
run is shown as missing. The same records give the same report.
"""

import argparse
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "locations", nargs="+", metavar="DIR_OR_URI", help="the --output of runs and sweeps"
    )
    parser.add_argument("--output", required=True, metavar="OUT", help="folder for the report")
    parser.add_argument("--title", help="what the page is called")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def command(arguments: argparse.Namespace) -> int:
    records = [record for place in arguments.locations for record in load(place)]
    from dpfp_ray.report.page import make_report, write_report

    made = ["dpfp", "report", *arguments.locations, "--output", arguments.output]
    report = make_report(distinct(records), shlex.join(made), arguments.title)
    folder = Path(arguments.output).expanduser()
    names = write_report(report, folder)
    if arguments.json:
        print(to_json({"index": str(folder / "index.html"), "files": names}))
    else:
        print(folder / "index.html")
        print(report.headline, file=sys.stderr)
    return 0


def load(location: str) -> list[dict[str, Any]]:
    """The records at one place; a place without any is a mistake worth saying."""
    from dpfp_ray.results.store import Store

    store = Store(location)
    if not store.exists():
        raise UserError(f"there is no folder {store.name}; give the --output of a run or sweep")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = store.records()
    for warning in caught:
        print(f"dpfp: {warning.message}", file=sys.stderr)
    if not records:
        raise UserError(f"{store.name} holds no records; give the --output of a run or sweep")
    return records


def distinct(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each record once, should one folder lie within another."""
    return list({to_json(record): record for record in records}.values())
