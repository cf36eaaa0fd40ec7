"""What Ray runs for one trial: the ordinary loop, with Ray listening.

With one worker the loop runs in the Tune trial's own process (a second or two of overhead). With
more, the trial starts Ray Train workers, see `ray_train.py`.
"""

import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.tune
import torch

from dpfp_ray.errors import UserError
from dpfp_ray.ray_shared import SharedInputs, input_key
from dpfp_ray.results import Store
from dpfp_ray.run import Inputs, Prepared, build_model, default_device, result_record, run
from dpfp_ray.threads import use_threads
from dpfp_ray.train import Progress, State
from dpfp_ray.trial import Trial

STATE_FILE = "state.pt"
# How often a trial is restarted when its process or node dies; its own errors are not retried.
RETRIES = 5


@dataclass(frozen=True)
class Sweep:
    """What all trials of a sweep have in common. `seed` is secret: it never goes into a config."""

    name: str
    storage: str
    seed: int
    cpus_per_worker: int = 1
    gpus_per_worker: float = 0.0
    workers: int = 1
    save_every_seconds: float = 30.0


SharedRefs = "dict[tuple[object, ...], ray.ObjectRef[SharedInputs]]"
MakeTrial = Callable[[dict[str, Any], "Callable[[Any], Inputs]"], Trial]


def run_trial(config: dict[str, Any], sweep: Sweep, shared: Any, make_trial: MakeTrial) -> None:
    """The Tune trainable. A trial that cannot run is recorded as failed, not tried again;
    a process that dies is Ray's to restart, and continues from its checkpoint."""
    started = time.time()
    store = Store(sweep.storage)

    def inputs_of(plan: Any) -> Inputs:
        found: SharedInputs = ray.get(shared[input_key(plan)])
        return found.inputs()

    trial: Trial | None = None
    try:
        trial = make_trial(config, inputs_of)
        inputs = inputs_of(trial.plan)
        facts = {"id": trial.id, "sweep": sweep.name, "seed_index": trial.seed_index}
        facts |= {
            "group": trial.group,
            "node": ray.util.get_node_ip_address(),
            "started_at": started,
        }
        if sweep.workers > 1:
            from ray.tune.integration.ray_train import TuneReportCallback

            from dpfp_ray.ray_train import run_on_workers

            reference = shared[input_key(trial.plan)]
            run_on_workers(trial, sweep, reference, facts, [TuneReportCallback()])
            return
        run_here(trial, sweep, inputs, store, facts)
    except (UserError, RuntimeError, ValueError) as error:
        record = failed_record(trial, sweep, config, error, started)
        store.put(record)
        ray.tune.report({"failed": True, "error": record["trial"]["error"]})


def run_here(
    trial: Trial, sweep: Sweep, inputs: Inputs, store: Store, facts: dict[str, Any]
) -> None:
    """The trial in this very process."""
    use_threads(sweep.cpus_per_worker)
    prepared = Prepared(trial.plan, inputs, trial.noise_multiplier)
    seed, device = trial.seed(sweep.seed), default_device()
    model = build_model(prepared, seed, device)

    def describe(state: State) -> dict[str, Any]:
        return result_record(prepared, Progress(**state["progress"]), model, device)

    reporter = TuneReporter(describe, store, facts, sweep.save_every_seconds)
    state = load_checkpoint(ray.tune.get_checkpoint())
    record, _ = run(prepared, reporter, seed=seed, state=state, device=device, model=model)
    reporter.finished(record)


class RayReporter(ABC):
    """Keeps a trial's record up to date, tells Ray about epochs, saves the state now and then.

    A trial that a scheduler stops leaves the record of its last epoch: what it really spent.
    """

    def __init__(
        self,
        describe: Callable[[State], dict[str, Any]],
        store: Store | None,
        facts: dict[str, Any],
        save_every_seconds: float,
    ) -> None:
        """`describe` makes a record of a state; `store` is None on all workers but one."""
        self.describe = describe
        self.store = store
        self.facts = facts
        self.save_every_seconds = save_every_seconds
        self.saved_at = time.monotonic()
        self.metrics: dict[str, Any] = {"id": facts["id"]}

    @abstractmethod
    def send(self, metrics: dict[str, Any], folder: str | None) -> None:
        """Report to Ray, with the checkpoint in `folder` if there is one."""

    def save_is_due(self, done: int) -> bool:
        return time.monotonic() - self.saved_at > self.save_every_seconds

    def step(self, done: int, loss: Callable[[], float], checkpoint: Callable[[], State]) -> None:
        if self.save_is_due(done):
            self._report({"step": done}, checkpoint)

    def epoch(self, record: dict[str, Any], checkpoint: Callable[[], State]) -> None:
        so_far = self.describe(checkpoint())
        if not so_far["finished"]:  # the finished record follows at once
            self.metrics = trial_metrics(self._keep(so_far, "running"))
            self._report({}, checkpoint if self.save_is_due(0) else None)

    def finished(self, record: dict[str, Any]) -> None:
        self.metrics = trial_metrics(self._keep(record, "finished"))
        self._report({"finished": True}, None)

    def _keep(self, record: dict[str, Any], status: str) -> dict[str, Any]:
        seconds = time.time() - self.facts["started_at"]
        trial = {**self.facts, "status": status, "error": None, "seconds": seconds}
        kept = {**record, "trial": trial}
        if self.store is not None:
            self.store.put(kept)
        return kept

    def _report(self, extra: dict[str, Any], checkpoint: Callable[[], State] | None) -> None:
        metrics = {**self.metrics, **extra}
        if checkpoint is None or self.store is None:
            self.send(metrics, None)
        else:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(checkpoint(), os.path.join(folder, STATE_FILE))
                self.send(metrics, folder)
        if checkpoint is not None:
            self.saved_at = time.monotonic()


class TuneReporter(RayReporter):
    """For a trial that runs in Tune's own process."""

    def send(self, metrics: dict[str, Any], folder: str | None) -> None:
        checkpoint = ray.tune.Checkpoint.from_directory(folder) if folder else None
        ray.tune.report(metrics, checkpoint=checkpoint)


def trial_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """What searchers, schedulers and the live table see of a trial so far."""
    last = record["history"][-1]
    spent = last["epsilon"].get(record["plan"]["accountant"])
    return {
        "id": record["trial"]["id"],
        "accuracy": record["metrics"]["accuracy"],
        "epoch": last["epoch"],
        "step": last["step"],
        "epsilon": 0.0 if spent is None else spent,
        "train_seconds": last["train_seconds"],
    }


def failed_record(
    trial: Trial | None, sweep: Sweep, config: dict[str, Any], error: Exception, started: float
) -> dict[str, Any]:
    """Why a trial has no result. What it spent before failing is unknown here: state the budget."""
    identity = trial.id if trial else ray.tune.get_context().get_trial_id()
    return {
        "plan": trial.plan.to_dict() if trial else config,
        "plan_hash": trial.plan.hash if trial else "",
        "finished": False,
        "trial": {
            "id": identity,
            "sweep": sweep.name,
            "status": "failed",
            "error": " ".join(str(error).split())[:500] or type(error).__name__,
            "seconds": time.time() - started,
        },
    }


def load_checkpoint(checkpoint: Any) -> State | None:
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        state: State = torch.load(Path(folder) / STATE_FILE, map_location="cpu", weights_only=True)
    return state


def fixed_trial(config: dict[str, Any], inputs_of: Any) -> Trial:
    """For sweeps whose trials are all known beforehand."""
    return Trial.from_config(config["trial"])
