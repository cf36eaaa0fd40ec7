"""The noise that a privacy budget asks for, and what it costs under every accountant.

Example (SST-2 at the paper's settings):

  dpfp calibrate --records 67349 --epsilon 3 --accountant pld --batch-size 32 --micro-batches 32
"""

import argparse
from typing import TYPE_CHECKING

from dpfp_ray.cli.options import add_flag, adder
from dpfp_ray.plan.method_spec import MARKS
from dpfp_ray.plan.plan import ACCOUNTANTS, FIELDS
from dpfp_ray.plan.values import make_plan
from dpfp_ray.system.whole_files import to_json

if TYPE_CHECKING:
    from dpfp_ray.privacy.calibration import Calibration

ASSUMES = {
    "gdp": "the paper's central limit theorem; not an upper bound",
    "rdp": "Rényi DP; an upper bound, loose",
    "pld": "privacy loss distributions; an upper bound, tight",
}
USED = (
    *("method", "mode", "scope", "classes", "batch_size", "micro_batches", "epochs", "epsilon"),
    *("delta", "label_epsilon", "accountant", "clip", "adjacency"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--records D", "records in the training set", required=True)
    for name in USED:
        add_flag(parser, name)
    add("--json", "print one JSON object")


def command(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if name in FIELDS}
    # σ is quoted for C = 1, as σ/C, unless a clipping norm is given.
    plan = make_plan({"clip": 1.0, **given})

    from dpfp_ray import calibrate

    calibration = calibrate(plan)
    if arguments.json:
        print(to_json(calibration.to_dict()))
    else:
        show(calibration)
    return 0


def show(found: "Calibration") -> None:
    from rich.table import Table

    from dpfp_ray.system.terminal import stdout

    plan = found.plan
    stdout.print(
        f"{plan.spec.title}, scope {plan.scope}: D = {plan.D:,}, B = {plan.B}, M = {plan.M}, "
        f"E = {plan.epochs:g}, δ = {plan.delta:.3g}, neighbours differ by {plan.adjacency}"
    )
    stdout.print(
        f"p = {plan.p:.4g}, T = {plan.steps:,} steps, n = {plan.draws:,} draws\n"
        f"[bold]σ = {found.sigma:.4f}[/bold]"
        f"  (σ/C = {found.noise_multiplier:.4f} with C = {plan.C:g})"
    )
    if found.own:
        shown = ", ".join(f"{name} = {value:.4g}" for name, value in found.own.items())
        stdout.print(f"[bold]{shown}[/bold]")
    table = Table("accountant", "ε", "what the number rests on")
    for name in ACCOUNTANTS:
        value = found.epsilon[name]
        mark = " ← budget" if name == plan.accountant else ""
        shown = "no bound known" if value is None else f"{value:.3f}"
        table.add_row(name, shown + mark, ASSUMES[name])
    stdout.print(table)
    if found.noise_power_ratio is not None:
        stdout.print(
            f"σ² relative to M = 1: {found.noise_power_ratio:.3f} "
            f"(the paper's 1/M: {found.noise_power_ratio_claimed:.3f}, reached only for C/σ ≪ 1)"
        )
    if plan.spec.guarantee in MARKS:
        kind = plan.spec.guarantee
        stdout.print(f"For {plan.spec.label} these ε are {kind}: dpfp glossary {kind}.")
