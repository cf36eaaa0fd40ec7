"""Run the cells of a replication bundle again, and say whether they land within their spread.

Examples:

  dpfp reproduce replication.zip --list
  dpfp reproduce replication.zip --only demo-dpfp-moments-eps3-minilm
  dpfp reproduce replication.zip --files my_data --output runs/again

The bundle is what `dpfp report --bundle` wrote; it is read where it is and never unpacked. It holds
no data: files that its plans name are looked for in --files. Every run gets a new secret seed, and
is entered in your privacy ledger as any other run.

Of several earlier runs, a new one is expected within m ± t·s·√(1 + 1/n) in 95 of 100 cases; of a
single one, within what as many dev rows allow. The exit code is 1 if a cell lands outside.
"""

import argparse

from dpfp_ray.cli.options import add_ledger_flags, add_seed_flags, ledger_choices
from dpfp_ray.system.whole_files import to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="FILE.zip", help="made by dpfp report --bundle")
    parser.add_argument(
        "--only", action="append", default=[], metavar="CELL", help="this cell; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="show the cells and run nothing")
    parser.add_argument(
        "--files", default=".", metavar="DIR", help="holds the data files and models (default: .)"
    )
    parser.add_argument("--output", metavar="DIR", help="keep the new runs there")
    parser.add_argument("--json", action="store_true", help="print a list, one object a cell")
    add_seed_flags(parser)
    add_ledger_flags(parser)


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import bundle_cells, reproduce

    if arguments.list:
        for cell in bundle_cells(arguments.bundle, arguments.only):
            print(to_json(cell.as_json()) if arguments.json else cell)
        return 0
    found = reproduce(
        arguments.bundle,
        only=arguments.only,
        files=arguments.files,
        output=arguments.output,
        seed=arguments.seed,
        threads=arguments.threads,
        **ledger_choices(arguments),
    )
    if arguments.json:
        print(to_json([one.as_json() for one in found]))
    else:
        print("\n".join(map(str, found)))
    return 0 if all(one.outcome == "within" for one in found) else 1
