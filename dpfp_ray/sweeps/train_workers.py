"""The same loop on several Ray Train workers, for a trial that needs more than one.

Each worker draws the whole step, computes its share of the rows, and the shares are summed (gloo on
CPU, NCCL on GPU); sampled rows and noise do not depend on how many workers there are. Ray Train
restarts a group in which a worker or a node has died; it continues from what the trial saved.
"""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import ray
import ray.train
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor

from dpfp_ray.data.cache import NoRoom
from dpfp_ray.sweeps.state import ray_storage
from dpfp_ray.sweeps.trial import RETRIES, Trial, drawn_before_failure, error_reason, settle
from dpfp_ray.sweeps.trial_process import (
    RayReporter,
    Sweep,
    run_worker,
    settled_record,
    trial_metrics,
)
from dpfp_ray.sweeps.worker_group import GroupConfig
from dpfp_ray.training.machine import TorchComm


def run_on_workers(
    trial: Trial, sweep: Sweep, shared: Any, facts: dict[str, Any], callbacks: list[Any]
) -> None:
    """Run one trial on `sweep.workers` workers; blocks until it is finished.

    The sweep, with its secret seed, goes through the object store: Ray shows a run's config.
    """
    resources = {"CPU": float(sweep.cpus_per_worker)}
    if sweep.gpus_per_worker:
        resources["GPU"] = sweep.gpus_per_worker
    trainer = TorchTrainer(
        worker_loop,
        train_loop_config={
            "trial": trial.to_config(),
            "sweep": ray.put(sweep),
            "shared": shared,
            "facts": facts,
        },
        torch_config=GroupConfig(),
        scaling_config=ScalingConfig(
            num_workers=sweep.workers,
            use_gpu=sweep.gpus_per_worker > 0,
            resources_per_worker=resources,
        ),
        run_config=RunConfig(
            # A new name each time: under a known one Ray Train would restore its own state.
            name=f"{trial.id}-{uuid4().hex[:8]}",
            **ray_storage(sweep.storage, "train"),
            failure_config=FailureConfig(max_failures=RETRIES),
            callbacks=callbacks,
        ),
    )
    trainer.fit()


def worker_loop(config: dict[str, Any]) -> None:
    """What each worker runs. Ray Train restarts the group on any error; one of the trial's own is
    on record by then, and ends it."""
    trial = Trial.from_config(config["trial"])
    sweep: Sweep = ray.get(config["sweep"])
    known = settled_record(trial, sweep)
    if known is not None:
        ray.train.report(trial_metrics(known))
        return
    try:
        run_worker(
            trial,
            sweep,
            ray.get(config["shared"]),
            TrainReporter,
            config["facts"],
            comm=GroupComm(),
            device=ray.train.torch.get_device(),
        )
    except (ray.exceptions.RayError, OSError, NoRoom, PeerLost):
        raise  # the group starts again
    except Exception as error:
        facts = {**drawn_before_failure(sweep.storage, trial), **config["facts"]}
        settle(sweep.storage, trial, "failed", error_reason(error), facts)
        raise


class PeerLost(Exception):
    """A sum failed because another worker is gone."""


class GroupComm(TorchComm):
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        try:
            super().sum_(tensors)
        except (RuntimeError, ValueError) as error:  # ValueError: Ray has taken the group down
            raise PeerLost(str(error)) from error


class TrainReporter(RayReporter):
    """Ray Train wants a report from every worker, and passes on the first one's."""

    def send(self, record: dict[str, Any] | None) -> None:
        ray.train.report(trial_metrics(record) if record else {})
