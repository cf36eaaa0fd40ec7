"""The study's report from its records: tables, figures and a page in `report/`.

python benchmarks/study/write_report.py
"""

import argparse
import sys
from pathlib import Path

from cells import HERE

from dpfp_ray import UserError, report

TITLE = "A study of DP-FP and its rivals"
# The page holds its figures; of their files only the pictures for the documents are kept.
UNUSED = (".svg", ".tex", ".csv")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=HERE / "records", metavar="DIR")
    parser.add_argument("--ledger", type=Path, default=None, metavar="DIR",
                        help="of the study (default: ledger beside the records)")  # fmt: skip
    parser.add_argument("--output", type=Path, default=HERE / "report", metavar="DIR")
    arguments = parser.parse_args()
    ledger = arguments.ledger or arguments.records.parent / "ledger"
    made = report(arguments.records, output=arguments.output, title=TITLE, ledger=ledger)
    for name in made.files:
        if name.endswith(UNUSED):
            (arguments.output / name).unlink(missing_ok=True)
    print(made.index)
    print(made.headline, file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        sys.exit(2)
