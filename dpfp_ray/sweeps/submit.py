"""A `dpfp` command as a Ray job: `submit(["sweep", "mine.yaml", "--storage", "/shared/runs"])`.

With a job go the local files that its command names, and nothing else. A relative path means a file
here: it is sent along. An absolute path or a URI means what the cluster sees, and is left alone.

A job runs on the cluster whether or not anyone listens. Requests are repeated while the cluster
cannot be reached. The log is read again and again, and what is new in it is shown.

Tokens, of Ray and of the results service, are read from a file or the environment, never a flag: it
would show them to everyone who can list processes.
"""

import logging
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from uuid import uuid4

from dpfp_ray.data.readers import files_of
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import one_line, public
from dpfp_ray.system.terminal import stderr

DEFAULT = "http://127.0.0.1:8265"
SERVICE = "dpfp-results"  # the application that `dpfp serve` starts on Ray Serve
SERVE_DETAILS = "/api/serve/applications/"
PAGE_FACT = "results_page"  # of a job's metadata
LARGEST = 100 * 2**20  # bytes in all; Ray keeps them in its head's memory
OUTSIDE = "outside"  # for files above the present folder
TIMEOUT = 30.0  # seconds for one answer
LOOK_SECONDS = 1.0  # between two looks at a job's log
PATIENCE = 15 * 60.0  # seconds without a connection after which following ends; the job goes on
PATIENCE_TO_ACT = 60.0  # the same for submitting and stopping, where somebody waits
LONGEST_PAUSE = 30.0
OVERRIDES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
NOISY_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
EXIT_CODES = {"SUCCEEDED": 0, "STOPPED": 130}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
VARIABLE = "DPFP_TOKEN"
SHORTEST, LONGEST = 16, 4096  # characters of a token; fewer can be guessed
RAY_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # what every client asks first
PROBE_SECONDS = 10.0


class Unreachable(Exception):
    """Worth another try later."""


