"""A `dpfp` command as a Ray job: checked here, named for people, described for the dashboard."""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.system.errors import UserError

NOT_JOBS = ("submit",)


@dataclass(frozen=True)
class Description:
    """What the Jobs page says about a job; `files` are those that its plan names."""

    name: str
    facts: dict[str, str]
    files: tuple[str, ...] = ()


def describe(command: Sequence[str]) -> Description:
    """Parse `command` as the cluster will; what is wrong with it shows here, before it travels."""
    from dpfp_ray.cli.main import build_parser

    if not command:
        raise UserError("no command; give one after --, such as: -- sweep search_spaces/demo.yaml")
    if command[0] in NOT_JOBS:
        raise UserError(f"{command[0]} cannot be a job; submit sweep, compare, train or audit")
    arguments = build_parser().parse_args(list(command))
    for name in ("storage", "output"):
        if hasattr(arguments, name) and not getattr(arguments, "stop", False):
            check_place(f"--{name}", getattr(arguments, name))
    facts = {"verb": command[0], **_FACTS.get(command[0], _nothing)(arguments)}
    files = tuple(facts.pop("files", ()))
    named = ("sweep", "task") if facts["verb"] == "sweep" else ("task", "sweep")
    words = [facts["verb"], next((facts[key] for key in named if facts.get(key)), "")]
    name = " ".join(str(word) for word in words if word)
    shown = {key: str(value) for key, value in facts.items() if value not in (None, "")}
    return Description(name, shown, files)


def _sweep(arguments: argparse.Namespace) -> dict[str, Any]:
    from dpfp_ray import read_search_space
    from dpfp_ray.cli.options import split_change

    changes = dict(split_change(text) for text in arguments.changes)
    if arguments.samples is not None:
        changes["samples"] = arguments.samples
    space = read_search_space(arguments.space, changes)
    plans = space.some_plans()
    return {
        "sweep": space.name,
        "task": _joined(plan.task for plan in plans),
        "methods": _joined(plan.method for plan in plans),
        "epsilon": _joined(f"{plan.epsilon:g}" for plan in plans if plan.epsilon is not None),
        "files": [name for plan in plans[:1] for name in _files(plan)],
    }


def _joined(values: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(values))


def _files(plan: Plan) -> list[str]:
    return [str(name) for name in (plan.train_file, plan.dev_file) if name]


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    from dpfp_ray.cli.compare import parse_budgets, parse_methods
    from dpfp_ray.cli.options import plan_values

    values = plan_values(arguments)
    budgets = parse_budgets(arguments.budgets, values.pop("epsilon", None))
    try:
        plan = make_plan(values)
    except UserError:  # some methods may have no such plan; the comparison says so
        plan = None
    return {
        "sweep": Path(arguments.output).name,
        "task": plan.task if plan else "",
        "methods": ",".join(parse_methods(arguments.methods)),
        "epsilon": ",".join(f"{budget:g}" for budget in budgets),
        "files": _files(plan) if plan else [],
    }


def _one_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from dpfp_ray.cli.options import plan_from

    plan = plan_from(arguments)
    return {
        "task": plan.task,
        "methods": plan.method,
        "epsilon": plan.epsilon,
        "files": _files(plan),
    }


def _nothing(arguments: argparse.Namespace) -> dict[str, Any]:
    return {}


_FACTS = {"sweep": _sweep, "compare": _compare, "train": _one_run, "audit": _one_run}


def variables(texts: Sequence[str], environment: dict[str, str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for the value that it has here."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {name}: give NAME=VALUE, or NAME to copy it from here")
        if not equals and name not in environment:
            raise UserError(f"--env {name}: it is not set here; give NAME=VALUE")
        found[name] = value if equals else environment[name]
    return found


def check_place(what: str, place: str | None) -> None:
    """Results of a job must be where they outlive it."""
    if place and ("://" in place or Path(place).is_absolute()):
        return
    shown = f"{what} is {place!r}" if place else f"{what} is missing"
    raise UserError(
        f"{shown}; a job's own folder goes with it: give {what} an absolute path or a URI that "
        "every node sees, such as /shared/runs or s3://bucket/runs"
    )
