"""Connecting to Ray, on this machine or a cluster, and what each worker gets of its nodes."""

import json
import logging
import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfp_ray.data.storage import one_line
from dpfp_ray.data.terminal import JOB
from dpfp_ray.plan.errors import UserError
from dpfp_ray.sweeps import access_tokens
from dpfp_ray.sweeps.ray_watch import RayDied, RayWatch

# Must be set before Ray is imported; for this process and every worker.
SETTINGS = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in plans mean the user's folder
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial reports no accuracy
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # our records replace its CSV, JSON and TensorBoard
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends us at once; Tune has nothing to save
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # `state.py` keeps what a sweep needs
    "TUNE_WARN_SLOW_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "1000000000",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # our table replaces Tune's
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # trials keep every core busy
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # trials raise it to their own share of the cores
}
NOISY_LOGGERS = ("ray.tune", "ray.train", "ray.air", "ray._private.worker", "ray.data")


@contextmanager
def settings() -> Iterator[None]:
    """Ray as we want it, for whatever is imported and started inside."""
    added = [name for name in SETTINGS if name not in os.environ]
    os.environ.update({name: SETTINGS[name] for name in added})
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
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address in (None, "local"):
        options |= {"address": "local", "num_cpus": cpus}
    else:
        # Other machines' workers do not inherit this process's environment; ours do, and start
        # faster without being told.
        env = {name: os.environ.get(name, value) for name, value in SETTINGS.items()}
        # Ray refuses a variable that the job sets too; the job's value counts.
        env = {name: value for name, value in env.items() if name not in job_variables()}
        options |= {"address": address, "runtime_env": {"env_vars": env}}
        # Through Ray Client, Tune and its lines of progress are on the other side.
        options["log_to_driver"] = str(address).startswith("ray://")
    local = address in (None, "local")
    before = descendants()
    try:
        check_listening(address)
        session = start_local(options) if local else init(options)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise UserError(not_connected(address or "local", error)) from None

    def clean_up() -> None:
        end_all(descendants() - before)
        forget_session(session)

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
            forget_session(session)


def not_connected(address: str, error: Exception) -> str:
    """Why there is no Ray. One that wants a token is there: Ray only says that it cannot connect,
    so we ask it ourselves."""
    text = one_line(error)
    named = re.search(r"(\S+:\d+)\W*$", text)  # what `auto` turned out to be
    wanted = "authenticat" in f"{type(error).__name__} {text}".lower()
    if wanted or (named and access_tokens.refused(named[1])):
        return access_tokens.advice(address, given=False)
    return f"cannot reach Ray at {address}: {text}"


def init(options: dict[str, Any]) -> Path:
    """`ray.init` in silence; the folder of the session's logs and sockets."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context: Any = ray.init(**options)
        return Path(context["session_dir"])


def start_local(options: dict[str, Any]) -> Path:
    """Ray on this machine, started again once: it allows its own start 30 seconds, whatever else
    the machine does, and no setting changes that (`raylet_start_wait_time_s`)."""
    import ray

    started_before = descendants()
    for last in (False, True):
        try:
            return init(options)
        except Exception as error:  # Ray raises a bare Exception here
            ray.shutdown()
            end_all(descendants() - started_before)  # what the failed start left running
            if last:
                raise UserError(
                    f"Ray did not start on this machine, twice: {one_line(error).rstrip('.')}. "
                    "If the machine is busy, run the same command when it is less so, or start Ray "
                    "once with `ray start --head` and add --address auto; Ray's logs are in "
                    f"{ray_folder()}/session_latest/logs"
                ) from None
            print("Ray did not start in time; starting it again", file=sys.stderr)
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
    facts = json.loads(os.environ.get(JOB) or "{}")
    return dict((facts.get("runtime_env") or {}).get("env_vars") or {})


def check_listening(address: str | None) -> None:
    """Raise an OSError at once if nothing listens there: Ray itself tries for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
        check_token(address or "")


def check_token(address: str) -> None:
    """Refuse at once what Ray would try for half a minute, with a warning every second."""
    if address.startswith("ray://") or not access_tokens.refused(address):
        return
    token = access_tokens.ray_token(f"http://{address}", None)
    if token is None or access_tokens.refused(address, token):
        raise UserError(access_tokens.advice(address, given=token is not None))


def node_resources() -> list[dict[str, Any]]:
    """What each living node of the cluster has."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


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
    gpus: float = 0.0,
    concurrency: int | None = None,
    *,
    may_grow: bool = False,
) -> Resources:
    """Fill the nodes without oversubscribing them; a worker does not span nodes.

    Where the cluster `may_grow`, `concurrency` trials are asked for whatever there is now: those
    that do not fit wait, and what waits is what an autoscaler brings machines for.

    By default a worker has one thread, which gives the most trials an hour (threads wait for each
    other); cores that would otherwise be idle are given to the workers.

    >>> plan_resources([{"CPU": 8}])
    Resources(cpus_per_worker=1, gpus_per_worker=0.0, workers=1, slots=8)
    >>> plan_resources([{"CPU": 8}], concurrency=2).cpus_per_worker
    4
    """

    def places(cpus: int) -> int:
        return sum(_fits(node, cpus, gpus) for node in nodes)

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
        have = ", ".join(
            f"{node.get('CPU', 0):g} CPUs" + (f" and {node['GPU']:g} GPUs" if gpus else "")
            for node in ({"GPU": 0.0, **node} for node in nodes)
        )
        need = f"{cpus} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        raise UserError(
            f"{workers} workers of {need} each do not fit the cluster ({have}); use fewer "
            f"--workers, --cpus-per-worker{' or --gpus-per-worker' if gpus else ''}"
        )
    slots = places(cpus) // workers
    return Resources(cpus, gpus, workers, asked or min(concurrency or slots, slots))


def _fits(node: dict[str, Any], cpus: int, gpus: float) -> int:
    """How many such workers fit on one node."""
    count = int(node.get("CPU", 0) // cpus)
    return min(count, int(node.get("GPU", 0) / gpus + 1e-9)) if gpus else count
