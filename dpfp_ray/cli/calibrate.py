"""The noise that a privacy budget asks for, and what it costs under every accountant.

Example (SST-2 at the paper's settings):

  dpfp calibrate --records 67349 --epsilon 3 --accountant pld --batch-size 32 --micro-batches 32
"""

import argparse
import dataclasses
from typing import Any

from dpfp_ray.cli.options import add_flag
from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import ACCOUNTANTS, FIELDS, Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import noise_multiplier

ASSUMES = {
    "gdp": "the paper's central limit theorem; not an upper bound",
    "rdp": "Rényi DP; an upper bound, loose",
    "pld": "privacy loss distributions; an upper bound, tight",
}
USED = (
    "method",
    "classes",
    "batch_size",
    "micro_batches",
    "epochs",
    "epsilon",
    "delta",
    "accountant",
    "clip",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", metavar="D", required=True, help="records in the training set")
    for name in (*USED, "adjacency"):
        add_flag(parser, name)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def command(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if name in FIELDS}
    # σ is quoted for C = 1, as σ/C, unless a clipping norm is given.
    plan = make_plan({"clip": 1.0, **given})
    if not plan.private:
        raise UserError(f"{plan.method} adds no noise; use a --method that has a budget")
    facts = calibration_facts(plan)
    if arguments.json:
        print(to_json(facts))
    else:
        show(plan, facts)
    return 0


def calibration_facts(plan: Plan) -> dict[str, Any]:
    multiplier = noise_multiplier(plan)
    spent = accounting.epsilons(accounting.mechanism(plan, multiplier), _delta(plan))
    facts = {
        "sigma": multiplier * plan.C,
        "noise_multiplier": multiplier,
        "p": plan.p,
        "steps": plan.steps,
        "draws": plan.draws,
        "delta": plan.delta,
        "epsilon": spent,
        "accountant": plan.accountant,
        "adjacency": plan.adjacency,
    }
    if plan.spec.own_profile:
        own = accounting.own_profile(plan)
        facts |= {"lambda": own.ridge, "sigma_out": own.output_sigma, "tau": own.tau}
    if plan.M > 1:
        single = noise_multiplier(dataclasses.replace(plan, micro_batches=1))
        facts["noise_power_ratio"] = (multiplier / single) ** 2
        facts["noise_power_ratio_claimed"] = 1 / plan.M
    return facts


def _delta(plan: Plan) -> float:
    assert plan.delta is not None
    return plan.delta


def show(plan: Plan, facts: dict[str, Any]) -> None:
    from rich.table import Table

    from dpfp_ray.data.terminal import stdout

    stdout.print(
        f"{plan.method}: D = {plan.D:,}, B = {plan.B}, M = {plan.M}, E = {plan.epochs:g}, "
        f"δ = {plan.delta:.3g}, neighbours differ by {plan.adjacency}"
    )
    stdout.print(
        f"p = {plan.p:.4g}, T = {plan.steps:,} steps, n = {plan.draws:,} draws\n"
        f"[bold]σ = {facts['sigma']:.4f}[/bold]"
        f"  (σ/C = {facts['noise_multiplier']:.4f} with C = {plan.C:g})"
    )
    if "lambda" in facts:
        stdout.print(f"[bold]λ = {facts['lambda']:.4f}[/bold]  (σ_out = {facts['sigma_out']:.3g})")
    table = Table("accountant", "ε", "what the number rests on")
    for name in ACCOUNTANTS:
        value = facts["epsilon"][name]
        mark = " ← budget" if name == plan.accountant else ""
        shown = "no bound known" if value is None else f"{value:.3f}"
        table.add_row(name, shown + mark, ASSUMES[name])
    stdout.print(table)
    if "noise_power_ratio" in facts:
        stdout.print(
            f"σ² relative to M = 1: {facts['noise_power_ratio']:.3f} "
            f"(the paper's 1/M: {facts['noise_power_ratio_claimed']:.3f}, reached only for C/σ ≪ 1)"
        )
    if plan.spec.guarantee == "nominal":
        stdout.print(f"For {plan.spec.label} these ε are nominal: see docs/privacy.md.")
