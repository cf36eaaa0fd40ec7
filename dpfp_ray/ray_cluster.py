"""Connecting to Ray: this machine, a running cluster, or one far away."""

import json
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpfp_ray.errors import UserError

# Must be set before Ray is imported; for this process and every worker.
SETTINGS = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in plans mean the user's folder
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial reports no accuracy
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # our records replace its CSV, JSON and TensorBoard
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends us at once; nothing needs Tune's goodbye
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # `sweep_state.py` keeps what a sweep needs
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
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it, and RAY_ADDRESS, for whatever a job runs
CHATTER = ("ray.tune", "ray.train", "ray.air", "ray._private.worker", "ray.data")


@contextmanager
def settings() -> Iterator[None]:
    """Ray as we want it, for whatever is imported and started inside."""
    added = [name for name in SETTINGS if name not in os.environ]
    os.environ.update({name: SETTINGS[name] for name in added})
    for name in CHATTER:
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

    if ray.is_initialized():  # somebody else's session: use it, leave it
        yield
        return
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address in (None, "local"):
        options |= {"address": "local", "num_cpus": cpus}
    else:
        # Other machines' workers do not inherit this process's environment; ours do, and start
        # faster without being told.
        env = {name: os.environ.get(name, value) for name, value in SETTINGS.items()}
        # Ray refuses a variable that the job sets too; the job's word stands.
        env = {name: value for name, value in env.items() if name not in job_variables()}
        options |= {"address": address, "runtime_env": {"env_vars": env}}
        # Through Ray Client, Tune and its lines of progress are on the other side.
        options["log_to_driver"] = str(address).startswith("ray://")
    try:
        knock(address)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot reach Ray at {address or 'local'}: {reason}") from None
    try:
        yield
    finally:
        ray.shutdown()


def default_address() -> str:
    """A Ray job runs on its own cluster, everything else on this machine."""
    return "auto" if JOB in os.environ else "local"


def job_variables() -> dict[str, str]:
    """The environment that a Ray job was submitted with."""
    facts = json.loads(os.environ.get(JOB) or "{}")
    return dict((facts.get("runtime_env") or {}).get("env_vars") or {})


def knock(address: str | None) -> None:
    """Raise an OSError at once if nobody listens there: Ray itself tries for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def node_resources() -> list[dict[str, Any]]:
    """What each living node of the cluster has."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
