"""Running trials on Ray Tune: whatever the cluster's size, whatever gets killed.

A fixed list of trials (grid, random search, compare) and a searcher's trials (TPE) go through the
same Tuner. Interrupted or killed, the same call continues: Tune restores its own state, finished
trials are not repeated, running ones continue from their checkpoint.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
import ray.tune
from ray.tune import CheckpointConfig, FailureConfig, RunConfig, TuneConfig, Tuner

from dpfp_ray.errors import UserError
from dpfp_ray.live import LiveTable, trial_id
from dpfp_ray.plan import Plan
from dpfp_ray.ray_shared import input_key, share_inputs
from dpfp_ray.ray_trial import RETRIES, Sweep, fixed_trial, run_trial
from dpfp_ray.results import Store
from dpfp_ray.run import Inputs
from dpfp_ray.sampling import fresh_seed
from dpfp_ray.terminal import stderr
from dpfp_ray.trial import Trial

SECRET = "sweep.secret"
# States of a record that need not be run again.
SETTLED = ("finished", "stopped", "refused", "failed")


@dataclass(frozen=True)
class Search:
    """How a searcher proposes trials: `make_trial` turns its proposal into a trial on budget."""

    algorithm: Any
    samples: int
    make_trial: Callable[[dict[str, Any], Callable[[Plan], Inputs]], Trial]
    varied: list[str]
    plans: list[Plan]
    key: str


@dataclass(frozen=True)
class Resources:
    """What one worker gets and how many trials run side by side."""

    cpus_per_worker: int
    gpus_per_worker: float
    workers: int
    slots: int


def plan_resources(
    cluster: dict[str, Any], workers: int, cpus: int | None, gpus: float, concurrency: int | None
) -> Resources:
    """Fill the cluster without oversubscribing it.

    One thread a trial gives the most trials an hour: threads within a trial wait for each other.
    """
    total_cpus, total_gpus = int(cluster.get("CPU", 1)), cluster.get("GPU", 0.0)
    if gpus > 0 and total_gpus < gpus * workers:
        raise UserError(f"{workers} workers of {gpus:g} GPUs, but the cluster has {total_gpus:g}")
    wanted = concurrency or (int(total_gpus / gpus / workers) if gpus > 0 else None)
    if cpus is None:
        cpus = max(1, total_cpus // ((wanted or 1) * workers)) if wanted or workers > 1 else 1
    if cpus * workers > total_cpus:
        raise UserError(
            f"a trial of {workers} workers with {cpus} CPUs each needs {cpus * workers}, but the "
            f"cluster has {total_cpus}; use fewer --workers or --cpus-per-worker"
        )
    slots = min(wanted or total_cpus, max(1, total_cpus // (cpus * workers)))
    return Resources(cpus, gpus, workers, slots)


def unfinished(trials: list[Trial], storage: str) -> list[Trial]:
    """Those of `trials` that have no final record yet."""
    records = Store(storage).records()
    settled = {
        record["trial"]["id"]
        for record in records
        if record.get("trial", {}).get("status") in SETTLED
    }
    return [trial for trial in trials if trial.id not in settled]


def run_trials(
    trials: list[Trial], sweep: Sweep, slots: int, *, varied: list[str], scheduler: Any = None
) -> None:
    """Run those of `trials` that have no final record yet."""
    left = unfinished(trials, sweep.storage)
    if len(left) < len(trials):
        stderr.print(f"{len(trials) - len(left)} of {len(trials)} trials are finished already")
    if left:
        fit(
            sweep,
            slots,
            name=digest(trial.id for trial in trials),
            param_space={"trial": ray.tune.grid_search([trial.to_config() for trial in left])},
            make_trial=fixed_trial,
            plans=[trial.plan for trial in left],
            total=len(left),
            varied=varied,
            tune_config=TuneConfig(scheduler=scheduler),
        )


def run_search(search: Search, sweep: Sweep, slots: int, scheduler: Any = None) -> None:
    """Let a searcher propose `search.samples` trials, each on budget by construction."""
    fit(
        sweep,
        slots,
        name=search.key,
        param_space=None,
        make_trial=search.make_trial,
        plans=search.plans,
        total=search.samples,
        varied=search.varied,
        tune_config=TuneConfig(
            search_alg=search.algorithm, num_samples=search.samples, scheduler=scheduler
        ),
    )


def fit(
    sweep: Sweep,
    slots: int,
    *,
    name: str,
    param_space: dict[str, Any] | None,
    make_trial: Any,
    plans: Iterable[Plan],
    total: int,
    varied: list[str],
    tune_config: TuneConfig,
) -> None:
    """Start, or continue, one Tune experiment under `sweep.storage`."""
    quiet()
    shared = {}
    for plan in plans:
        if input_key(plan) not in shared:
            shared[input_key(plan)] = share_inputs(plan)[1]
    # Trials with workers of their own hold no CPU themselves: Ray Train reserves the workers'.
    alone = sweep.workers == 1
    cpus = float(sweep.cpus_per_worker) if alone else 0.1
    resources = {"CPU": cpus, "GPU": sweep.gpus_per_worker if alone else 0.0}
    trainable = ray.tune.with_resources(
        ray.tune.with_parameters(run_trial, sweep=sweep, shared=shared, make_trial=make_trial),
        resources,
    )
    path = f"{sweep.storage.rstrip('/')}/tune"
    table = LiveTable(sweep.name, total, slots, sweep.storage, varied)
    run_config = RunConfig(
        name=name,
        storage_path=path,
        verbose=0,
        callbacks=[table],
        failure_config=FailureConfig(max_failures=RETRIES),
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    )
    if Tuner.can_restore(f"{path}/{name}"):
        tuner = Tuner.restore(
            f"{path}/{name}", trainable=trainable, resume_unfinished=True, resume_errored=True
        )
        # The saved experiment carries the dead process's table; this one replaces it.
        assert tuner._local_tuner is not None
        tuner._local_tuner.get_run_config().callbacks = [table]
    else:
        tuner = Tuner(
            trainable,
            param_space=param_space,
            tune_config=replace(
                tune_config,
                max_concurrent_trials=slots,
                reuse_actors=alone,
                trial_dirname_creator=trial_id,
            ),
            run_config=run_config,
        )
    try:
        tuner.fit()
    finally:
        table.close()


def sweep_seed(storage: str, given: int | None) -> int:
    """The sweep's secret seed, kept beside it until it is finished, so that it can go on.

    Owner-only on a disk; in an object store whoever may read the unfinished sweep may read it.
    """
    if given is not None:
        return given
    filesystem, root = filesystem_of(storage)
    path = f"{root}/{SECRET}"
    if filesystem.get_file_info(path).type != pyarrow.fs.FileType.NotFound:
        with filesystem.open_input_stream(path) as file:
            return int(file.read())
    seed = fresh_seed()
    if "://" in storage:
        filesystem.create_dir(root)
        with filesystem.open_output_stream(path) as file:
            file.write(str(seed).encode())
    else:
        Path(root).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(str(seed))
    return seed


def forget_seed(storage: str) -> None:
    filesystem, root = filesystem_of(storage)
    with contextlib.suppress(FileNotFoundError):
        filesystem.delete_file(f"{root}/{SECRET}")


def filesystem_of(storage: str) -> tuple[pyarrow.fs.FileSystem, str]:
    if "://" in storage:
        return pyarrow.fs.FileSystem.from_uri(storage)
    return pyarrow.fs.LocalFileSystem(), storage


def resolve_storage(storage: str) -> str:
    """Absolute path or URI: Ray would fail on a relative path, and only when it is too late."""
    return storage if "://" in storage else str(Path(storage).expanduser().resolve())


def digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def quiet() -> None:
    """Tune's own chatter goes; warnings and errors of ours stay."""
    for name in ("ray.tune", "ray.train", "ray.air", "ray._private.worker"):
        logging.getLogger(name).setLevel(logging.ERROR)
