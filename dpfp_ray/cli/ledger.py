"""What the people in the data have paid for everything that was run on their records.

Examples:

  dpfp ledger show
  dpfp ledger show --json --train-file my.csv
  dpfp ledger set --epsilon 8
  dpfp ledger export --output ledger-report

`show` prints one sum, how it was found, and all uses. The data set is chosen by --people ID (as in
the JSON), or by its records (--task, --train-file, ...). If nothing is chosen and the ledger knows
several groups of people, it shows the group that has paid most, and says that there are others.

`show --json` is one object: epsilon, delta, guarantee, how, total, entries, people (the group's
id) and more; `private_epsilon` leaves out runs without privacy, which make epsilon "inf". `groups`
lists every group as people, epsilon, private_epsilon, delta, guarantee, total and uses.

`set` bounds what each group may ever pay: a run, trial or audit that would pass it is refused.
Changing a total needs --force. `export` writes ledger.json, .csv, .md, .svg and .png.
"""

import argparse
from typing import TYPE_CHECKING

from dpfp_ray.cli.options import GROUPS, add_flag, plan_values, positive
from dpfp_ray.plan.plan import FIELDS
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json

if TYPE_CHECKING:
    from dpfp_ray.reports.ledger import LedgerView

# Columns of `show` that may go on a narrow page, the last first.
IF_THEY_FIT = ("Records", "Status", "Guarantee", "Of", "σ/C", "Rate p", "By")
GAP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("show", "set", "export"),
        help="show what was spent, set a total once, or export tables and a figure",
    )
    parser.add_argument(
        "--ledger",
        metavar="PATH_OR_URI",
        help="default: $DPFP_LEDGER, else the user's data folder",
    )
    parser.add_argument("--json", action="store_true", help="show, set: print one JSON object")
    parser.add_argument("--wide", action="store_true", help="show: all columns, not those that fit")
    parser.add_argument("--output", metavar="DIR", help="export: folder to write to")
    group = parser.add_argument_group("set")
    group.add_argument("--epsilon", dest="total_epsilon", type=float, metavar="E", help="the total")
    group.add_argument(
        "--delta", dest="total_delta", type=float, metavar="D", help="its δ (default: 1e-6)"
    )
    group.add_argument("--force", action="store_true", help="change a total that is set")
    parser.add_argument(
        "--records-per-person",
        type=positive,
        default=1,
        metavar="M",
        help="show, export: what a person pays who has M records in each use that protects "
        "records (default: 1)",
    )
    group = parser.add_argument_group("whose records")
    group.add_argument("--people", metavar="ID", help="a data set or group, as in the JSON")
    names = list(FIELDS)
    first, last = GROUPS["data"]
    for name in names[names.index(first) : names.index(last) + 1]:
        add_flag(group, name)


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import ledger

    if arguments.action == "set":
        if arguments.total_epsilon is None:
            raise UserError("give --epsilon E, what these people may ever pay")
        book = ledger(arguments.ledger)
        total = book.set_total(
            arguments.total_epsilon, arguments.total_delta, force=arguments.force
        )
        if arguments.json:
            print(to_json({"epsilon": total.epsilon, "delta": total.delta}))
        else:
            print(
                f"total of {book.ledger.files.name}: ε = {total.epsilon:g} at δ = {total.delta:.3g}"
            )
        return 0
    if arguments.action == "export" and arguments.output is None:
        raise UserError("give --output DIR, the folder to write to")
    found = ledger(
        arguments.ledger,
        people=arguments.people,
        records_per_person=arguments.records_per_person,
        **plan_values(arguments),
    )
    if arguments.action == "export":
        print(*found.write(arguments.output), sep="\n")
    elif arguments.json:
        print(to_json(found.to_json()))
    else:
        show(found, arguments.wide)
    return 0


def show(found: "LedgerView", wide: bool) -> None:
    from rich.table import Table

    from dpfp_ray.system.terminal import page_width, print_table, stderr, stdout, that_fit

    uses = found.uses
    if found.spent is None or uses is None:
        limit = "" if found.total is None else f" of a total of {found.total.epsilon:g}"
        stdout.print(f"nothing was done yet: ε = 0{limit}", markup=False)
        return
    texts = {
        column.title: [row.entries[number].text for row in uses.rows]
        for number, column in enumerate(uses.columns)
    }
    titles = list(texts) if wide else that_fit(texts, IF_THEY_FIT, GAP, page_width())
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for column in uses.columns:
        if column.title in titles:
            table.add_column(
                column.title, justify="right" if column.numeric else "left", no_wrap=True
            )
    for line in zip(*(texts[title] for title in titles), strict=True):
        table.add_row(*line)
    print_table(table, max(page_width(), 190 if wide else 0))
    if len(titles) < len(texts):
        stderr.print("--wide shows all columns", markup=False)
    for text in found.spent.lines(basis=wide):
        stdout.print(text, markup=False, soft_wrap=True)
    others = [one.people for one in found.groups if one.people != found.spent.people]
    if others:
        names = ", ".join(others)
        stderr.print(f"the ledger has other people, too (--people ID): {names}", markup=False)
