"""Query the results of runs, compares and sweeps: which trials, in what order, which columns.

Examples:

  dpfp results runs
  dpfp results runs --wide
  dpfp results runs/sweep --where "method == 'dpfp' and epsilon <= 3" --sort accuracy --limit 10
  dpfp results runs --where "task in ['sst2', 'demo'] and not (accuracy < 0.6 or scope == 'head')"
  dpfp results s3://bucket/sweep --where "error is not None" --columns id,node,error
  dpfp results runs --columns id,B,M,C,lr,accuracy --csv > trials.csv
  dpfp results --address http://head:8265 --where "status == 'running'"

--address asks a running `dpfp serve`, given its own address or that of the cluster's dashboard.

--where knows the columns, numbers, 'text', lists, None, == != < <= > >= in, is None, and, or, not.
An order (<, >=, …) with a missing value is false. B, M, C, E and lr name their columns.

--sort takes columns with commas between. A plain name puts the best first for accuracy and
examples_per_second, else the smallest; +name is ascending, -name descending (--sort=-epsilon).
Trials without a value come last.

epsilon is the budget; epsilon_gdp, epsilon_rdp and epsilon_pld are what was spent, by each
accountant.
"""

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dpfp_ray import COLUMNS
from dpfp_ray.cli.options import adder, given
from dpfp_ray.plan.method_spec import MARKS
from dpfp_ray.plan.plan import FIELDS
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json

Row = Mapping[str, Any]
NARROW = ("id", "status", "method", "mode", "task", "model", "scope", "epsilon", "accuracy")
IF_THEY_DIFFER = ("model", "scope")
SHOWN = (*NARROW, "batch_size", "micro_batches", "clip", "learning_rate", "examples_per_second")
HEADERS = {"epsilon": "ε", "delta": "δ", "sigma": "σ", "noise_multiplier": "σ/C"}
HEADERS |= {"batch_size": "B", "micro_batches": "M", "clip": "C", "learning_rate": "lr"}
HEADERS |= {"examples_per_second": "ex/s", "peak_memory_bytes": "peak MiB"}
HEADERS |= {"train_seconds": "train s"}
UNPROVED = (
    "† nominal ε: what the paper's accounting says; it is no guarantee for this mode\n"
    "  (dpfp glossary nominal)",
    "§ claimed ε: it holds if another library does what it says (dpfp glossary claimed)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = f"columns: {', '.join(COLUMNS)}, and accuracy_SPLIT for each dev split"
    parser.epilog = textwrap.fill(names, width=78)
    add = adder(parser)
    add("location DIR_OR_URI", "a folder, s3://, gs:// or file://", nargs="?")
    add("--address URL", "ask the service there, such as http://head:8265")
    add("--token-file FILE", "holds the service's token; or set DPFP_TOKEN")
    add("--where CONDITION", "only the trials for which it holds")
    add("--sort COLUMNS", "e.g. accuracy, or task,-epsilon")
    add("--columns COLUMNS", "e.g. id,accuracy,lr")
    add("--limit N", "at most N trials")
    add("--optuna URL", "write the trials as an Optuna study, such as sqlite:///study.db")
    add("--wide", "more columns than fit a page, and all plan fields that differ")
    add = adder(parser.add_mutually_exclusive_group())
    add("--json", "print a list, one object per trial")
    add("--csv", "print comma-separated values")


def command(arguments: argparse.Namespace) -> int:
    if arguments.optuna is not None:
        from dpfp_ray import to_optuna

        if arguments.location is None:
            raise UserError("--optuna needs a folder or URI with a sweep's records")
        study = to_optuna(arguments.location, storage=arguments.optuna)
        print(f"{len(study.trials):,} trials in {arguments.optuna}, study {study.study_name}")
        return 0
    limit = arguments.limit
    if limit is not None and not (limit.isascii() and limit.isdigit() and int(limit) >= 1):
        raise UserError(f"limit is {limit!r}; give a whole number of 1 or more")
    if (arguments.location is None) == (arguments.address is None):
        raise UserError("give either a folder or URI, or --address of a running service")
    asked: dict[str, Any] = given(arguments, "where", "sort")
    asked["limit"] = None if limit is None else int(limit)
    if arguments.address is None:
        from dpfp_ray import find_results

        answer = find_results(arguments.location, **asked)
    else:
        from dpfp_ray import ask_service

        answer = ask_service(arguments.address, token_file=arguments.token_file, **asked)
    chosen = None if arguments.columns is None else answer.chosen(arguments.columns)

    if arguments.json:
        names = chosen or answer.columns
        print(to_json([{name: row.get(name) for name in names} for row in answer.rows]))
    elif arguments.csv:
        print(answer.to_csv(chosen), end="")
    elif answer.rows:
        show(answer.rows, chosen, wide=arguments.wide)
    if answer.total == 0:
        print("no trial matches", file=sys.stderr)
    elif len(answer.rows) < answer.total:
        print(f"{len(answer.rows):,} of {answer.total:,} trials", file=sys.stderr)
    return 0


def show(
    rows: Sequence[Row],
    chosen: list[str] | None,
    *,
    wide: bool = False,
    optional: Sequence[str] = (),
) -> None:
    """One table; it never grows beyond the page unless more columns were asked for. Those chosen
    that are `optional` go where there is no room, the last first."""
    from dpfp_ray.system.terminal import print_columns, stdout

    names = chosen or [n for n in (SHOWN if wide else NARROW) if _worth_showing(rows, n)]
    if not chosen:
        varied = [name for name in FIELDS if name not in names and _differ(rows, name)]
        names = [*names, *varied]
        optional = () if wide else varied
    heads = {name: _printable(HEADERS.get(name, name)) for name in names}
    print_columns(
        {heads[name]: [_cell(row, name) for row in rows] for name in names},
        {heads[name] for name in names if COLUMNS.get(name, float) is not str},
        [heads[name] for name in optional if name in heads],
        gap=1,
        fold=not (chosen or wide),
        styles=["red" if row.get("verdict") == "refuted" else None for row in rows],
    )
    texts = "".join(_cell(row, name) for row in rows for name in names)
    for text in UNPROVED:
        if text[0] in texts:
            stdout.print(text)


def _worth_showing(rows: Sequence[Row], name: str) -> bool:
    values = {row.get(name) for row in rows}
    return _differ(rows, name) if name in IF_THEY_DIFFER else not values <= {None, "finished"}


def _differ(rows: Sequence[Row], name: str) -> bool:
    return len({row.get(name) for row in rows} - {None}) > 1


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return "—"
    mark = MARKS.get(row.get("guarantee") or "", "") if name.startswith("epsilon") else ""
    return _printable(_formatted(value, name)) + mark


def _formatted(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if name == "peak_memory_bytes":
        return f"{value / 2**20:,.0f}"
    forms = {"accuracy": ".4f", "examples_per_second": ",.0f", "train_seconds": ",.1f"}
    other = "," if isinstance(value, int) else ".4g"
    return format(value, forms.get("accuracy" if name.startswith("accuracy") else name, other))


def _printable(text: str) -> str:
    """Names and errors come from data and other machines: no control codes reach the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
