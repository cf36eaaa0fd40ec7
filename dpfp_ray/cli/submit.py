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
import sys
from typing import TYPE_CHECKING

from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.sweeps.submit import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="http://HEAD:8265",
        help="the cluster's dashboard (default: $RAY_API_SERVER_ADDRESS or http://127.0.0.1:8265)",
    )
    parser.add_argument("--name", help="what the Jobs page calls it")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for the job, which the dashboard may show; may be repeated",
    )
    parser.add_argument(
        "--working-dir", metavar="DIR", help="a folder to send along, in place of single files"
    )
    parser.add_argument("--token-file", metavar="FILE", help="holds the cluster's token")
    parser.add_argument("--no-follow", action="store_true", help="submit and return")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--attach", metavar="ID", help="follow a job that was submitted before")
    which.add_argument("--stop", metavar="ID", help="end a job; what it has finished is kept")
    parser.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="-- VERB …", help="the command to run"
    )


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray.cli.job_command import describe, variables

    words = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    known = arguments.attach or arguments.stop
    if known and words:
        raise UserError("--attach and --stop take no command; drop what follows --")
    described = None if known else describe(words)
    env = variables(arguments.env, dict(os.environ))

    from dpfp_ray import find_job, submit
    from dpfp_ray.system.terminal import stderr

    where = {"address": arguments.address, "token_file": arguments.token_file}
    if described is None:
        job = find_job(known, **where)
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
