"""Whether a method's training does what its ε counts on: draws, sensitivity, noise, releases.

Examples:

  dpfp check opacus
  dpfp check opacus --grad-sample-mode ghost --json
  dpfp check dpfp:moments
  dpfp check dpsgd --sampling allocation

The method runs on data that are made up so that each of its releases shows who was drawn, what each
record added and the noise; no data are read and the ledger is not charged. What was declared and
what was measured is printed, and the exit code is 1 if they differ. It takes seconds. It cannot
prove that a method is private: docs/new_contestant.md says what it does not see.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpfp_ray.cli.options import add_flag, adder
from dpfp_ray.system.whole_files import to_json

if TYPE_CHECKING:
    from dpfp_ray.auditing.referee import Finding

USED = ("grad_sample_mode", "clip_style", "adjacency", "sampling")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", help="a method, or one of its modes: opacus, dpfp:moments")
    for name in USED:
        add_flag(parser, name)
    adder(parser)("--json", "print all findings as a JSON list")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import check

    fields = {name: value for name, value in vars(arguments).items() if name in USED}
    findings = check(arguments.method, **fields)
    if arguments.json:
        print(to_json([vars(finding) for finding in findings]))
    else:
        show(arguments.method, findings)
    return int(any(finding.fault for finding in findings))


def show(method: str, findings: "Sequence[Finding]") -> None:
    from rich.table import Table
    from rich.text import Text

    from dpfp_ray.system.terminal import stdout

    table = Table("Compared", "Declared", "Measured", box=None, pad_edge=False)
    by_name: dict[str, list[Finding]] = {}
    for finding in findings:  # the sizes of data beside each other
        by_name.setdefault(finding.what.partition(", D = ")[0], []).append(finding)
    for name, same in by_name.items():
        declared, measured = (
            " / ".join(dict.fromkeys(getattr(one, column) for one in same))
            for column in ("declared", "measured")
        )
        style = "red" if any(one.fault for one in same) else None
        table.add_row(*map(Text, (name, declared, measured)), style=style)
    stdout.print(table)
    wrong = [finding for finding in findings if finding.fault]
    for finding in wrong:
        stdout.print(Text(f"fault: {finding.what}: {finding.fault}", style="red"))
    verdict = f"{len(wrong)} of them not as declared" if wrong else "all as declared"
    stdout.print(f"{method}: {len(findings)} comparisons, {verdict}")
