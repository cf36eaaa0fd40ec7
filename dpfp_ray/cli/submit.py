"""Run a `dpfp` command on a Ray cluster as a job, and follow its log.

Examples:

  dpfp submit --address http://head:8265 -- sweep my_space.yaml --storage /shared/runs/mine
  dpfp submit --address http://head:8265 --name night --no-follow -- compare --task sst2 \\
      --methods dpfp,dpsgd --epsilon 3,8 --output s3://bucket/compare
  dpfp submit --address http://head:8265 --attach sweep-mine-20260101-120000-1a2b
  dpfp submit --address http://head:8265 --stop sweep-mine-20260101-120000-1a2b

dpfp-ray must be installed on the cluster, on the PATH of its head. Files that the command names by
a relative path are sent along; absolute paths and URIs mean what the cluster sees. The Jobs page of
the Ray dashboard shows the job with its task, methods, ε, log and, at its end, the table.

A lost connection is made anew and the log goes on where it was. Ctrl-C leaves the job running and
says how to come back. The exit code is the job's.

A cluster with token authentication wants its token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH,
~/.ray/auth_token with RAY_AUTH_MODE=token, or --token-file.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpfp_ray.cli.options import adder, plan_values
from dpfp_ray.plan.values import make_plan, usual_methods
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.sweeps.submit import Job


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
        raise UserError("no command; give one after --, such as: -- sweep demo")
    if command[0] == "submit":
        raise UserError("submit cannot be a job; submit sweep, compare, train or audit")
    arguments = build_parser().parse_args(list(command))
    for name in ("storage", "output"):
        if hasattr(arguments, name) and not getattr(arguments, "stop", False):
            check_place(f"--{name}", getattr(arguments, name))
    verb, plans, facts = command[0], [], {"verb": command[0]}
    if verb == "sweep":
        from dpfp_ray import read_search_space
        from dpfp_ray.cli.options import split_change

        changes = dict(split_change(text) for text in arguments.changes)
        if arguments.samples is not None:
            changes["samples"] = arguments.samples
        space = read_search_space(arguments.space, changes)
        plans, facts["sweep"] = space.some_plans(), space.name
    elif verb in ("train", "audit"):
        plans = [make_plan(plan_values(arguments))]
    facts |= {
        "task": _joined(plan.task for plan in plans),
        "methods": _joined(plan.method for plan in plans),
        "epsilon": _joined(f"{plan.epsilon:g}" for plan in plans if plan.epsilon is not None),
    }
    if verb == "compare":
        from dpfp_ray.cli.compare import parse_budgets, parse_methods

        values = plan_values(arguments)
        budgets = parse_budgets(arguments.budgets, values.pop("epsilon", None))
        with suppress(UserError):  # some methods may have no such plan; the comparison says so
            plans = [make_plan(values)]
        facts["sweep"] = Path(arguments.output).name
        facts["task"] = _joined(plan.task for plan in plans)
        facts["methods"] = ",".join(parse_methods(arguments.methods) or usual_methods())
        facts["epsilon"] = ",".join(f"{budget:g}" for budget in budgets)
    about = facts.get("sweep") if verb == "sweep" else facts["task"] or facts.get("sweep")
    files = [str(name) for plan in plans[:1] for name in (plan.train_file, plan.dev_file) if name]
    given_facts = {key: value for key, value in facts.items() if value}
    return Description(f"{verb} {about or ''}".strip(), given_facts, tuple(files))


def _joined(values: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(values))


def variables(texts: Sequence[str], environment: dict[str, str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for the value that it has here."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {name}: give NAME=VALUE, or NAME to copy it from here")
        if not equals and name not in environment:
            raise UserError(f"--env {name}: it is not set here; give NAME=VALUE")
        values[name] = value if equals else environment[name]
    return values


def check_place(what: str, place: str | None) -> None:
    """Results of a job must be where they outlive it."""
    if place and ("://" in place or Path(place).is_absolute()):
        return
    problem = f"{what} is {place!r}" if place else f"{what} is missing"
    raise UserError(
        f"{problem}; a job's own folder goes with it: give {what} an absolute path or a URI that "
        "every node sees, such as /shared/runs or s3://bucket/runs"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add(
        "--address http://HEAD:8265",
        "the cluster's dashboard (default: $RAY_API_SERVER_ADDRESS or http://127.0.0.1:8265)",
    )
    add("--name", "what the Jobs page calls it", default=None)
    text = "a variable for the job, which the dashboard may show; may be repeated"
    add("--env NAME[=VALUE]", text, action="append", default=[])
    add("--working-dir DIR", "a folder to send along, in place of single files")
    add("--token-file FILE", "holds the cluster's token")
    add("--no-follow", "submit and return")
    which = adder(parser.add_mutually_exclusive_group())
    which("--attach ID", "follow a job that was submitted before")
    which("--stop ID", "end a job; what it has finished is kept")
    add("job -- VERB …", "the command to run", nargs=argparse.REMAINDER)


def command(arguments: argparse.Namespace) -> int:
    words = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    earlier = arguments.attach or arguments.stop
    if earlier and words:
        raise UserError("--attach and --stop take no command; drop what follows --")
    described = None if earlier else describe(words)
    env = variables(arguments.env, dict(os.environ))

    from dpfp_ray import find_job, submit
    from dpfp_ray.system.terminal import stderr

    where = {"address": arguments.address, "token_file": arguments.token_file}
    if described is None:
        job = find_job(earlier, **where)
        if arguments.stop:
            said = "is being stopped" if job.stop() else "has ended already"
            stderr.print(f"{job.id} {said}", markup=False)
            return 0
        return follow(job, arguments)
    job = submit(
        words,
        name=arguments.name or described.name,
        facts=described.facts,
        files=described.files,
        env=env,
        working_dir=arguments.working_dir,
        **where,
    )
    if arguments.no_follow:
        print(job.id)
        stderr.print(how_to("follow it", "--attach", job, arguments), markup=False)
        return 0
    return follow(job, arguments)


def follow(job: "Job", arguments: argparse.Namespace) -> int:
    from dpfp_ray.system.terminal import KEPT, stderr

    def write(text: str) -> None:
        sys.stdout.write(text.replace(KEPT, " "))
        sys.stdout.flush()

    try:
        ended = job.follow(write)
    except (KeyboardInterrupt, UserError) as error:
        stderr.print(f"job {job.id} goes on without us", markup=False)
        for what, flag in (("follow it", "--attach"), ("stop it", "--stop")):
            stderr.print(how_to(what, flag, job, arguments), markup=False)
        if isinstance(error, UserError):
            raise
        return 130
    stderr.print(f"job {job.id} {ended.status}", markup=False)
    if ended.exit_code == 127:
        stderr.print(
            "the cluster's head has no dpfp on its PATH; install dpfp-ray there, in the "
            "environment that Ray was started from",
            markup=False,
        )
    elif ended.exit_code and ended.message:
        stderr.print(ended.message[:500], markup=False)
    return ended.exit_code


def how_to(what: str, flag: str, job: "Job", arguments: argparse.Namespace) -> str:
    where = f" --address {arguments.address}" if arguments.address else ""
    return f"{what}: dpfp submit{where} {flag} {job.id}"
