"""The study's report from its records: tables, figures and a page in `report/`, and what is made of
them in docs/study.md, docs/study_tables.md and README.md.

  python benchmarks/study/write_report.py
"""

import argparse
import os
import sys
from pathlib import Path

from cells import HERE
from tables import DOCUMENTS, filled, study_tables

from dpfp_ray import UserError, report
from dpfp_ray.reports.epsilon_figures import epsilon_figures
from dpfp_ray.results.cells import cells_of
from dpfp_ray.results.runs import read_runs
from dpfp_ray.results.store import load_records

TITLE = "A study of DP-FP and its rivals"
# README's picture: six methods on all of SST-2 with MiniLM at ε = 3.
PICTURE = HERE.parents[1] / "docs/images/sst2.png"
SHOWN = ("non_private", "dpfp", "distil", "dpfp moments", "objpert head", "dpsgd lora automatic")


def draw_picture(records: Path) -> None:
    runs = [
        run
        for run in read_runs(load_records(records))
        if run.row["task"] == "sst2" and run.model == "minilm" and run.row["max_train"] is None
        if run.row["epsilon"] in (None, 3.0) and run.row["accountant"] in (None, "pld")
        if run.method in SHOWN
    ]
    command = "python benchmarks/study/write_report.py"
    PICTURE.write_bytes(next(epsilon_figures(cells_of(runs), command)).png)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=HERE / "records", metavar="DIR")
    parser.add_argument("--ledger", type=Path, default=None, metavar="DIR",
                        help="of the study (default: ledger beside the records)")  # fmt: skip
    parser.add_argument("--output", type=Path, default=HERE / "report", metavar="DIR")
    parser.add_argument("--documents", type=Path, nargs="+", default=DOCUMENTS, metavar="FILE")
    arguments = parser.parse_args()
    ledger = arguments.ledger or arguments.records.parent / "ledger"
    # Figures carry the command that makes them: for every reader, not for this machine.
    records, output = (os.path.relpath(path) for path in (arguments.records, arguments.output))
    made = report(records, output=output, title=TITLE, ledger=ledger)
    if arguments.records == HERE / "records":
        draw_picture(arguments.records)
    tables = study_tables(arguments.records, arguments.output)
    for document in arguments.documents:
        text = document.read_text(encoding="utf-8")
        document.write_text(filled(text, tables), encoding="utf-8")
    print(made.index)
    print(made.headline, file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        sys.exit(2)
