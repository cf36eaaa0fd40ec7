"""A `dpfp` command as a Ray job: checked here, named for people, described for the dashboard."""

import argparse
import itertools
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from dpfp_ray.data.streams import files_of
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.sweeps.jobs import check_place

NOT_JOBS = ("submit",)
LOOKED_AT = 200  # trials of a sweep, to say which methods it has


@dataclass(frozen=True)
class Description:
    """What the Jobs page says about a job; `paths` are files that its plan names."""

    name: str
    metadata: dict[str, str]
    paths: tuple[str, ...] = ()


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
    paths = tuple(facts.pop("paths", ()))
    named = ("sweep", "task") if facts["verb"] == "sweep" else ("task", "sweep")
    words = [facts["verb"], next((facts[key] for key in named if facts.get(key)), "")]
    name = " ".join(str(word) for word in words if word)
    shown = {key: str(value) for key, value in facts.items() if value not in (None, "")}
    return Description(name, shown, paths)


def _sweep(arguments: argparse.Namespace) -> dict[str, Any]:
    from dpfp_ray.cli.options import split_change
    from dpfp_ray.sweeps.space_files import read_search_space

    changes = dict(split_change(text) for text in arguments.changes)
    if arguments.samples is not None:
        changes["samples"] = arguments.samples
    space = read_search_space(arguments.space, changes)
    chosen = itertools.islice(space.choices(np.random.default_rng(0)), LOOKED_AT)
    plans = [plan for one in chosen if (plan := _plan(space.plan_values(one)))]
    return {
        "sweep": space.name,
        "task": _joined(plan.task for plan in plans),
        "methods": _joined(plan.method for plan in plans),
        "epsilon": _joined(f"{plan.epsilon:g}" for plan in plans if plan.epsilon is not None),
        "paths": [path for plan in plans[:1] for path in _paths(plan)],
    }


def _plan(values: dict[str, Any]) -> Plan | None:
    """A space may have corners that are no plans; the sweep refuses those trials."""
    try:
        return make_plan(values)
    except UserError:
        return None


def _joined(values: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(values))


def _paths(plan: Plan) -> list[str]:
    named = (str(name) for name in (plan.train_file, plan.dev_file) if name)
    return [str(path) for name in named for path in files_of(name)]


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    from dpfp_ray.cli.compare import parse_budgets, parse_methods
    from dpfp_ray.cli.options import plan_values

    plan = _plan(plan_values(arguments))
    budgets = parse_budgets(arguments.budgets)
    return {
        "sweep": Path(arguments.output).name,
        "task": plan.task if plan else "",
        "methods": ",".join(parse_methods(arguments.methods)),
        "epsilon": ",".join(f"{budget:g}" for budget in budgets),
        "paths": _paths(plan) if plan else [],
    }


def _one_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from dpfp_ray.cli.options import plan_from

    plan = plan_from(arguments)
    return {
        "task": plan.task,
        "methods": plan.method,
        "epsilon": plan.epsilon,
        "paths": _paths(plan),
    }


def _nothing(arguments: argparse.Namespace) -> dict[str, Any]:
    return {}


_FACTS = {"sweep": _sweep, "compare": _compare, "train": _one_run, "audit": _one_run}


def entrypoint(command: Sequence[str]) -> str:
    """Ray runs it in a shell, so every word is quoted."""
    return shlex.join(["dpfp", *command])


def submission_id(name: str) -> str:
    """Readable, unique, and safe in a URL and in a file's name."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50] or "job"
    return f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:4]}"


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
