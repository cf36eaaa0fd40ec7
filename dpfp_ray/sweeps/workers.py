"""The same loop on several Ray Train workers, for a trial or a run that needs more than one.

Each worker draws the whole step, computes its share of the rows, and the shares are summed (gloo on
CPU, NCCL on GPU); sampled rows and noise do not depend on how many workers there are. A group
in which a worker or a node has died starts again, and continues from what the trial saved.

`dpfp train` has no store that all machines see: the first worker sends its events, and a state when
it is asked for one, to the process that keeps the run's folder (`Group`).

Gloo asks what address the machine's own name has. On many machines /etc/hosts answers 127.0.1.1,
which no other machine can reach. Ray has the address by which the cluster reaches each node, so
each worker uses the network interface that has it.
"""

import io
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast
from uuid import uuid4

import psutil
import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2.api.exceptions import WorkerGroupError
from torch import Tensor

from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.cluster import RayOptions, Resources, living_nodes, plan_resources
from dpfp_ray.sweeps.experiment import (
    Notices,
    Sweep,
    assigned_device,
    run_worker,
    trial_metrics,
)
from dpfp_ray.sweeps.shared import share_inputs
from dpfp_ray.sweeps.trial import (
    RETRIES,
    SweepState,
    Trial,
    cause_of,
    error_reason,
    settle,
    settled_record,
)
from dpfp_ray.system.cache import NoRoom
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import below
from dpfp_ray.training.loop import Drawing, Epoch, Event, Finished, State, Step
from dpfp_ray.training.machine import TorchComm, use_threads
from dpfp_ray.training.prepare import Run, build_model
from dpfp_ray.training.train import run_events

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def run_on_workers(
    trial: Trial, sweep: Sweep, shared: Any, facts: dict[str, Any], callbacks: list[Any]
) -> None:
    """Run one trial on `sweep.workers` workers; blocks until it is finished.

    A group in which a worker or a node died starts again; only starts without a newer saved step
    count against the limit.

    The sweep, with its secret seed, goes through the object store: Ray shows a run's config.
    """
    config = {"trial": trial.to_config(), "sweep": ray.put(sweep), "shared": shared, "facts": facts}
    states, failures = SweepState(sweep.storage), 0
    while True:
        before = states.saved_step(trial.id)
        trainer = TorchTrainer(
            worker_loop,
            train_loop_config=config,
            torch_config=GroupConfig(),
            scaling_config=scaling(sweep.workers, sweep.cpus_per_worker, sweep.gpus_per_worker),
            run_config=RunConfig(
                # A new name each time: under a known one Ray Train would restore its own state.
                name=f"{trial.id}-{uuid4().hex[:8]}",
                storage_path=below(sweep.storage, "train"),
                failure_config=FailureConfig(max_failures=0),
                callbacks=callbacks,
            ),
        )
        try:
            trainer.fit()
            return
        except WorkerGroupError:
            failures = 0 if states.saved_step(trial.id) > before else failures + 1
            if failures > RETRIES:
                raise


def scaling(workers: int, cpus: int, gpus: float) -> ScalingConfig:
    resources = {"CPU": float(cpus), "GPU": gpus} if gpus else {"CPU": float(cpus)}
    return ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources)


def worker_loop(config: dict[str, Any]) -> None:
    """What each worker runs. The group starts again on any error; the record then ends it."""
    trial = Trial.from_config(config["trial"])
    sweep: Sweep = ray.get(config["sweep"])
    record = settled_record(Store(sweep.storage), trial.id)
    if record is not None:
        ray.train.report(trial_metrics(record))
        return
    try:
        # Ray Train wants a report from every worker, and passes on the first one's.
        place = (GroupComm(), ray.train.torch.get_device())
        inputs = ray.get(config["shared"])
        run_worker(trial, sweep, inputs, ray.train.report, config["facts"], *place)
    except LOST:
        raise  # the group starts again
    except Exception as error:
        settle(sweep.storage, trial, "failed", error_reason(error), config["facts"])
        raise


class PeerLost(Exception):
    """A sum failed because another worker is gone."""


# What another try may mend: a lost worker or node, a store that is away, a full disk.
LOST = (ray.exceptions.RayError, OSError, NoRoom, PeerLost)


