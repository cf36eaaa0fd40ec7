"""A `dpfp` command as a Ray job: `submit(["sweep", "mine.yaml", "--storage", "/shared/runs"])`.

With a job go the local files that its command names, and nothing else. A relative path means a file
here: it is sent along. An absolute path or a URI means what the cluster sees, and is left alone.
"""

import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from dpfp_ray.data.streams import files_of
from dpfp_ray.data.terminal import stderr
from dpfp_ray.plan.errors import UserError
from dpfp_ray.sweeps import access_tokens
from dpfp_ray.sweeps.jobs import Cluster, exit_code

DEFAULT = "http://127.0.0.1:8265"
LARGEST = 100 * 2**20  # bytes in all; Ray keeps them in its head's memory
OUTSIDE = "outside"  # for files above the present folder


@dataclass(frozen=True)
class Ended:
    """How a job ended: `status` in Ray's words, and the exit code of its command."""

    status: str
    exit_code: int
    message: str


@dataclass(frozen=True)
class Job:
    """A job on a cluster, where it runs whether or not anyone listens."""

    id: str
    cluster: Cluster

    @property
    def status(self) -> str:
        return str(self.cluster.info(self.id).status.value).lower()

    def follow(self, write: Callable[[str], None]) -> Ended:
        """Give its log to `write`, to the end; a lost connection is made anew."""
        info = self.cluster.follow(self.id, write)
        message = " ".join((info.message or "").split())
        return Ended(info.status.value.lower(), exit_code(info), message)

    def stop(self) -> bool:
        """End it; what it has finished is kept. False if it has ended already."""
        return self.cluster.stop(self.id)


def find_job(identity: str, *, address: str | None = None, token_file: str | None = None) -> Job:
    """A job that was submitted before; `address` and `token_file` as in `submit`."""
    cluster = _cluster(address, token_file)
    cluster.info(identity)  # refuses what the cluster does not know
    return Job(identity, cluster)


def submit(
    command: Sequence[str],
    *,
    address: str | None = None,
    name: str | None = None,
    facts: Mapping[str, str] | None = None,
    files: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    working_dir: str | Path | None = None,
    token_file: str | None = None,
) -> Job:
    """Start a `dpfp` command on a Ray cluster.

    command      its words, such as ["train", "--plan", "mine.yaml", "--output", "/shared/one"]
    address      the cluster's dashboard (default: $RAY_API_SERVER_ADDRESS, else this machine's)
    name         what the Jobs page calls it (default: the command's first word)
    facts        what the Jobs page says about it
    files        relative paths or patterns of files to send along, beside those in `command`
    env          variables of the job, which the dashboard may show
    working_dir  a folder to send along, in place of single files
    token_file   holds the cluster's token
    """
    cluster = _cluster(address, token_file)
    name = name or " ".join(command[:1])
    identity = submission_id(name)
    words = list(command)
    runtime_env: dict[str, Any] = {"env_vars": dict(env)} if env else {}
    with tempfile.TemporaryDirectory(prefix="dpfp-job-") as scratch:
        if working_dir:
            if not Path(working_dir).is_dir():
                raise UserError(f"working-dir {working_dir} is no folder")
            runtime_env["working_dir"] = str(Path(working_dir).resolve())
        else:
            more = [str(path) for pattern in files for path in files_of(pattern)]
            words, sent = stage(words, more, Path(scratch))
            if sent:
                runtime_env["working_dir"] = scratch
                _say(f"sent along: {', '.join(sent)}")
        metadata = {**(facts or {}), "job_name": name}
        cluster.submit(identity, entrypoint(words), metadata, runtime_env)
    _say(f"job {identity} is submitted; see {cluster.address}/#/jobs/{identity}")
    return Job(identity, cluster)


def _cluster(address: str | None, token_file: str | None) -> Cluster:
    where = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT
    token = access_tokens.ray_token(access_tokens.check_http(where), token_file)
    return Cluster(where, token, _say)


def _say(line: str) -> None:
    stderr.print(line, markup=False)


def entrypoint(command: Sequence[str]) -> str:
    """Ray runs it in a shell, so every word is quoted."""
    return shlex.join(["dpfp", *command])


def submission_id(name: str) -> str:
    """Readable, unique, and safe in a URL and in a file's name."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50] or "job"
    return f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:4]}"


def named_files(words: Iterable[str]) -> dict[str, Path]:
    """Words that are relative paths of files here, and those files."""
    found = {}
    for word in words:
        if not word or word.startswith("-") or "://" in word or Path(word).is_absolute():
            continue
        path = Path(word)
        try:
            if path.is_file():
                found[word] = path
            elif path.is_dir() and "/" in word.rstrip("/"):
                raise UserError(
                    f"{word} is a folder here; give its absolute path on storage that the cluster "
                    "sees, or send a folder along with --working-dir"
                )
        except (OSError, ValueError):  # a condition or a text, far too long for a path
            continue
    return found


def words_of(command: Sequence[str]) -> list[str]:
    """The words of a command that may be paths; of `--flag=value` the value."""
    return [
        word.partition("=")[2] if word.startswith("--") and "=" in word else word
        for word in command
    ]


def stage(command: Sequence[str], more: Iterable[str], folder: Path) -> tuple[list[str], list[str]]:
    """Copy what `command` and the plan's own paths `more` name to `folder`.

    The command with the paths as they will be on the cluster, and what was copied.
    """
    files = named_files([*words_of(command), *more])
    total = sum(path.stat().st_size for path in files.values())
    if total > LARGEST:
        raise UserError(
            f"{', '.join(files)}: {total / 2**20:,.0f} MiB are too much to send with a job; put "
            "them on storage that the cluster sees and give their absolute paths"
        )
    renamed = {}
    here = Path.cwd().resolve()
    for number, (word, path) in enumerate(files.items()):
        real = Path(word).absolute()
        inside = ".." not in Path(word).parts and real.is_relative_to(here)
        target = Path(word) if inside else Path(OUTSIDE) / f"{number}-{path.name}"
        if not inside and word not in words_of(command):
            raise UserError(f"{word} is outside this folder; give its absolute path on the cluster")
        renamed[word] = str(target)
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / target)
    return [_rename(word, renamed) for word in command], list(files)


def _rename(word: str, renamed: dict[str, str]) -> str:
    flag, equals, value = word.partition("=")
    if word.startswith("--") and equals:
        return f"{flag}={renamed.get(value, value)}"
    return renamed.get(word, word)
