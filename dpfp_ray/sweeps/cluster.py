"""Connecting to Ray on this machine or a cluster, and what each trial gets of its nodes."""

import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfp_ray.sweeps.submit import (
    PAGE_FACT,
    advice,
    page_of,
    ray_token,
    refused,
    service_url,
)
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.signals import Interrupted, handling
from dpfp_ray.system.storage import one_line, public
from dpfp_ray.system.terminal import JOB
from dpfp_ray.training.run_folder import save_seconds


@dataclass(frozen=True)
class RayOptions:
    """Where trials run and with how much.

    address     local starts Ray here (default), auto joins this machine's cluster (default inside a
                Ray job), or ray://HOST:PORT
    seed        fixes the secret seed, for tests only
    tracker     mlflow, wandb or tensorboard
    save_every  seconds between two saves of a trial (default: 30)
    """

    address: str = ""
    workers: int = 1
    cpus_per_worker: int | None = None
    gpus_per_worker: float | None = None
    concurrency: int | None = None
    seed: int | None = None
    tracker: str | None = None
    show_training_loss: bool = False
    save_every: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.address or default_address())
        object.__setattr__(self, "save_every", save_seconds(self.save_every))


def ray_options(keywords: Mapping[str, Any]) -> RayOptions:
    valid = tuple(RayOptions.__dataclass_fields__)
    for name in keywords:
        if name not in valid:
            raise UserError(unknown("keyword", name, valid))
    return RayOptions(**keywords)


@dataclass(frozen=True)
class Resources:
    """What one worker gets, and how many trials run side by side, on the nodes that there are."""

    cpus_per_worker: int
    gpus_per_worker: float
    workers: int
    slots: int  # trials at a time, at most


