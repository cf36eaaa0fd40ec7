"""Tables, figures and one page from the records of any number of runs, compares, sweeps, audits.

Examples:

  dpfp report runs --output report
  dpfp report runs/compare runs/sweep --output report --title "SST-2 on MiniLM"
  dpfp report runs --bundle replication.zip

Writes OUT/index.html (one file that opens from disk, with nothing to load), every table as CSV,
Markdown and LaTeX under OUT/tables/, every figure as SVG and PNG under OUT/figures/. What was not
run is shown as missing. The same records give the same report.

--bundle writes one zip for whoever wants to check or repeat the work: plans, records, tables,
figures, the exact versions of all packages, the commands. It holds no seeds, no data and no folders
of this machine; `dpfp train --plan plans/CELL.yaml` runs a cell again.
"""

import argparse
import sys

from dpfp_ray.cli.options import add_select_flag, adder, given
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("locations DIR_OR_URI", "the --output of runs and sweeps", nargs="+")
    add("--output OUT", "folder for the report")
    add("--bundle FILE.zip", "a replication bundle, for others")
    add("--title", "what the page is called", default=None)
    add(
        "--ledger PATH_OR_URI",
        "say what the people behind these records have paid in all (default: $DPFP_LEDGER, else "
        "the user's own, if it has entries)",
    )
    add_select_flag(parser)
    add("--json", "print what was written as JSON")


def command(arguments: argparse.Namespace) -> int:
    if arguments.output is None and arguments.bundle is None:
        raise UserError("nothing to write; give --output OUT, --bundle FILE.zip, or both")
    from dpfp_ray import report

    names = ("output", "title", "ledger", "select", "bundle")
    made = report(arguments.locations, **given(arguments, *names))
    places = {"index": made.index, "bundle": made.bundle}
    written = {name: str(place) for name, place in places.items() if place is not None}
    if arguments.json:
        print(to_json({**written, "files": made.files}))
    else:
        print("\n".join(written.values()))
        print(made.headline, file=sys.stderr)
    return 0