class GroupComm(TorchComm):
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        try:
            super().sum_(tensors)
        except torch.OutOfMemoryError:
            raise  # before anything was sent: a smaller part may fit
        except (RuntimeError, ValueError) as error:  # ValueError: Ray has taken the group down
            raise PeerLost(str(error)) from error


class GroupConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return GroupBackend


class GroupBackend(_TorchBackend):
    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        try:
            worker_group.execute(refuse_unseen_gpu)  # NCCL would only say that it is not there
            worker_group.execute(use_node_interface)
            super().on_start(worker_group, cast(TorchConfig, backend_config))
        except Exception:
            # Ray keeps the resources of a group that fails here until the job ends, and the next
            # trial would wait for them for ever.
            cast(WorkerGroup, worker_group).abort()
            raise


def refuse_unseen_gpu() -> None:
    assigned_device(len(ray.get_gpu_ids()))


def use_node_interface() -> None:
    """In each worker; an interface that the user has named stays. None has the node's address
    behind a translation of addresses."""
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if address in {entry.address for entry in addresses}:
            for variable in INTERFACES:
                os.environ.setdefault(variable, name)
            return


# A run of `dpfp train` ----------------------------------------------------------------------------

LOOK_SECONDS = 0.5
AHEAD = (
    2  # steps that some worker may have drawn before the first worker has told of the one before
)
LOSS_SECONDS = 0.5  # the loss is asked for so often at most: on a GPU the question waits for it


def group_events(run: Run, model: Classifier, options: RayOptions) -> Iterator[Event]:
    """As `run_events`, on the workers of a connected Ray. `model` gets their weights at the end."""
    gpus, limit = options.gpus_per_worker, options.workers
    nodes = living_nodes()
    resources = plan_resources(nodes, limit, options.cpus_per_worker, gpus, concurrency=1)
    with closing(Group(run, resources)) as group:
        while True:
            event = group.next()
            if isinstance(event, Finished):
                model.load_state_dict(group.weights, strict=False)
                event.record["environment"]["workers"] = limit
                yield event
                return
            yield event


class Group:
    """A run on Ray's workers, as the process sees it that asked for it.

    A group in which a worker or a node dies starts again from the last state that came from it,
    with the same draws and noise. It gives up after `RETRIES` starts without a newer state.
    """

    def __init__(self, run: Run, resources: Resources) -> None:
        self.run, self.resources, self.inputs = run, resources, run.prepared.inputs
        self.shared = share_inputs(run.plan, self.inputs)
        self.waiting: deque[Event] = deque()
        self.weights: State = {}
        self.wants_state, self.over, self.failures = False, False, 0
        self._start()

    def next(self) -> Event:
        return self.waiting.popleft() if self.waiting else self._read()

    def checkpoint(self) -> State:
        """The state after the step that the first worker is at. Events on the way are kept."""
        if not self.over:
            before = self.run.state
            self.wants_state = True
            self.mailbox.want.remote()
            while self.run.state is before:
                self.waiting.append(self._read())
            self.wants_state = False
        assert self.run.state is not None
        return self.run.state

    def close(self) -> None:
        """End the workers, finished or not: the first one finds its mailbox gone."""
        ray.kill(self.mailbox)
        self.thread.join(CLOSE_SECONDS)
        self.folder.cleanup()

    def _start(self) -> None:
        mailbox: Any = ray.remote(num_cpus=0)(Mailbox)
        self.mailbox = mailbox.remote()
        self.message = self.mailbox.get.remote()
        if self.wants_state:
            self.mailbox.want.remote()
        self.began, self.error = False, ""
        self.step_at_start = step_of(self.run.state)
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # The seed and the state go through the object store: Ray shows a run's config.
        alone = replace(self.run, prepared=replace(self.run.prepared, inputs=cast(Any, None)))
        config = {
            "run": ray.put(alone),
            "shared": self.shared,
            "mailbox": self.mailbox,
            "resources": self.resources,
        }
        trainer = TorchTrainer(
            group_loop,
            train_loop_config=config,
            torch_config=GroupConfig(),
            scaling_config=scaling(
                self.resources.workers,
                self.resources.cpus_per_worker,
                self.resources.gpus_per_worker,
            ),
            run_config=RunConfig(
                storage_path=self.folder.name,
                failure_config=cast(Any, FailureConfig)(max_failures=0, max_preemption_failures=0),
            ),
        )

        def fit() -> None:
            try:
                trainer.fit()
            except Exception as error:
                self.error = cause_of(error)

        self.thread = threading.Thread(target=fit, daemon=True, name="ray train")
        self.thread.start()

    def _read(self) -> Event:
        """The next event, from a new group where one has died."""
        while True:
            alive = self.thread.is_alive()
            ready, _ = ray.wait([self.message], timeout=LOOK_SECONDS)
            if not ready:
                if not alive:
                    self._restart()
                continue
            try:
                event, data = ray.get(self.message)
            except ray.exceptions.RayActorError:  # the mailbox was on a machine that is gone
                self.thread.join()
                self._restart()
                continue
            self.message = self.mailbox.get.remote()
            if isinstance(event, Exception):
                raise event
            if event is None:
                self.began = True
                continue
            values = None if data is None else torch.load(io.BytesIO(data), weights_only=True)
            if isinstance(event, Finished):
                self.weights = values or {}
            elif values is not None:
                self.run = replace(self.run, state=values)
            self.over = isinstance(event, Step) and event.done == self.run.plan.steps
            if isinstance(event, Step | Epoch):
                event = replace(event, checkpoint=self.checkpoint)
            return cast(Event, event)

    def _restart(self) -> None:
        newer = step_of(self.run.state) > self.step_at_start
        self.failures = 0 if newer else self.failures + 1
        if not self.began or self.failures > RETRIES:
            what = f"died {self.failures} times without progress" if self.began else "did not start"
            raise UserError(f"the workers {what}: {self.error}")
        self.close()
        self._start()