def plan_resources(
    nodes: list[dict[str, Any]],
    workers: int = 1,
    cpus: int | None = None,
    gpus: float | None = None,
    concurrency: int | None = None,
    *,
    may_grow: bool = False,
) -> Resources:
    """Fill the nodes without oversubscribing them; a worker does not span nodes.

    Where the cluster `may_grow`, `concurrency` trials are asked for whatever there is now: those
    that do not fit wait, and what waits is what an autoscaler brings machines for.

    By default a worker has one thread, which gives the most trials an hour (threads wait for each
    other); cores that would otherwise be idle are given to the workers. Where there are GPUs, a
    worker has one.

    >>> plan_resources([{"CPU": 8}])
    Resources(cpus_per_worker=1, gpus_per_worker=0.0, workers=1, slots=8)
    >>> plan_resources([{"CPU": 8}], concurrency=2).cpus_per_worker
    4
    """

    if gpus is None:
        gpus = float(any(node.get("GPU", 0) >= 1 for node in nodes))
    check_gpus(gpus, workers)

    def places(cpus: int) -> int:
        """How many such workers fit."""
        count = 0
        for node in nodes:
            fit = int(node.get("CPU", 0) // cpus)
            count += min(fit, shares_of(node.get("GPU", 0), gpus)) if gpus else fit
        return count

    wanted = workers * (concurrency or 1)
    if cpus is None:
        cpus = 1
        if gpus and not concurrency:
            wanted = max(workers, places(1))
        if gpus or concurrency or workers > 1:
            while places(cpus + 1) >= wanted:
                cpus += 1
    asked = concurrency if may_grow else None
    if places(cpus) < workers and asked is None:

        def named(cpus: float, count: float) -> str:
            return f"{cpus:g} CPUs" + (f" and {count:g} GPUs" if gpus else "")

        have = ", ".join(named(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes)
        need = named(cpus, gpus)
        raise UserError(
            f"{workers} workers of {need} each do not fit the cluster ({have}); use fewer "
            f"--workers, --cpus-per-worker{' or --gpus-per-worker' if gpus else ''}"
        )
    slots = places(cpus) // workers
    return Resources(cpus, gpus, workers, asked or min(concurrency or slots, slots))


def living_nodes() -> list[dict[str, Any]]:
    """What each node of the connected cluster has, for `plan_resources`."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def check_gpus(gpus: float, workers: int) -> None:
    """What Ray or NCCL would refuse, one with a traceback, the other in the middle of a trial."""
    if not 0 <= gpus < math.inf or (gpus > 1 and gpus != int(gpus)):
        raise UserError(f"gpus_per_worker is {gpus:g}; give a whole number, or a part of one GPU")
    if 0 < gpus < 1 < workers:
        raise UserError(
            f"gpus_per_worker is {gpus:g} for {workers} workers a trial, but NCCL wants a GPU for "
            "each of them; use 1, or --workers 1"
        )


def shares_of(count: float, gpus: float) -> int:
    """How many times `gpus` fits: a share of a GPU lies on one GPU."""
    return int(count) * int(1 / gpus + 1e-9) if gpus < 1 else int(count // gpus)


# Must be set before Ray is imported; for this process and every worker.
SETTINGS = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in plans mean the user's folder
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial reports no accuracy
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # our records replace its CSV, JSON and TensorBoard
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends us at once; Tune has nothing to save
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # `trial.py` keeps what a sweep needs
    "TUNE_WARN_SLOW_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "1000000000",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # at 0.1 asking takes 5% of a small machine
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # our table replaces Tune's
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # and says in a line what Tune says in a traceback
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # trials keep every core busy
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # trials raise it to their own share of the cores
}
NOISY_LOGGERS = ("ray.tune", "ray.train", "ray.air", "ray._private.worker", "ray.data", "ray.serve")


@contextmanager
def settings(**more: str) -> Iterator[None]:
    """Ray as we want it, for whatever is imported and started inside."""
    wanted = {**SETTINGS, **more}
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[None]:
    """A Ray session, inside `settings`.

    `address`: None or "local" starts Ray in this process; "auto" joins the cluster of this machine;
    "ray://host:10001" or "host:6379" joins another. A session started here ends here.
    """
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():  # a session of the caller's: use it, and do not end it
        yield
        return
    local = address in (None, "local")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if local:
        options |= {"address": "local", "num_cpus": cpus}
    else:
        # Other machines' workers do not inherit this process's environment; ours do, and start
        # faster without being told. Ray refuses a variable that the job sets too; the job's counts.
        env = {name: os.environ.get(name, value) for name, value in SETTINGS.items()}
        env = {name: value for name, value in env.items() if name not in job_variables()}
        options |= {"address": address, "runtime_env": {"env_vars": env}}
        # Through Ray Client, Tune and its lines of progress are on the other side.
        options["log_to_driver"] = str(address).startswith("ray://")
    before = descendants()
    with only_for_us() if local else nullcontext():
        try:
            check_listening(address)
            folder = start_local(options) if local else init(options)
        except (OSError, ValueError, RuntimeError, RayError) as error:
            raise UserError(not_connected(address or "local", error)) from None

        def clean_up() -> None:
            end_all(descendants() - before)
            forget_session(folder)

        watch = RayWatch(clean_up)
        if local:
            watch.start()
        failed = False
        try:
            yield
        except UserError:
            raise
        except Exception:
            failed = True  # the logs stay: the reason may be in them
            raise
        finally:
            if local:
                watch.stop()
            if watch.lost is not None:
                clean_up()  # `ray.shutdown` would wait for what has died
                raise RayDied(watch.line)
            ray.shutdown()
            if local and not failed:
                forget_session(folder)


@contextmanager
def only_for_us() -> Iterator[None]:
    """A Ray that is started inside listens on 127.0.0.1 only, and answers nobody without the token
    of this user (~/.ray/auth_token); RAY_AUTH_MODE, if it is set, stays as it is."""
    from ray._private import ray_constants
    from ray._raylet import Config  # type: ignore[attr-defined]

    # The address of a node is the loopback where Ray has no clusters (macOS, Windows). Ray resolves
    # `_node_ip_address="127.0.0.1"` to a public address.
    clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with settings(RAY_AUTH_MODE="token"):
            Config.initialize("")  # Ray may have been imported before, with another mode
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        Config.initialize("")


def not_connected(address: str, error: Exception) -> str:
    """Why there is no Ray. One that wants a token is there: Ray only says that it cannot connect,
    so we ask it ourselves."""
    text = one_line(error)
    named = re.search(r"(\S+:\d+)\W*$", text)  # what `auto` turned out to be
    wanted = "authenticat" in f"{type(error).__name__} {text}".lower()
    if wanted or (named and refused(named[1])):
        return advice(address, given=False)
    return f"cannot reach Ray at {address}: {text}"


def init(options: dict[str, Any]) -> Path:
    """`ray.init` in silence; the folder of the session's logs and sockets.

    Ray takes SIGTERM for itself, and ends the process without a word: it is given back.
    """
    import ray

    ours = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    with handling(signal.SIGTERM, ours), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            context: Any = ray.init(**options)
        except SystemExit:
            raise Interrupted(number=signal.SIGTERM) from None
        return Path(context["session_dir"])


def start_local(options: dict[str, Any]) -> Path:
    """Ray on this machine, started again once: it allows its own start 30 seconds, whatever else
    the machine does, and no setting changes that (`raylet_start_wait_time_s`)."""
    import ray

    started_before = descendants()

    def end_the_rest() -> None:
        end_all(descendants() - started_before)

    for last in (False, True):
        watch = RayWatch(end_the_rest)
        watch.start()
        try:
            return init(options)
        except KeyboardInterrupt:
            if watch.lost is None:
                raise
            end_the_rest()
            raise RayDied(watch.line) from None
        except Exception as error:  # Ray raises a bare Exception here
            watch.stop()
            ray.shutdown()
            end_the_rest()
            if last:
                raise UserError(
                    f"Ray did not start on this machine, twice: {one_line(error).rstrip('.')}. "
                    "If the machine is busy, run the same command when it is less so, or start Ray "
                    "once with `ray start --head` and add --address auto; Ray's logs are in "
                    f"{ray_folder()}/session_latest/logs"
                ) from None
            print("Ray did not start in time; starting it again", file=sys.stderr)
        finally:
            watch.stop()
    raise AssertionError("unreachable")


def ray_folder() -> Path:
    """Where Ray keeps its sessions on this machine."""
    return Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"


def descendants() -> set[Any]:
    """All processes below this one."""
    import psutil  # Ray brings it, and makes it importable

    return set(psutil.Process().children(recursive=True))


def end_all(processes: set[Any]) -> None:
    for process in processes:
        with suppress(Exception):
            process.kill()


def forget_session(session: Path) -> None:
    """Remove the folder of a session that was started here and has ended."""
    latest = session.parent / "session_latest"
    if latest.is_symlink() and latest.resolve() == session.resolve():
        latest.unlink(missing_ok=True)
    shutil.rmtree(session, ignore_errors=True)


def default_address() -> str:
    """A Ray job runs on its own cluster, everything else on this machine."""
    return "auto" if JOB in os.environ else "local"


def job_variables() -> dict[str, str]:
    """The environment that a Ray job was submitted with."""
    return dict((job_facts().get("runtime_env") or {}).get("env_vars") or {})


def job_facts() -> dict[str, Any]:
    """What Ray tells a job of itself."""
    return dict(json.loads(os.environ.get(JOB) or "{}"))


def cluster_address() -> str:
    """HOST:PORT of the connected cluster's control service, for --address."""
    import ray

    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else "auto"


def running_service() -> str | None:
    """Where `dpfp serve` listens on the connected cluster; None if it does not run there."""
    import ray

    if not ray.is_initialized():
        return None
    with suppress(Exception):  # nobody serves, or not yet: a link must not cost a sweep
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        details: Any = ray.get(controller.get_serve_instance_details.remote(), timeout=PAGE_SECONDS)
        return service_url(details, cluster_address().rpartition(":")[0])
    return None


def results_page(sweep: str, storage: str) -> str:
    """A line for a log: the page of a sweep on the connected cluster. Inside a job that has none:
    how to get one; elsewhere nothing."""
    known = (job_facts().get("metadata") or {}).get(PAGE_FACT)
    if page := page_of(running_service(), sweep) or known:
        return f"results page: {page}"
    if JOB not in os.environ:
        return ""
    return (
        f"no results page: dpfp serve does not run on this cluster; start it there with: dpfp "
        f"serve --storage {public(storage)} --address {cluster_address()} --detach"
    )


def check_listening(address: str | None) -> None:
    """Raise at once what Ray itself would try for minutes: nobody listens (OSError), or the token
    is missing or wrong (UserError)."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not (address and colon and port.isdigit()):
        return
    socket.create_connection((host, int(port)), timeout=10).close()
    if address.startswith("ray://") or not refused(address):
        return
    token = ray_token(f"http://{address}", None)
    if token is None or refused(address, token):
        raise UserError(advice(address, given=token is not None))


PAGE_SECONDS = 10.0  # for an answer about the results service
LOOK_SECONDS = 0.5
# How long the main thread may take to leave Ray's calls; those that hang are left by force.
GRACE_SECONDS = 6.0


class RayDied(UserError):
    """At the end of the process, Ray waits a minute for what has died and then exits with 1."""

    at_once = True


def dead_part() -> str | None:
    """The first of Ray's own processes here that has ended; None while all run."""
    from ray._private import worker

    node: Any = worker._global_node
    ended = [] if node is None else [name for name, _ in node.dead_processes()]
    return next((name for name in ("gcs_server", "raylet") if name in ended), None)


class RayWatch:
    """A thread that looks; `lost` says which part has died."""

    def __init__(self, clean_up: Callable[[], None]) -> None:
        """`clean_up` ends what is left of Ray; it is called before the process ends by force."""
        self.lost: str | None = None
        self.clean_up = clean_up
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True, name="ray watch")

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()

    @property
    def line(self) -> str:
        return (
            f"Ray's {self.lost} on this machine has died; what was done is saved, and the same "
            f"command continues"
        )

    def _look(self) -> None:
        while self.lost is None:
            if self.ended.wait(LOOK_SECONDS):
                return
            with suppress(Exception):  # Ray is being shut down
                self.lost = dead_part()
        import _thread

        _thread.interrupt_main()
        if not self.ended.wait(GRACE_SECONDS):
            print(f"dpfp: {self.line}", file=sys.stderr, flush=True)
            self.clean_up()
            os._exit(2)
