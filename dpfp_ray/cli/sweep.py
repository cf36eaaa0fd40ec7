"""Explore B, C, M, the learning rate or any other plan field under one privacy budget.

Examples:

  dpfp sweep search_spaces/demo.yaml --storage runs/demo-sweep
  dpfp sweep search_spaces/dpfp.yaml --set task=sst2 --set data_dir=glue/SST-2 --samples 32
  dpfp sweep search_spaces/figure_clip.yaml --address auto --gpus-per-worker 1

Every trial is calibrated to the same budget before it starts. Ctrl-C, or even a killed machine,
loses nothing: the same command continues.
"""

import argparse
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
from dpfp_ray.system.whole_files import to_json

if TYPE_CHECKING:
    from dpfp_ray.sweeps.sweep import FinishedSweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("space SPACE.yaml", "search space; see search_spaces/")
    text = "change a key of the space or fix a plan field; may be repeated"
    add("--set KEY=VALUE", text, action="append", default=[], dest="changes")
    add("--samples N", "how many trials (random, tpe)")
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
    from dpfp_ray import sweep

    results = sweep(
        arguments.space,
        changes=dict(split_change(text) for text in arguments.changes),
        **given(arguments, "storage", "samples", "selection", *LEDGER_CHOICES, *RAY_CHOICES),
    )
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
        shown = ("status", "accuracy", "epsilon", "sigma", "train_seconds")
        optional = () if wide else ("status", "epsilon", "sigma", "train_seconds")
        show_table(results.rows, [*results.space.varied, *shown], optional=optional)
        if results.statement:
            print_prose(f"the best trial's {results.statement}")
        where = results.storage
        stderr.print(f"records in {where}; query them with: dpfp results {where}")
    show_costs(results.costs, as_json)
