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

from dpfp_ray.cli.options import add_select_flag
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "locations", nargs="+", metavar="DIR_OR_URI", help="the --output of runs and sweeps"
    )
    parser.add_argument("--output", metavar="OUT", help="folder for the report")
    parser.add_argument("--bundle", metavar="FILE.zip", help="a replication bundle, for others")
    parser.add_argument("--title", help="what the page is called")
    parser.add_argument(
        "--ledger",
        metavar="PATH_OR_URI",
        help="say what the people behind these records have paid in all (default: $DPFP_LEDGER, "
        "else the user's own, if it has entries)",
    )
    add_select_flag(parser)
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def command(arguments: argparse.Namespace) -> int:
    if arguments.output is None and arguments.bundle is None:
        raise UserError("nothing to write; give --output OUT, --bundle FILE.zip, or both")
    from dpfp_ray import report

    made = report(
        arguments.locations,
        output=arguments.output,
        title=arguments.title,
        ledger=arguments.ledger,
        select=arguments.select,
        bundle=arguments.bundle,
    )
    places = {"index": made.index, "bundle": made.bundle}
    written = {name: str(place) for name, place in places.items() if place is not None}
    if arguments.json:
        print(to_json({**written, "files": made.files}))
    else:
        print("\n".join(written.values()))
        print(made.headline, file=sys.stderr)
    return 0
