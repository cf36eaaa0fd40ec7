"""Several methods at equal ε, on the same data, by the same accountant, and one table.

Examples:

  dpfp compare --task demo --methods non_private,dpfp,dpsgd,rgp --epsilon 3,8 --output runs/compare
  dpfp compare --task sst2 --data-dir glue/SST-2 --methods dpfp,dpsgd --epsilon 3 --seeds 3 --tune 8
  dpfp compare --task demo --methods dpfp:moments,dpsgd:head --audit --output runs/audited

A method may carry a variant: dpfp:release_once and dpfp:moments are DP-FP's proved modes,
METHOD:head trains the head only. Each method runs with the hyperparameters its own paper found good
(see its file in dpfp_ray/methods/) unless a flag says otherwise; `--match batch` gives all of them
the same batch size. Stopped or killed, the same command continues and repeats no finished run.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from dpfp_ray.cli.options import add_plan_flags, plan_values
from dpfp_ray.cli.sweep import (
    add_ray_flags,
    interrupted,
    positive,
    ray_options,
    show_costs,
    split_change,
)
from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError, unknown
from dpfp_ray.plan.method_spec import METHODS, find_spec, modes_of, scopes_of
from dpfp_ray.plan.plan import FIELDS
from dpfp_ray.plan.values import field_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--methods", default=",".join(METHODS), metavar="A,B,…", help="default: all of them"
    )
    group.add_argument(
        "--epsilon", dest="budgets", default="3", metavar="E1,E2,…", help="budgets (default: 3)"
    )
    group.add_argument("--seeds", type=positive, default=1, metavar="N", help="repetitions of each")
    group.add_argument(
        "--match", choices=["batch"], help="batch: every method gets the same B (default 32)"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="METHOD.FIELD=VALUE",
        help="a plan field for one method only, such as dpfp.lr=1e-4 or dpsgd:head.epochs=9; may "
        "be repeated",
    )
    group.add_argument(
        "--tune",
        type=positive,
        metavar="N",
        help="first try N random settings of each method at each ε, then compare the best ones",
    )
    group.add_argument(
        "--audit",
        type=positive,
        nargs="?",
        const=1000,
        metavar="N",
        help="also audit every row: one more run of each with N canaries (default: 1000)",
    )
    group.add_argument("--output", required=True, metavar="DIR", help="folder or URI for results")
    group.add_argument("--json", action="store_true", help="print the table as a JSON list")
    add_plan_flags(parser, skip=("method", "epsilon"))
    add_ray_flags(parser)


def command(arguments: argparse.Namespace) -> int:
    methods = parse_methods(arguments.methods)
    budgets = parse_budgets(arguments.budgets)
    settings = parse_settings(arguments.settings)
    cells = plan_cells(methods, budgets, plan_values(arguments), arguments.match, settings)

    from dpfp_ray.results.store import Store
    from dpfp_ray.sweeps import compare, cost
    from dpfp_ray.sweeps.audits import audit_trials, with_verdicts, write_verdicts
    from dpfp_ray.sweeps.runner import Runner
    from dpfp_ray.sweeps.state import resolve_storage
    from dpfp_ray.sweeps.sweep import InputsOnce

    storage = resolve_storage(arguments.output)
    inputs_of = InputsOnce()
    trials = compare.bind_cells(cells, arguments.seeds, inputs_of)
    try:
        with Runner(Path(storage).name, storage, ray_options(arguments), inputs_of) as runner:
            if arguments.tune:
                cells = compare.tuned_cells(cells, runner, arguments.tune)
                trials = compare.bind_cells(cells, arguments.seeds, inputs_of)
            runner.run(trials, varied=compare.differing(trials))
            audits = audit_trials(trials, storage, ray_options(arguments), arguments.audit)
    except KeyboardInterrupt:
        return interrupted(storage)
    store = Store(storage)
    write_verdicts(store, audits)
    records = store.records()
    costs = cost.composed_cost(records)  # the tuning trials too: they chose the settings
    cost.write_cost(storage, records, costs)
    store.export()
    chosen = {trial.id for trial in trials}
    shown = [record for record in store.records() if record["trial"]["id"] in chosen]
    rows = with_verdicts(compare.summarise(shown), audits)
    store.files.write("table.md", compare.markdown(rows).encode())
    if arguments.json:
        print(to_json(rows))
    else:
        compare.print_comparison(rows, shown)
    show_costs(costs, arguments.json)
    return 0


def parse_methods(text: str) -> list[str]:
    methods = [part.strip() for part in text.split(",") if part.strip()]
    for name in methods:
        variant(name)
    if not methods:
        raise UserError("methods is empty; give a list such as non_private,dpfp,dpsgd")
    return list(dict.fromkeys(methods))


def variant(name: str) -> dict[str, str]:
    """The plan fields that `dpfp`, `dpfp:moments` or `dpsgd:head` stand for."""
    method, colon, kind = name.partition(":")
    if method not in METHODS:
        raise UserError(unknown("method", method, METHODS))
    if not colon:
        return {"method": method}
    modes, scopes = modes_of(method), scopes_of(method)
    kinds = (*(modes if len(modes) > 1 else ()), *scopes[1:])
    if not kinds:
        raise UserError(f"{method} has no variants, so no {kind!r}; write {method} alone")
    if kind not in kinds:
        raise UserError(unknown(f"variant of {method}", kind, kinds))
    return {"method": method, "mode" if kind in modes else "scope": kind}


def parse_budgets(text: str) -> list[float]:
    budgets = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise UserError(f"epsilon {part!r} is not a number; give a list such as 3,8") from None
        if math.isinf(value):
            raise UserError("epsilon inf is training without privacy; use --methods non_private")
        if not value > 0:
            raise UserError(f"epsilon is {part}; give numbers above 0")
        budgets.append(value)
    return list(dict.fromkeys(budgets))


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


def plan_cells(
    methods: list[str],
    budgets: list[float],
    common: dict[str, Any],
    match: str | None,
    settings: dict[str, dict[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """Plan values for each (method, ε); non-private training has no ε and is run once.

    A flag applies to every method that knows it, one of `settings` to its method or, if it names a
    variant, to that variant.
    """
    cells = []
    for name in methods:
        fields, own = variant(name), settings or {}
        method = fields["method"]
        values = {**common, **own.get(method, {}), **own.get(name, {}), **fields}
        if match == "batch":
            values.setdefault("batch_size", 32)
        spec = find_spec(method, values.get("mode")) or find_spec(method)
        assert spec is not None
        for key in spec.unused:
            values.pop(key, None)
        cells += [{**values, "epsilon": budget} for budget in budgets] if spec.private else [values]
    return cells
