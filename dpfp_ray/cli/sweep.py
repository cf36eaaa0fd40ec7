"""Explore B, C, M, the learning rate or any other plan field under one privacy budget.

Examples:

  dpfp sweep --list                 the spaces that come with dpfp-ray, and what they answer
  dpfp sweep moments --dry-run      what it would take: time, memory, disk, privacy
  dpfp sweep moments --storage runs/moments
  dpfp sweep my-space.yaml --set task=sst2 --set data_dir=glue/SST-2 --samples 32
  dpfp sweep figure_clip --address auto --gpus-per-worker 1

Every trial is calibrated to the same budget before it starts. Ctrl-C, or even a killed machine,
loses nothing: the same command continues. With a larger --samples it goes on with a finished sweep.
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from dpfp_ray.cli.options import (
    LEDGER_CHOICES,
    RAY_CHOICES,
    add_ledger_flags,
    add_ray_flags,
    adder,
    given,
    show_costs,
    show_failures,
    split_change,
)
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json

if TYPE_CHECKING:
    from dpfp_ray.sweeps.sweep import FinishedSweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("space NAME|SPACE.yaml", "a shipped search space, or a file of your own", nargs="?")
    add("--list", "the shipped search spaces: their question, fields and trials")
    add("--dry-run", "run nothing: print what the sweep would take")
    text = "change a key of the space or fix a plan field; may be repeated"
    add("--set KEY=VALUE", text, action="append", default=[], dest="changes")
    add("--samples N", "how many trials (all but grid)")
    add("--json", "print the trials as a JSON list")
    add("--wide", "all columns, not those that fit a page")
    add(
        "--selection KIND[:N]",
        "what releasing the best trial is charged as: composition (default) counts every trial; "
        "logarithmic:N, geometric:N or poisson:N draw the number of trials at random, N expected, "
        "and show, keep and charge for the best one only (random search only)",
    )
    add_ray_flags(parser, default_storage="runs/NAME of the space")
    add_ledger_flags(parser)


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import preview_sweep, sweep

    if arguments.list:
        return show_spaces(arguments.json)
    if arguments.space is None:
        raise UserError("no search space; name one (dpfp sweep --list) or give a file")
    changes = dict(split_change(text) for text in arguments.changes)
    if arguments.dry_run:
        asked = given(arguments, "samples", "ledger", *RAY_CHOICES)
        lines = preview_sweep(arguments.space, changes=changes, **asked)
        print(to_json(lines) if arguments.json else "\n".join(lines))
        return 0
    asked = given(arguments, "storage", "samples", "selection", *LEDGER_CHOICES, *RAY_CHOICES)
    results = sweep(arguments.space, changes=changes, **asked)
    if results.records:
        show(results, arguments.json, arguments.wide)
    return show_failures(results.records)


def show(results: "FinishedSweep", as_json: bool, wide: bool) -> None:
    """The sweep's table, best trial first, and what choosing it costs."""
    from dpfp_ray.cli.results import show as show_table
    from dpfp_ray.system.terminal import print_prose, stderr

    if as_json:
        print(to_json(results.rows))
    else:
        columns = ("status", "accuracy", "epsilon", "sigma", "train_seconds")
        optional = () if wide else ("status", "epsilon", "sigma", "train_seconds")
        show_table(results.rows, [*results.space.varied, *columns], optional=optional)
        print()
        for line in results.outcome.lines:
            print_prose(line)
        if (
            results.statement
        ):  # the rest of it: --wide, or dpfp statement of what train --best gives
            lines = results.statement.splitlines()
            print_prose(f"Its {chr(10).join(lines if wide else lines[:1])}")
    show_costs(results.costs, as_json)
    if not as_json and results.outcome.best is not None:
        where = results.storage
        stderr.print(f"\nTrain it and keep the model:  {results.next_command}", markup=False)
        stderr.print(f"Pictures of the sweep:        dpfp report {where} --output {where}/report")


def show_spaces(as_json: bool) -> int:
    from dpfp_ray import shipped_spaces
    from dpfp_ray.system.terminal import print_prose

    spaces = shipped_spaces()
    if as_json:
        print(to_json([asdict(space) for space in spaces]))
        return 0
    for space in spaces:
        fields = ", ".join(space.varied)
        print_prose(f"{space.name}: {space.question}")
        print_prose(f"    varies {fields}; {space.trials} trials. {space.costs}")
    return 0