CLOSE_SECONDS = 30.0


class Mailbox:
    """An actor between the first worker and the process that asked for the run. It holds one
    message: a worker is never further ahead than that."""

    def __init__(self) -> None:
        import asyncio

        self.messages: asyncio.Queue[Any] = asyncio.Queue(1)
        self.wanted = False

    async def put(self, event: Any, data: bytes | None = None) -> bool:
        """Whether a state is wanted."""
        await self.messages.put((event, data))
        return self.wanted

    async def get(self) -> Any:
        _, data = message = await self.messages.get()
        self.wanted = self.wanted and data is None
        return message

    async def want(self) -> None:
        self.wanted = True


def group_loop(config: dict[str, Any]) -> None:
    """What each worker of a `Group` runs."""
    mailbox, resources = config["mailbox"], config["resources"]

    def tell(event: Any, values: State | None = None) -> bool:
        data = None
        if values is not None:
            stream = io.BytesIO()
            torch.save(values, stream)
            data = stream.getvalue()
        return bool(ray.get(mailbox.put.remote(event, data)))

    try:
        comm, device = GroupComm(), ray.train.torch.get_device()
        if comm.rank == 0:
            tell(None)
        use_threads(resources.cpus_per_worker)
        run: Run = ray.get(config["run"])
        run = replace(run, prepared=replace(run.prepared, inputs=ray.get(config["shared"])))
        model = build_model(run.prepared, run.seed, device)
        wanted, asked_at, loss, notices = False, 0.0, None, Notices()
        for event in run_events(run, model, comm):
            if isinstance(event, Drawing):
                comm.sum_([torch.zeros(1, device=device)])  # no worker draws before all are ready
                event = Drawing(AHEAD)
            if comm.rank:
                continue
            if isinstance(event, Step):
                wanted = wanted or notices.new() or event.done == run.plan.steps
                values = event.checkpoint() if wanted else None
                if time.monotonic() - asked_at > LOSS_SECONDS:
                    loss, asked_at = event.loss(), time.monotonic()
                told = replace(event, loss=partial(copy, loss), checkpoint=no_state)
                wanted = tell(told, None if values is None else on_cpu(values))
            elif isinstance(event, Epoch):
                wanted = tell(replace(event, checkpoint=no_state))
            elif isinstance(event, Finished):
                tell(event, {name: p.detach().cpu() for name, p in trainable_parameters(model)})
            elif isinstance(event, Drawing):
                wanted = tell(event)
    except LOST:
        raise  # the group starts again
    except Exception as error:
        kind = UserError if isinstance(error, UserError) else RuntimeError
        tell(kind(error_reason(error)))
        raise


def no_state() -> State:
    raise AssertionError("the mailbox's reader gives the state")


def on_cpu(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.cpu()
    if isinstance(values, dict):
        return {name: on_cpu(value) for name, value in values.items()}
    return values


def step_of(state: State | None) -> int:
    return 0 if state is None else int(state["progress"]["step"])
