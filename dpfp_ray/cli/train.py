"""One run: one method, one budget, one task.

Examples:

  dpfp train --task demo --method dpfp --epsilon 3 --output runs/demo-dpfp
  dpfp train --task sst2 --data-dir glue/SST-2 --method non_private --output runs/sst2
  dpfp train --train-file my.csv --text-column review --label-column stars --output runs/mine
  dpfp train --task sst2 --method dpsgd --workers 4 --gpus-per-worker 1 --output runs/four-gpus

Stop it with Ctrl-C at any time: the same command continues where it was, and ends with the same
weights and the same ε as a run that was never stopped.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dpfp_ray.cli.options import (
    LEDGER_CHOICES,
    WORKER_CHOICES,
    add_ledger_flags,
    add_loss_flag,
    add_plan_flags,
    add_save_flag,
    add_seed_flags,
    add_select_flag,
    add_worker_flags,
    adder,
    given,
    plan_from,
)
from dpfp_ray.plan.method_spec import MARKS
from dpfp_ray.system.whole_files import to_json

if TYPE_CHECKING:
    from dpfp_ray.training.train import TrainedRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    adder(parser)("--best STORE", "the best setting of a sweep; flags win over it")
    add_plan_flags(parser)
    add_seed_flags(parser)
    add_worker_flags(parser.add_argument_group("Ray"))
    add_ledger_flags(parser)
    group = parser.add_argument_group("output")
    add = adder(group)
    add("--output DIR", "folder for the result", required=True)
    add("--overwrite", "discard what is in DIR")
    add("--no-weights", "do not save the trained weights")
    add("--json", "print the result as one JSON object")
    add_save_flag(group)
    add_select_flag(group)
    add_loss_flag(parser)


def command(arguments: argparse.Namespace) -> int:
    plan = plan_from(arguments)

    from dpfp_ray import train

    names = ("output", "seed", "overwrite", "threads", "show_training_loss", "save_every", "select")
    chosen = given(arguments, *names, *WORKER_CHOICES, *LEDGER_CHOICES)
    run = train(plan, weights=not arguments.no_weights, **chosen)
    show(run, arguments.json)
    # Trained by this command, and not found finished.
    if run.model is not None and (seconds := process_seconds()) is not None:
        print(f"{seconds:.1f} s in all, the start of Python included", file=sys.stderr)
    return 0


def process_seconds() -> float | None:
    """How long ago this process was started; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        up = float(Path("/proc/uptime").read_text().split()[0])
        return up - int(ticks) / os.sysconf("SC_CLK_TCK")
    return None


def time_text(run: "TrainedRun") -> str:
    """Where the time went."""
    cost, rate = run.record["cost"], run.examples_per_second
    said = f"{cost['train_seconds']:.1f} s of training"
    said += "" if rate is None else f" ({rate:,.0f} examples/s)"
    if (before := cost.get("prepare_seconds")) is not None:  # older records do not say
        said = f"{before:.1f} s of reading, tokenising and encoding, {said}"
    return f"{said}, {cost['eval_seconds']:.1f} s of evaluation"


def show(run: "TrainedRun", as_json: bool) -> None:
    if as_json:
        print(to_json(run.record))
        return
    from dpfp_ray.system.terminal import print_prose, stdout

    privacy, metrics = run.record["privacy"], run.record["metrics"]
    stdout.print(
        f"\n[bold]{run.plan['method']} on {run.plan['task']}[/bold]: "
        f"accuracy {run.accuracy:.4f} ({metrics['rule']})"
    )
    if privacy["epsilon"]:
        epsilons = ", ".join(
            f"{name} {'—' if value is None else format(float(value), '.3f')}"
            for name, value in privacy["epsilon"].items()
        )
        mark = f"{run.guarantee} ε" if run.guarantee in MARKS else "ε"
        stdout.print(
            f"{mark} (δ = {privacy['delta']:.3g}): {epsilons};  σ = {privacy['sigma']:.4f}"
        )
    peak = run.record["cost"]["peak_memory_bytes"] / 2**20
    stdout.print(f"{time_text(run)}; peak memory {peak:,.0f} MiB")
    if run.statement:
        print_prose(run.statement)
