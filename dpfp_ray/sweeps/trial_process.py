"""What Ray runs for one trial: the ordinary loop, with Ray listening.

With one worker the loop runs in the Tune trial's own process (a second or two of overhead). With
more, the trial starts Ray Train workers, see `train_workers.py`.
"""

import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.tune
import torch

from dpfp_ray.data.cache import NoRoom
from dpfp_ray.data.storage import one_line
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.shared import SharedInputs, input_key
from dpfp_ray.sweeps.state import SweepState
from dpfp_ray.sweeps.telemetry import TrialGauges, dev_loss
from dpfp_ray.sweeps.trial import SETTLED, Trial, drawn_before_failure, error_reason, settle
from dpfp_ray.training.checkpoints import Saver, ask_for_room
from dpfp_ray.training.loop import Progress, State
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.prepare import Prepared, build_model
from dpfp_ray.training.run import default_device, result_record, run


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
    seed_known: bool = False  # with the seed one knows the noise; results say so
    show_training_loss: bool = False
    sealed: bool = False  # nothing of its trials is shown


Shared = dict[tuple[object, ...], "ray.ObjectRef[SharedInputs]"]


def run_trial(config: dict[str, Any], sweep: Sweep, shared: Shared) -> None:
    """The Tune trainable. A trial that raises is recorded as failed, not tried again; a process
    that dies is Ray's to restart, and continues from what it saved."""
    trial = Trial.from_config(config["trial"])
    known = settled_record(trial, sweep)
    if known is not None:  # the process died after its last record, before Ray heard of it
        ray.tune.report(trial_metrics(known))
        return
    facts = start_facts(trial, sweep)
    try:
        reference = shared[input_key(trial.plan)]
        if sweep.workers > 1:
            from ray.tune.integration.ray_train import TuneReportCallback

            from dpfp_ray.sweeps.train_workers import run_on_workers

            run_on_workers(trial, sweep, reference, facts, [TuneReportCallback()])
        else:
            run_worker(trial, sweep, ray.get(reference), TuneReporter, facts)
    except (ray.exceptions.RayError, OSError, NoRoom):
        raise  # a lost node or store, or a full one: worth another try
    except Exception as error:
        facts = {**drawn_before_failure(sweep.storage, trial), **facts}
        record = settle(sweep.storage, trial, "failed", error_reason(error), facts)
        ray.tune.report(trial_metrics(record))


def run_worker(
    trial: Trial,
    sweep: Sweep,
    shared: SharedInputs,
    listener: "type[RayReporter]",
    facts: dict[str, Any],
    comm: Any = None,
    device: torch.device | None = None,
) -> None:
    """The whole trial in this process, or its share of it if `comm` says that there are others."""
    use_threads(sweep.cpus_per_worker)
    prepared = Prepared(trial.plan, shared.inputs(), trial.noise_multiplier)
    seed, device = trial.seed(sweep.seed), device or default_device()
    states = SweepState(sweep.storage)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        state = states.load_trial(trial.id, seed, trial.plan)
    told = {**facts, **node_and_process()}
    if heard:  # shown by the driver, which has the user's terminal
        told["warning"] = "; ".join(one_line(one.message) for one in heard)
    if state is not None:
        told["resumed_at_step"] = state["progress"]["step"]
    # How far an earlier process got that was killed is not on record.
    restarted = state is not None or states.has_drawn(trial.id)
    model = build_model(prepared, seed, device)

    def describe(state: State) -> dict[str, Any]:
        progress = Progress(**state["progress"])
        return result_record(prepared, progress, model, device, seed_known=sweep.seed_known)

    gauges = TrialGauges(trial, sweep.name, silent=sweep.sealed)

    def save(state: State) -> None:
        states.save_trial(trial.id, state, seed)
        gauges.save(state)

    first = comm is None or comm.rank == 0
    if first and states.files.local:
        ask_for_room(Path(states.files.name), model, trial.plan, weights=False)
    reporter = listener(sweep, told, gauges, trial.plan.steps, describe, save, first)
    reporter.done = told.get("resumed_at_step", 0)

    def before_draws() -> None:
        if comm is not None:  # no worker draws before all of them are ready
            comm.sum_([torch.zeros(1, device=device)])
        states.mark_drawn(trial.id)
        reporter.drawing = True

    try:
        record, _ = run(
            prepared,
            reporter,
            seed=seed,
            state=state,
            comm=comm,
            device=device,
            model=model,
            seed_known=sweep.seed_known,
            show_training_loss=sweep.show_training_loss,
            before_draws=before_draws,
        )
    except Exception:
        # The step that failed was drawn, too. The caller's facts go into the trial's last record.
        if reporter.drawing and not restarted:
            facts["steps_drawn"] = min(trial.plan.steps, reporter.done + 1)
        raise
    reporter.finished(record)
    if first:
        states.drop_trial(trial.id)