class Cluster:
    """The Jobs API of one cluster."""

    def __init__(
        self, address: str, token: str | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        """`say` is told about lost connections (default: on stderr)."""
        self.address = check_http(address)
        self.say = say or _say
        headers = header(token) if token else None
        try:
            with translated(self.address):
                self.client = make_client(self.address, headers)
        except Unreachable as error:
            raise UserError(f"cannot reach a Ray dashboard at {self.address}: {error}") from None

    def submit(self, identity: str, entrypoint: str, **options: Any) -> None:
        """Start a job under an id of ours: if the answer is lost, we still know whether it runs."""

        def once() -> None:
            try:
                self.client.submit_job(entrypoint=entrypoint, submission_id=identity, **options)
            except RuntimeError as error:
                if "already exists" not in str(error):
                    raise

        self.retry(once, patience=PATIENCE_TO_ACT)

    def info(self, identity: str) -> Any:
        return self.retry(lambda: self.client.get_job_info(identity))

    def results_page(self, sweep: str | None = None) -> str | None:
        """Where `dpfp serve` shows a sweep on this cluster; None if it does not run there."""
        with suppress(UserError, Unreachable, ValueError), translated(self.address):
            answer = self.client._do_request("GET", SERVE_DETAILS)
            return page_of(service_url(answer.json(), host_of(self.address)), sweep)
        return None

    def follow(self, identity: str, write: Callable[[str], None]) -> Any:
        """Show the log to its end; the job's last state."""
        length = 0
        while True:
            info = self.info(identity)  # before the log, which then has the job's last words
            log = self.retry(lambda: self.client.get_job_logs(identity))
            if len(log) > length:
                write(log[length:])
                length = len(log)
            if info.status.is_terminal():
                return info
            time.sleep(LOOK_SECONDS)

    def retry(self, act: Callable[[], Any], patience: float = PATIENCE) -> Any:
        """The answer of `act`, tried again with growing pauses while the cluster is unreachable."""
        pause, lost_at = 1.0, None
        while True:
            try:
                with translated(self.address):
                    answer = act()
            except Unreachable as error:
                now = time.monotonic()
                if lost_at is None:
                    lost_at = now
                    self.say(f"connection to {self.address} lost ({error}); trying again …")
                if now - lost_at + pause > patience:
                    raise UserError(f"{self.address} cannot be reached: {error}") from None
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if lost_at is not None:
                self.say("connected again")
            return answer


def make_client(address: str, headers: dict[str, str] | None) -> Any:
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            """Ray itself would wait for an answer without end."""
            return super()._do_request(method, endpoint, **{"timeout": TIMEOUT, **options})

    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # Ray prefers these to the address that it is given.
    kept = {name: os.environ.pop(name) for name in OVERRIDES if name in os.environ}
    try:
        return Client(address, headers=headers)
    finally:
        os.environ.update(kept)


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Ray's many errors as two: Unreachable is worth another try, UserError is not."""
    import requests
    from ray.exceptions import AuthenticationError

    def text(error: Exception) -> str:
        return one_line(error) or type(error).__name__

    try:
        yield
    except AuthenticationError as error:
        wrong = "is not the right one" if "failed" in str(error) else "is needed"
        raise UserError(
            f"a token {wrong} for Ray at {address}; give --token-file, or set RAY_AUTH_TOKEN"
        ) from None
    except (requests.exceptions.InvalidURL, requests.exceptions.SSLError) as error:
        raise UserError(f"cannot use {address}: {text(error)}") from None
    except (requests.RequestException, OSError) as error:
        raise Unreachable(text(error)) from None
    except RuntimeError as error:
        if "status code 404" in text(error):
            raise UserError(f"{address}: {text(error).partition('404: ')[2] or error}") from None
        if "status code 5" in text(error):
            raise Unreachable(text(error)) from None
        raise UserError(f"Ray at {address} refuses: {text(error)}") from None


def exit_code(info: Any) -> int:
    """0 if it succeeded, else what the job's own command ended with."""
    status = str(getattr(info.status, "value", info.status))
    return EXIT_CODES.get(status, info.driver_exit_code or 1)


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
        cluster = self.cluster
        return bool(cluster.retry(lambda: cluster.client.stop_job(self.id), PATIENCE_TO_ACT))


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
        if page := cluster.results_page(metadata.get("sweep")):  # Ray takes none later
            metadata[PAGE_FACT] = page
        cluster.submit(identity, entrypoint(words), metadata=metadata, runtime_env=runtime_env)
    _say(f"job {identity} is submitted; see {cluster.address}/#/jobs/{identity}")
    if page:
        _say(f"results page: {page}")
    return Job(identity, cluster)


def _cluster(address: str | None, token_file: str | None) -> Cluster:
    where = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT
    token = ray_token(check_http(where), token_file)
    return Cluster(where, token)


def _say(line: str) -> None:
    stderr.print(line, markup=False)


def entrypoint(command: Sequence[str]) -> str:
    """Ray runs it in a shell, so every word is quoted."""
    return shlex.join(["dpfp", *command])


def submission_id(name: str) -> str:
    """Readable, unique, and safe in a URL and in a file's name."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50] or "job"
    return f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:4]}"


def stage(command: Sequence[str], more: Iterable[str], folder: Path) -> tuple[list[str], list[str]]:
    """Copy what `command` and the plan's own paths `more` name to `folder`.

    The command with the paths as they will be on the cluster, and what was copied.
    """
    # The words that may be paths; of `--flag=value` the value.
    split = [w.partition("=") if w.startswith("--") else ("", "", w) for w in command]
    values = [value if equals or not flag else flag for flag, equals, value in split]
    files = named_files([*values, *more])
    total = sum(path.stat().st_size for path in files.values())
    if total > LARGEST:
        raise UserError(
            f"{', '.join(files)}: {total / 2**20:,.0f} MiB are too much to send with a job; put "
            "them on storage that the cluster sees and give their absolute paths"
        )
    renamed = {}
    here = Path.cwd().resolve()
    for number, (word, path) in enumerate(files.items()):
        inside = ".." not in path.parts and path.absolute().is_relative_to(here)
        target = path if inside else Path(OUTSIDE) / f"{number}-{path.name}"
        if not inside and word not in values:
            raise UserError(f"{word} is outside this folder; give its absolute path on the cluster")
        renamed[word] = str(target)
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / target)
    words = [
        f"{flag}={renamed.get(value, value)}" if equals else renamed.get(word, word)
        for word, (flag, equals, value) in zip(command, split, strict=True)
    ]
    return words, list(files)


def named_files(words: Iterable[str]) -> dict[str, Path]:
    """Words that are relative paths of files here, and those files."""
    files = {}
    for word in words:
        if not word or word.startswith("-") or "://" in word or Path(word).is_absolute():
            continue
        path = Path(word)
        try:
            if path.is_file():
                files[word] = path
            elif path.is_dir() and "/" in word.rstrip("/"):
                raise UserError(
                    f"{word} is a folder here; give its absolute path on storage that the cluster "
                    "sees, or send a folder along with --working-dir"
                )
        except (OSError, ValueError):  # a condition or a text, far too long for a path
            continue
    return files


# --- tokens -------------------------------------------------------------------------------------


def read_token(file: str | None) -> str | None:
    """The token of `file`, else of $DPFP_TOKEN, else None."""
    if file is None:
        token, origin = os.environ.get(VARIABLE, "").strip(), f"${VARIABLE}"
        if not token:
            return None
    else:
        origin = file
        try:
            token = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UserError(f"cannot read the token file {file}: {reason}") from None
    if not SHORTEST <= len(token) <= LONGEST:
        raise UserError(
            f"the token in {origin} has {len(token)} characters; use {SHORTEST} or more, such as "
            "the output of: openssl rand -hex 32"
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError(f"the token in {origin} holds spaces or odd characters; use letters, 0-9")
    return token


def header(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def ray_token(address: str, file: str | None) -> str | None:
    """The token of a Ray cluster itself, for its dashboard and Jobs API; found as Ray finds it.

    It lets its holder run code on the cluster, so the one in the home folder goes to other machines
    only if RAY_AUTH_MODE=token says that it is meant to.
    """
    if file is not None:
        return read_token(file)
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if mode == "disabled":
        return None
    given = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if given:
        return given
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return read_token(path)
    home = Path.home() / ".ray" / "auth_token"
    if (mode == "token" or host_of(address) in LOOPBACK) and home.is_file():
        return read_token(str(home))
    return None


def refused(address: str, token: str | None = None) -> bool:
    """Whether the Ray at HOST:PORT, its control service, answers nobody without another token."""
    import grpc

    sent = tuple((key.lower(), value) for key, value in header(token).items()) if token else None
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(RAY_QUESTION)(b"", timeout=PROBE_SECONDS, metadata=sent)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def advice(address: str, *, given: bool) -> str:
    wrong = "is not the right one" if given else "is needed"
    return (
        f"a token {wrong} for Ray at {address}: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or "
        f"RAY_AUTH_TOKEN_PATH) to the cluster's; on its head, `ray get-auth-token` prints it"
    )


def service_url(details: Mapping[str, Any], head: str) -> str | None:
    """Where the results service listens, by what Ray Serve says of itself; None if it does not run.

    `head` is the name by which the head is known to whoever will open it.
    """
    application = (details.get("applications") or {}).get(SERVICE)
    if not application or application.get("status") != "RUNNING":
        return None
    options = details.get("http_options") or {}
    host, port = str(options.get("host") or "127.0.0.1"), options.get("port", 8000)
    host = head if host in ("0.0.0.0", "::") else host
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}{(application.get('route_prefix') or '/').rstrip('/')}"


def page_of(service: str | None, sweep: str | None) -> str | None:
    """The page of one sweep, or of all that the service shows."""
    if service is None:
        return None
    question = f"?{urlencode({'where': f'sweep == {sweep!r}'})}" if sweep else ""
    return f"{service}/{question}"


def host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def check_http(address: str) -> str:
    """`http://host:port`, checked: a web address without a password in it."""
    public_address = public(address)[:100]
    if not address.startswith(("http://", "https://")) or not host_of(address):
        raise UserError(f"address is {public_address!r}; give one such as http://head:8265")
    if "@" in urlsplit(address).netloc:
        raise UserError(f"{public_address} holds a password, which others would see; use a token")
    return address.rstrip("/")
