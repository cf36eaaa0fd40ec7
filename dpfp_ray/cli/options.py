"""Flags that several verbs share: one for each field of a plan, generated from the plan itself."""

import argparse
from typing import Any

from dpfp_ray.plan.method_spec import users_of
from dpfp_ray.plan.plan import FIELDS, Plan
from dpfp_ray.plan.values import ALIASES, field_name, make_plan, read_plan_file

GROUPS = {
    "data": ("task", "bad_rows"),
    "model": ("model", "dropout"),
    "method": ("method", "epochs"),
    "budget": ("epsilon", "adjacency"),
    "execution": ("precision", "max_physical_batch"),
}


def add_plan_flags(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """`--batch-size 32` for the plan's `batch_size`, and so on, grouped as in the plan."""
    parser.add_argument(
        "--plan", metavar="FILE", help="YAML file of plan fields; flags win over it"
    )
    names = list(FIELDS)
    for title, (first, last) in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names[names.index(first) : names.index(last) + 1]:
            if name not in skip:
                add_flag(group, name)


def add_flag(group: Any, name: str) -> None:
    spec = FIELDS[name]
    flags = [f"--{name.replace('_', '-')}"]
    flags += ["--lr"] if name == "learning_rate" else []
    users = ", ".join(users_of(name))
    help_text = (f"{users}: " if users else "") + spec.metadata["help"]
    if spec.default is not None:
        help_text += f" (default: {spec.default})"
    choices = spec.metadata["choices"]
    symbol = next((short for short, long in ALIASES.items() if long == name), None)
    group.add_argument(
        *flags,
        dest=name,
        default=argparse.SUPPRESS,
        metavar="|".join(choices) if choices else (symbol or name.split("_")[-1]).upper(),
        help=help_text.replace("%", "%%"),
    )


def plan_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan fields that the user gave, in a file or as flags."""
    values = read_plan_file(arguments.plan) if getattr(arguments, "plan", None) else {}
    given = {name: value for name, value in vars(arguments).items() if name in FIELDS}
    return {key: value for key, value in values.items() if field_name(key) not in given} | given


def plan_from(arguments: argparse.Namespace) -> Plan:
    return make_plan(plan_values(arguments))


def add_seed_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("randomness")
    group.add_argument(
        "--seed",
        type=int,
        help="fix the secret seed (a known seed makes the noise known: for tests, not for release)",
    )
    group.add_argument(
        "--threads", type=int, default=None, metavar="N", help="CPU threads (default: all cores)"
    )
