"""Several methods at equal ε, on the same data, by the same accountant, and one table.

Examples:

  dpfp compare --task demo --methods non_private,dpfp,dpsgd,rgp --epsilon 3,8 --output runs/compare
  dpfp compare --task demo --output runs/all
  dpfp compare --task sst2 --data-dir glue/SST-2 --methods dpfp,dpsgd --epsilon 3 --seeds 3 --tune 8
  dpfp compare --task demo --methods dpfp:moments,dpsgd:head --audit --output runs/audited
  dpfp compare --task demo --methods dpfp,dpsgd --seeds 5 --dry-run --difference 1.0

A method may carry a variant: dpfp:release_once and dpfp:moments are DP-FP's proved modes,
METHOD:head trains the head only. Each method runs with the hyperparameters its own paper found good
(see its file in dpfp_ray/methods/) unless a flag says otherwise; `--match batch` gives all of them
the same batch size. Stopped or killed, the same command continues and repeats no finished run.
"""

import argparse
from typing import Any

from dpfp_ray.cli.options import (
    LEDGER_CHOICES,
    RAY_CHOICES,
    add_ledger_flags,
    add_plan_flags,
    add_ray_flags,
    add_select_flag,
    adder,
    given,
    plan_values,
    positive,
    show_costs,
    show_failures,
    split_change,
)
from dpfp_ray.plan.method_spec import METHODS
from dpfp_ray.plan.plan import FIELDS
from dpfp_ray.plan.values import check_budgets, check_methods, field_name
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.whole_files import to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison")
    add = adder(group)
    add("--methods A,B,…", "default: all of them, each of DP-FP's modes included")
    add("--epsilon E1,E2,…", "budgets (default: 3)", dest="budgets")
    add("--seeds N", "repetitions of each", type=positive, default=1)
    add("--match", "batch: every method gets the same B (default 32)", choices=["batch"])
    add(
        "--set METHOD.FIELD=VALUE",
        "a plan field for one method only, such as dpfp.lr=1e-4 or dpsgd:head.epochs=9; may be "
        "repeated",
        action="append",
        default=[],
        dest="settings",
    )
    tune = "first try N random settings of each method at each ε, then compare the best ones"
    add("--tune N", tune, type=positive)
    audit = "also audit every row: one more run of each with N canaries (default: 1000)"
    add("--audit N", audit, type=positive, nargs="?", const=1000)
    add_select_flag(group)
    text = "settings of a sweep's best trial, for its own method; may be repeated"
    add("--best STORE", text, action="append", default=[], dest="best_of")
    add("--dry-run", "run nothing: print the cells and the smallest difference that they can show")
    seeds = "with --dry-run: how many seeds a difference of so many points of accuracy needs"
    add("--difference POINTS", seeds, type=float)
    add("--output DIR", "folder or URI for results")
    add("--json", "print the table as a JSON list")
    add("--wide", "all columns, not only those that fit")
    add_plan_flags(parser, skip=("method", "epsilon"))
    add_ray_flags(parser)
    add_ledger_flags(parser)


def command(arguments: argparse.Namespace) -> int:
    methods = parse_methods(arguments.methods)
    values = plan_values(arguments)
    asked: dict[str, Any] = {
        "methods": methods,
        "epsilon": parse_budgets(arguments.budgets, values.pop("epsilon", None)),
        "settings": parse_settings(arguments.settings),
        **given(arguments, "seeds", "match", "tune", "audit", "best_of"),
        **values,
    }

    from dpfp_ray import compare, preview

    if arguments.dry_run:
        lines = preview(**asked, difference=arguments.difference)
        print(to_json(lines) if arguments.json else "\n".join(lines))
        return 0
    if arguments.output is None:
        raise UserError("--output is missing; give a folder for the results, or --dry-run")
    made = compare(**asked, **given(arguments, "output", "select", *LEDGER_CHOICES, *RAY_CHOICES))
    if arguments.json:
        print(to_json(made.rows))
    else:
        made.show(wide=arguments.wide)
    show_costs(made.costs, arguments.json)
    return show_failures(made.records)


def parse_methods(text: str | None) -> list[str] | None:
    """None: the usual ones."""
    if text is None:
        return None
    return check_methods(part.strip() for part in text.split(",") if part.strip())


def parse_budgets(flag: str | None, planned: Any) -> list[float]:
    """The budgets of the flag, else of the plan file, which may have one number or a list."""
    given = flag or (3.0 if planned is None else planned)
    parts = given.split(",") if isinstance(given, str) else given
    try:
        return check_budgets(
            float(part) for part in (parts if isinstance(parts, list) else [parts])
        )
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"epsilon {given!r} is not a list of numbers; give 3 or 3,8") from None


def parse_settings(texts: list[str]) -> dict[str, dict[str, str]]:
    """`dpfp.lr=1e-4` as {"dpfp": {"learning_rate": "1e-4"}}."""
    settings: dict[str, dict[str, str]] = {}
    for text in texts:
        key, value = split_change(text)
        method, dot, name = key.partition(".")
        if not dot or method.partition(":")[0] not in METHODS:
            raise UserError(f"--set {text}: give METHOD.FIELD=VALUE, such as dpfp.lr=1e-4")
        if field_name(name) not in FIELDS:
            raise UserError(f"--set {text}: {unknown('key', name, tuple(FIELDS))}")
        settings.setdefault(method, {})[field_name(name)] = value
    return settings
