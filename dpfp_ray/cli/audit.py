"""Measure what a trained model leaks, and hold it against the stated ε.

Examples:

  dpfp audit --task demo --method dpfp --epsilon 3 --canaries 1000 --output runs/audit-dpfp
  dpfp audit --task demo --method dpsgd --family mislabelled --access black_box --output runs/audit

Canaries take the places of so many records, each is in or out by a fair coin, the model is trained
once by the ordinary loop, and the coins are guessed from it. The bound is what the right guesses
prove, at the given confidence. `refuted`: the stated ε is wrong. `consistent`: this audit found no
contradiction, which proves nothing. See docs/auditing.md.

Stop it with Ctrl-C at any time: the same command continues. The model is not kept.
"""

import argparse
from typing import Any

from dpfp_ray.cli.options import (
    add_ledger_flags,
    add_loss_flag,
    add_plan_flags,
    add_save_flag,
    add_seed_flags,
    ledger_choices,
    plan_from,
)
from dpfp_ray.plan.method_spec import modes_of
from dpfp_ray.system.whole_files import to_json

FAMILIES = ("mislabelled", "unused_token")
ACCESS = ("black_box", "white_box")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("audit")
    group.add_argument("--canaries", type=int, default=1000, metavar="N", help="default: 1000")
    group.add_argument(
        "--family", choices=FAMILIES, help="kind of canary (default: the method's most telling)"
    )
    group.add_argument(
        "--access",
        choices=ACCESS,
        default="white_box",
        help="what the auditor sees: the model's outputs, or all that is released (the default)",
    )
    group.add_argument("--confidence", type=float, default=0.95, metavar="X", help="default: 0.95")
    group.add_argument("--membership-seed", type=int, help="fix the canaries' coins, for tests")
    group.add_argument("--output", metavar="DIR", required=True, help="folder for the result")
    group.add_argument("--overwrite", action="store_true", help="discard what is in DIR")
    group.add_argument("--json", action="store_true", help="print the audit as one JSON object")
    add_plan_flags(parser)
    add_seed_flags(parser)
    add_save_flag(group)
    add_loss_flag(parser)
    add_ledger_flags(parser)


def command(arguments: argparse.Namespace) -> int:
    plan = plan_from(arguments)

    from dpfp_ray import audit

    names = ("output", "canaries", "family", "access", "confidence", "seed", "membership_seed")
    given = {
        name: getattr(arguments, name)
        for name in (*names, "overwrite", "threads", "show_training_loss", "save_every")
    }
    record = audit(plan, **given, **ledger_choices(arguments)).record
    if arguments.json:
        print(to_json(record["audit"]))
    else:
        show(record)
    return 0


def show(record: Any) -> None:
    from dpfp_ray.system.terminal import stdout

    plan, audit = record["plan"], record["audit"]
    who = ", each a person with all of their records" * (audit.get("unit") == "person")
    colour = {"refuted": "bold red", "consistent": "green"}.get(audit["verdict"], "yellow")
    method = plan["method"] + (f" {plan['mode']}" if len(modes_of(plan["method"])) > 1 else "")
    stdout.print(
        f"\n[bold]{method} on {plan['task']}[/bold]: {audit['correct']} of {audit['guesses']} "
        f"guesses right, {audit['canaries']} canaries{who} "
        f"({audit['family']}, {audit['access']}: {audit['score']})"
    )
    stdout.print(
        f"ε ≥ {audit['epsilon']:.3f} at {audit['confidence']:.0%} confidence, δ = "
        f"{audit['delta']:.3g}; the most that this audit could show is {audit['ceiling']:.2f}"
    )
    stated = audit["stated_epsilon"]
    if stated is not None:
        stdout.print(
            f"stated: ε = {stated:g} ({audit['guarantee']}, {audit['accountant']}, "
            f"{audit['adjacency']})"
        )
    stdout.print(f"outcome: [{colour}]{audit['verdict']}[/{colour}]")
    if stated is not None and audit["ceiling"] <= stated:
        stdout.print("no outcome could have refuted this ε; more canaries would help")
