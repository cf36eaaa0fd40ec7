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
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfp_ray.plan.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.sweeps.jobs import Cluster

DEFAULT = "http://127.0.0.1:8265"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="http://HEAD:8265",
        help=f"the cluster's dashboard (default: $RAY_API_SERVER_ADDRESS or {DEFAULT})",
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
    from dpfp_ray.sweeps import access_tokens

    address = arguments.address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT
    words = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    known = arguments.attach or arguments.stop
    if known and words:
        raise UserError("--attach and --stop take no command; drop what follows --")
    described = None if known else describe(words)
    env = variables(arguments.env, dict(os.environ))

    from dpfp_ray.data.terminal import stderr
    from dpfp_ray.sweeps.jobs import Cluster

    def say(line: str) -> None:
        stderr.print(line, markup=False)

    token = access_tokens.ray_token(access_tokens.check_http(address), arguments.token_file)
    cluster = Cluster(address, token, say)
    if arguments.stop:
        stopped = cluster.stop(arguments.stop)
        say(f"{arguments.stop} {'is being stopped' if stopped else 'has ended already'}")
        return 0
    if arguments.attach:
        cluster.info(arguments.attach)
        return follow(cluster, arguments.attach, arguments)
    assert described is not None
    identity = send(cluster, words, described, env, arguments, say)
    if arguments.no_follow:
        print(identity)
        say(how_to("follow it", "--attach", identity, arguments))
        return 0
    return follow(cluster, identity, arguments)


def send(
    cluster: "Cluster",
    words: list[str],
    described: Any,
    env: dict[str, str],
    arguments: argparse.Namespace,
    say: Any,
) -> str:
    from dpfp_ray.cli.job_command import entrypoint, submission_id
    from dpfp_ray.sweeps.jobs import stage

    name = arguments.name or described.name
    identity = submission_id(name)
    runtime_env: dict[str, Any] = {"env_vars": env} if env else {}
    with tempfile.TemporaryDirectory(prefix="dpfp-job-") as scratch:
        if arguments.working_dir:
            if not Path(arguments.working_dir).is_dir():
                raise UserError(f"working-dir {arguments.working_dir} is no folder")
            runtime_env["working_dir"] = str(Path(arguments.working_dir).resolve())
        else:
            words, sent = stage(words, described.paths, Path(scratch))
            if sent:
                runtime_env["working_dir"] = scratch
                say(f"sent along: {', '.join(sent)}")
        metadata = {**described.metadata, "job_name": name}
        cluster.submit(identity, entrypoint(words), metadata, runtime_env)
    say(f"job {identity} is submitted; see {cluster.address}/#/jobs/{identity}")
    return identity


def follow(cluster: "Cluster", identity: str, arguments: argparse.Namespace) -> int:
    from dpfp_ray.data.terminal import KEPT, stderr
    from dpfp_ray.sweeps.jobs import exit_code

    def write(text: str) -> None:
        sys.stdout.write(text.replace(KEPT, " "))
        sys.stdout.flush()

    try:
        info = cluster.follow(identity, write)
    except (KeyboardInterrupt, UserError) as error:
        stderr.print(f"job {identity} goes on without us", markup=False)
        for what, flag in (("follow it", "--attach"), ("stop it", "--stop")):
            stderr.print(how_to(what, flag, identity, arguments), markup=False)
        if isinstance(error, UserError):
            raise
        return 130
    code = exit_code(info)
    stderr.print(f"job {identity} {info.status.value.lower()}", markup=False)
    if code == 127:
        stderr.print(
            "the cluster's head has no dpfp on its PATH; install dpfp-ray there, in the "
            "environment that Ray was started from",
            markup=False,
        )
    elif code and info.message:
        stderr.print(" ".join(info.message.split())[:500], markup=False)
    return code


def how_to(what: str, flag: str, identity: str, arguments: argparse.Namespace) -> str:
    where = f" --address {arguments.address}" if arguments.address else ""
    return f"{what}: dpfp submit{where} {flag} {identity}"