class RayReporter(ABC):
    """Keeps a trial's record up to date, tells Ray about epochs, saves the state now and then.

    Only the first of several workers writes. A trial that a scheduler stops leaves the record of
    its last epoch: what it really spent.
    """

    def __init__(
        self,
        sweep: Sweep,
        facts: dict[str, Any],
        gauges: TrialGauges,
        steps: int,
        describe: Callable[[State], dict[str, Any]],
        save: Callable[[State], None],
        first: bool,
    ) -> None:
        self.first = first
        self.store = Store(sweep.storage)
        self.facts = facts
        self.gauges = gauges
        self.steps = steps
        self.describe = describe
        self.saver = Saver(save, sweep.save_every_seconds)
        self.began = time.monotonic()
        self.done = 0  # steps
        self.drawing = False

    @abstractmethod
    def send(self, record: dict[str, Any] | None) -> None:
        """Report to Ray; only the first worker has something to say."""

    def step(
        self, done: int, loss: Callable[[], float | None], checkpoint: Callable[[], State]
    ) -> None:
        self.done = done
        if self.first:
            self.saver.save_if_due(checkpoint)

    def epoch(self, record: dict[str, Any], checkpoint: Callable[[], State]) -> None:
        if record["step"] < self.steps:  # the finished record follows the last epoch at once
            self.send(self._keep(self.describe(checkpoint()), "running") if self.first else None)

    def finished(self, record: dict[str, Any]) -> None:
        self.send(self._keep(record, "finished") if self.first else None)

    def _keep(self, record: dict[str, Any], status: str) -> dict[str, Any]:
        seconds = self.facts["seconds"] + time.monotonic() - self.began
        kept = {**record, "trial": {**self.facts, "status": status, "seconds": seconds}}
        self.store.put(kept)
        self.gauges.report(kept)
        return kept


class TuneReporter(RayReporter):
    """For a trial that runs in Tune's own process."""

    def send(self, record: dict[str, Any] | None) -> None:
        assert record is not None, "a trial in Tune's own process is its only worker"
        ray.tune.report(trial_metrics(record))


def settled_record(trial: Trial, sweep: Sweep) -> dict[str, Any] | None:
    record = Store(sweep.storage).get(trial.id)
    return record if record and record["trial"].get("status") in SETTLED else None


def start_facts(trial: Trial, sweep: Sweep) -> dict[str, Any]:
    """Who, where and when; a trial that goes on keeps its first start and the time it has used."""
    before = (Store(sweep.storage).get(trial.id) or {}).get("trial", {})
    return {
        "id": trial.id,
        "sweep": sweep.name,
        "group": trial.group,
        "seed_index": trial.seed_index,
        "ledger_entry": trial.entry,
        **node_and_process(),
        "started_at": before.get("started_at", time.time()),
        "seconds": before.get("seconds", 0.0),
        "error": None,
    }


def node_and_process() -> dict[str, Any]:
    """Where a trial runs; Ray's log files are named after the process."""
    node = ray.get_runtime_context().get_node_id()
    return {"node": f"{ray.util.get_node_ip_address()}/{node[:8]}", "pid": os.getpid()}


def trial_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """What searchers, schedulers, trackers and the live table see of a trial; `status` says how it
    stands."""
    trial = record["trial"]
    metrics = {"status": trial["status"], "error": trial.get("error")}
    if trial.get("warning"):
        metrics["warning"] = trial["warning"]
    if not record.get("history"):
        return metrics
    last = record["history"][-1]
    spent = last["epsilon"].get(record["plan"]["accountant"])
    return {
        **metrics,
        "accuracy": record["metrics"]["accuracy"],
        "epoch": last["epoch"],
        "step": last["step"],
        "epsilon": 0.0 if spent is None else spent,
        "nominal": record["privacy"].get("guarantee") == "nominal",
        **{f"epsilon_{name}": value for name, value in last["epsilon"].items()},
        "loss": last["train_loss"],
        "dev_loss": dev_loss(last),
        "sigma": record["privacy"]["sigma"],
        "examples_per_second": record["cost"]["examples_per_second"],
        "train_seconds": last["train_seconds"],
    }
