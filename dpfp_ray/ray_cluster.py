"""Connecting to Ray: this machine, a running cluster, or one far away."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpfp_ray.errors import UserError

# Set before Ray is imported, for this process and every worker.
SETTINGS = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in plans mean the user's folder
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial reports no accuracy
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # our records replace its CSV, JSON and TensorBoard
    "TUNE_GLOBAL_CHECKPOINT_S": "5",  # what a killed driver may forget: the last seconds
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # our table replaces Tune's
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # trials raise it to their own share of the cores
}


@contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[dict[str, Any]]:
    """A Ray session; yields the cluster's resources.

    `address`: None or "local" starts Ray in this process; "auto" joins the cluster of this machine;
    "ray://host:10001" or "host:6379" joins another. A session started here ends here.
    """
    inherited = {name: os.environ.get(name) for name in SETTINGS}
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # somebody else's session: use it, leave it
        yield ray.cluster_resources()
        return
    local = address in (None, "local")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if local:
        options["num_cpus"] = cpus
    else:
        options["address"] = address
    options["runtime_env"] = {"env_vars": {name: os.environ[name] for name in SETTINGS}}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot reach Ray at {address or 'local'}: {reason}") from None
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()
        for name, old in inherited.items():
            if old is None:
                os.environ.pop(name, None)
