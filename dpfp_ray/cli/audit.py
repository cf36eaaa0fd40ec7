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
    LEDGER_CHOICES,
    add_ledger_flags,
    add_loss_flag,
    add_plan_flags,
    add_save_flag,
    add_seed_flags,
    adder,
    given,
    plan_from,
)
from dpfp_ray.plan.method_spec import modes_of
from dpfp_ray.system.whole_files import to_json

FAMILIES = ("mislabelled", "unused_token")
ACCESS = ("black_box", "white_box")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("audit")
    add = adder(group)
    add("--canaries N", "default: 1000", type=int, default=1000)
    add("--family", "kind of canary (default: the method's most telling)", choices=FAMILIES)
    add(
        "--access",
        "what the auditor sees: the model's outputs, or all that is released (the default)",
        choices=ACCESS,
        default="white_box",
    )
    add("--confidence X", "default: 0.95", type=float, default=0.95)
    add("--membership-seed", "fix the canaries' coins, for tests", type=int)
    add("--output DIR", "folder for the result", required=True)
    add("--overwrite", "discard what is in DIR")
    add("--json", "print the audit as one JSON object")
    add_plan_flags(parser)
    add_seed_flags(parser)
    add_save_flag(group)
    add_loss_flag(parser)
    add_ledger_flags(parser)


def command(arguments: argparse.Namespace) -> int:
    plan = plan_from(arguments)

    from dpfp_ray import audit

    names = ("output", "canaries", "family", "access", "confidence", "seed", "membership_seed")
    more = ("overwrite", "threads", "show_training_loss", "save_every", *LEDGER_CHOICES)
    record = audit(plan, **given(arguments, *names, *more)).record
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
