"""Tables, figures and one page from the records of any number of runs, compares, sweeps, audits.

Examples:

  dpfp report runs --output report
  dpfp report runs/compare runs/sweep --output report --title "SST-2 on MiniLM"

Writes OUT/index.html (one file that opens from disk, with nothing to load), every table as CSV,
Markdown and LaTeX under OUT/tables/, every figure as SVG and PNG under OUT/figures/. What was not
run is shown as missing. The same records give the same report.
"""

import argparse
import sys

from dpfp_ray.data.whole_files import to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "locations", nargs="+", metavar="DIR_OR_URI", help="the --output of runs and sweeps"
    )
    parser.add_argument("--output", required=True, metavar="OUT", help="folder for the report")
    parser.add_argument("--title", help="what the page is called")
    parser.add_argument(
        "--ledger",
        metavar="PATH_OR_URI",
        help="say what the people behind these records have paid in all (default: $DPFP_LEDGER, "
        "else the user's own, if it has entries)",
    )
    parser.add_argument(
        "--select",
        choices=["last", "best"],
        default="last",
        help="the epoch that every run quotes (default: last; best on dev flatters)",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import report

    made = report(
        arguments.locations,
        output=arguments.output,
        title=arguments.title,
        ledger=arguments.ledger,
        select=arguments.select,
    )
    if arguments.json:
        print(to_json({"index": str(made.index), "files": made.files}))
    else:
        print(made.index)
        print(made.headline, file=sys.stderr)
    return 0
