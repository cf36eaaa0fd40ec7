"""The same loop on several Ray Train workers, for a trial that needs more than one.

Each worker draws the whole step, computes its share of the rows, and the shares are summed (gloo on
CPU, NCCL on GPU); sampled rows and noise do not depend on how many workers there are. Ray Train
restarts a group in which a worker or a node has died; it continues from what the trial saved.

Gloo asks what address the machine's own name has. On many machines /etc/hosts answers 127.0.1.1,
which no other machine can reach. Ray has the address by which the cluster reaches each node, so
each worker uses the network interface that has it.
"""

import os
from collections.abc import Sequence
from typing import Any, cast
from uuid import uuid4

import psutil
import ray
import ray.train
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from torch import Tensor

from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.experiment import Sweep, assigned_device, run_worker, trial_metrics
from dpfp_ray.sweeps.trial import (
    RETRIES,
    Trial,
    error_reason,
    settle,
    settled_record,
)
from dpfp_ray.system.cache import NoRoom
from dpfp_ray.system.storage import below
from dpfp_ray.training.machine import TorchComm

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def run_on_workers(
    trial: Trial, sweep: Sweep, shared: Any, facts: dict[str, Any], callbacks: list[Any]
) -> None:
    """Run one trial on `sweep.workers` workers; blocks until it is finished.

    The sweep, with its secret seed, goes through the object store: Ray shows a run's config.
    """
    cpus, gpus = float(sweep.cpus_per_worker), sweep.gpus_per_worker
    resources = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    scaling = ScalingConfig(
        num_workers=sweep.workers, use_gpu=gpus > 0, resources_per_worker=resources
    )
    config = {"trial": trial.to_config(), "sweep": ray.put(sweep), "shared": shared, "facts": facts}
    TorchTrainer(
        worker_loop,
        train_loop_config=config,
        torch_config=GroupConfig(),
        scaling_config=scaling,
        run_config=RunConfig(
            # A new name each time: under a known one Ray Train would restore its own state.
            name=f"{trial.id}-{uuid4().hex[:8]}",
            storage_path=below(sweep.storage, "train"),
            failure_config=FailureConfig(max_failures=RETRIES),
            callbacks=callbacks,
        ),
    ).fit()


def worker_loop(config: dict[str, Any]) -> None:
    """What each worker runs. Ray Train restarts the group on any error; the record then ends it."""
    trial = Trial.from_config(config["trial"])
    sweep: Sweep = ray.get(config["sweep"])
    record = settled_record(Store(sweep.storage), trial.id)
    if record is not None:
        ray.train.report(trial_metrics(record))
        return
    try:
        # Ray Train wants a report from every worker, and passes on the first one's.
        assigned_device(sweep.gpus_per_worker)  # refuses a GPU that torch does not see
        place = (GroupComm(), ray.train.torch.get_device())
        inputs = ray.get(config["shared"])
        run_worker(trial, sweep, inputs, ray.train.report, config["facts"], *place)
    except (ray.exceptions.RayError, OSError, NoRoom, PeerLost):
        raise  # the group starts again
    except Exception as error:
        settle(sweep.storage, trial, "failed", error_reason(error), config["facts"])
        raise


class PeerLost(Exception):
    """A sum failed because another worker is gone."""


class GroupComm(TorchComm):
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        try:
            super().sum_(tensors)
        except (RuntimeError, ValueError) as error:  # ValueError: Ray has taken the group down
            raise PeerLost(str(error)) from error


class GroupConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return GroupBackend


class GroupBackend(_TorchBackend):
    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        try:
            worker_group.execute(use_node_interface)
            super().on_start(worker_group, cast(TorchConfig, backend_config))
        except Exception:
            # Ray keeps the resources of a group that fails here until the job ends, and the next
            # trial would wait for them for ever.
            cast(WorkerGroup, worker_group).abort()
            raise


def use_node_interface() -> None:
    """In each worker; an interface that the user has named stays. None has the node's address
    behind a translation of addresses."""
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if address in {entry.address for entry in addresses}:
            for variable in INTERFACES:
                os.environ.setdefault(variable, name)
            return
