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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfp_ray.cli.options import GROUPS, add_flag, plan_values, positive
from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import FIELDS
from dpfp_ray.plan.values import make_plan

if TYPE_CHECKING:
    from dpfp_ray.privacy.ledger import Ledger
    from dpfp_ray.privacy.ledger_sum import Spent

SUMMARY = ("people", "epsilon", "private_epsilon", "delta", "guarantee", "total")


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
    from dpfp_ray.privacy.ledger import Ledger

    ledger = Ledger(arguments.ledger)
    if arguments.action == "set":
        set_total(ledger, arguments)
        return 0
    spent, others = choose(ledger, arguments)
    if arguments.action == "export":
        export(ledger, spent, others, arguments.output)
    elif arguments.json:
        print(to_json(facts(ledger, spent, others)))
    else:
        show(ledger, spent, others)
    return 0


def set_total(ledger: "Ledger", arguments: argparse.Namespace) -> None:
    from dpfp_ray.privacy.ledger import TOTAL_DELTA

    if arguments.total_epsilon is None:
        raise UserError("give --epsilon E, what these people may ever pay")
    known = ledger.total()
    delta = arguments.total_delta or (known.delta if known else TOTAL_DELTA)
    total = ledger.set_total(arguments.total_epsilon, delta, force=arguments.force)
    if arguments.json:
        print(to_json({"epsilon": total.epsilon, "delta": total.delta}))
    else:
        print(f"total of {ledger.files.name}: ε = {total.epsilon:g} at δ = {total.delta:.3g}")


def choose(ledger: "Ledger", arguments: argparse.Namespace) -> "tuple[Spent | None, list[Spent]]":
    """The group that was asked for, or else the one that has paid most; and all groups."""
    groups = ledger.groups(arguments.records_per_person)
    wanted = arguments.people
    given = plan_values(arguments)
    if wanted and given:
        raise UserError("--people and a data set are both given; drop one")
    if given:
        from dpfp_ray.data.tasks import load_task

        train = load_task(make_plan(given)).train
        wanted = ledger.find(train.all_texts())
        if wanted is None:
            raise UserError(f"the ledger {ledger.files.name} knows none of these records")
    if wanted:
        found = [one for one in groups if wanted in (one.people, *one.data_sets)]
        if not found:
            raise UserError(f"the ledger {ledger.files.name} has no people {wanted!r}")
        return found[0], groups
    most = max(groups, key=lambda one: (one.epsilon, one.private_epsilon), default=None)
    return most, groups


def facts(ledger: "Ledger", spent: "Spent | None", groups: "list[Spent]") -> dict[str, Any]:
    total = ledger.total()
    nothing: dict[str, Any] = {
        "people": None,
        "epsilon": 0.0,
        "private_epsilon": 0.0,
        "delta": total.delta if total else None,
        "guarantee": "proved",
        "how": "nothing was released",
        "total": total.epsilon if total else None,
        "entries": [],
    }
    summaries = [
        {name: getattr(one, name) for name in SUMMARY} | {"uses": len(one.used)} for one in groups
    ]
    return (nothing if spent is None else spent.to_json()) | {
        "ledger": ledger.files.name,
        "groups": summaries,
    }


def show(ledger: "Ledger", spent: "Spent | None", groups: "list[Spent]") -> None:
    from rich.table import Table

    from dpfp_ray.data.terminal import print_table, stderr, stdout
    from dpfp_ray.report.ledger import uses_table

    if spent is None:
        total = ledger.total()
        limit = "" if total is None else f" of a total of {total.epsilon:g}"
        stdout.print(f"nothing was done yet: ε = 0{limit}", markup=False)
        return
    uses = uses_table(spent)
    table = Table(box=None, pad_edge=False)
    for column in uses.columns:
        table.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
    for row in uses.rows:
        table.add_row(*(entry.text for entry in row.entries))
    print_table(table, max(stdout.width, 140))
    stdout.print(spent.sentence(), markup=False, soft_wrap=True)
    others = [one for one in groups if one.people != spent.people]
    if others:
        names = ", ".join(one.people for one in others)
        stderr.print(f"the ledger has other people, too (--people ID): {names}", markup=False)


def export(
    ledger: "Ledger", spent: "Spent | None", groups: "list[Spent]", output: str | None
) -> None:
    from dpfp_ray.report import formats
    from dpfp_ray.report.ledger import ledger_figure, uses_table
    from dpfp_ray.training.run_folder import make_folder

    if output is None:
        raise UserError("give --output DIR, the folder to write to")
    if spent is None:
        raise UserError(f"the ledger {ledger.files.name} has no entries")
    folder = make_folder(output)
    table = uses_table(spent)
    drawing = ledger_figure(spent, ledger.total(), f"dpfp ledger export --output {output}")
    files = {
        "ledger.json": (to_json(facts(ledger, spent, groups), indent=2) + "\n").encode(),
        "ledger.csv": formats.to_csv(table).encode(),
        "ledger.md": formats.to_markdown(table).encode(),
        "ledger.svg": drawing.svg,
        "ledger.png": drawing.png,
    }
    for name, content in files.items():
        Path(folder / name).write_bytes(content)
        print(folder / name)
