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

from dpfp_ray.cli.options import add_flag, adder, fields_of, given, plan_values, positive
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    actions = "show what was spent, set a total once, or export tables and a figure"
    add("action", actions, choices=("show", "set", "export"))
    add("--ledger PATH_OR_URI", "default: $DPFP_LEDGER, else the user's data folder")
    add("--json", "show, set: print one JSON object")
    add("--wide", "show: all columns, not those that fit")
    add("--output DIR", "export: folder to write to")
    add(
        "--records-per-person M",
        "show, export: what a person pays who has M records in each use that protects records "
        "(default: 1)",
        type=positive,
        default=1,
    )
    add = adder(parser.add_argument_group("set"))
    add("--epsilon E", "the total", dest="total_epsilon", type=float)
    add("--delta D", "its δ (default: 1e-6)", dest="total_delta", type=float)
    add("--force", "change a total that is set")
    group = parser.add_argument_group("whose records")
    adder(group)("--people ID", "a data set or group, as in the JSON")
    for name in fields_of("data"):
        add_flag(group, name)


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import ledger

    if arguments.action == "set":
        if arguments.total_epsilon is None:
            raise UserError("give --epsilon E, what these people may ever pay")
        book = ledger(arguments.ledger)
        asked = (arguments.total_epsilon, arguments.total_delta)
        total = book.set_total(*asked, force=arguments.force)
        if arguments.json:
            print(to_json({"epsilon": total.epsilon, "delta": total.delta}))
        else:
            name = book.ledger.files.name
            print(f"total of {name}: ε = {total.epsilon:g} at δ = {total.delta:.3g}")
        return 0
    if arguments.action == "export" and arguments.output is None:
        raise UserError("give --output DIR, the folder to write to")
    chosen = given(arguments, "people", "records_per_person") | plan_values(arguments)
    view = ledger(arguments.ledger, **chosen)
    if arguments.action == "export":
        print(*view.write(arguments.output), sep="\n")
    elif arguments.json:
        print(to_json(view.to_json()))
    else:
        view.show(wide=arguments.wide)
    return 0
