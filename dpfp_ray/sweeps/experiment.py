"""What Ray Tune runs for a trial, and the last record of a trial that writes none.

With one worker the loop runs in the Tune trial's own process (a second or two of overhead). With
more, the trial starts Ray Train workers, see `workers.py`.
"""

import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.tune
import torch
from ray.tune import Callback

from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.progress import TrialGauges, dev_loss
from dpfp_ray.sweeps.trial import (
    RETRIES,
    SETTLED,
    SweepState,
    Trial,
    error_reason,
    has_restarts_left,
    input_key,
    last_error,
    settle,
    settled_record,
)
from dpfp_ray.system.cache import NoRoom
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import one_line
from dpfp_ray.training.loop import Drawing, Epoch, Finished, State, Step
from dpfp_ray.training.machine import Comm, SoloComm, use_threads
from dpfp_ray.training.prepare import Inputs, Prepared, Run, build_model
from dpfp_ray.training.record import Record
from dpfp_ray.training.run_folder import Saver, ask_for_room
from dpfp_ray.training.train import result_record, run_events


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
    batch: str = ""  # Tune's experiment, and how many trials it will run, if that may be told
    planned: int = 0


Shared = dict[tuple[object, ...], "ray.ObjectRef[Inputs]"]


def run_trial(config: dict[str, Any], sweep: Sweep, shared: Shared) -> None:
    """The Tune trainable. A trial that raises is recorded as failed, not tried again; a process
    that dies is Ray's to restart, and continues from what it saved."""
    trial = Trial.from_config(config["trial"])
    record = settled_record(Store(sweep.storage), trial.id)
    if record is not None:  # the process died after its last record, before Ray heard of it
        ray.tune.report(trial_metrics(record))
        return
    facts = start_facts(trial, sweep)
    try:
        reference = shared[input_key(trial.plan)]
        if sweep.workers > 1:
            from ray.tune.integration.ray_train import TuneReportCallback

            from dpfp_ray.sweeps.workers import run_on_workers

            run_on_workers(trial, sweep, reference, facts, [TuneReportCallback()])
        else:
            run_worker(trial, sweep, ray.get(reference), ray.tune.report, facts)
    except (ray.exceptions.RayError, OSError, NoRoom):
        raise  # a lost node or store, or a full one: worth another try
    except Exception as error:
        failed = settle(sweep.storage, trial, "failed", error_reason(error), facts)
        ray.tune.report(trial_metrics(failed))


def run_worker(
    trial: Trial,
    sweep: Sweep,
    inputs: Inputs,
    report: Callable[[dict[str, Any]], None],
    facts: dict[str, Any],
    comm: Comm | None = None,
    device: torch.device | None = None,
) -> None:
    """The whole trial in this process, or its share of it if `comm` says that there are others.

    Every worker reports to Ray; only the first has something to say, and only the first writes. A
    trial that a scheduler stops leaves the record of its last epoch: what it really spent. If the
    trial fails, `facts` then say how many steps it drew, as far as that is on record.
    """
    use_threads(sweep.cpus_per_worker)
    comm, device = comm or SoloComm(), device or assigned_device(sweep.gpus_per_worker)
    seed, steps, first = trial.seed(sweep.seed), trial.plan.steps, comm.rank == 0
    states = SweepState(sweep.storage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = states.load_trial(trial.id, seed, trial.plan)
    trial_facts = {**facts, **node_and_process()}
    if caught:  # shown by the driver, which has the user's terminal
        trial_facts["warning"] = "; ".join(one_line(warning.message) for warning in caught)
    if state is not None:
        trial_facts["resumed_at_step"] = state["progress"]["step"]
    # How far an earlier process got that was killed is not on record.
    restarted = state is not None or states.has_drawn(trial.id)
    prepared = Prepared(trial.plan, inputs, trial.noise_multiplier)
    run = Run(prepared, seed, state, sweep.seed_known, sweep.show_training_loss)
    model = build_model(run.prepared, seed, device)
    gauges = TrialGauges(trial, sweep.name, silent=sweep.sealed)

    def save(state: State) -> None:
        states.save_trial(trial.id, state, seed)
        gauges.save(state)

    def publish(record: Record | None, status: str) -> None:
        if not first or record is None:
            return report({})
        seconds = facts["seconds"] + time.monotonic() - began
        trial_section: Any = {**trial_facts, "status": status, "seconds": seconds}
        if not sweep.sealed:  # for the time left on the service's page
            trial_section |= {"batch": sweep.batch, "planned": sweep.planned}
            trial_section["reported_at"] = time.time()
        record["trial"] = trial_section
        Store(sweep.storage).put(record)
        gauges.report(record)
        report(trial_metrics(record))

    if first and states.files.local:
        ask_for_room(Path(states.files.name), model, trial.plan, weights=False)
    began, saver, notices = time.monotonic(), Saver(save, sweep.save_every_seconds), Notices()
    done, drawing = trial_facts.get("resumed_at_step", 0), False
    try:
        for event in run_events(run, model, comm):
            if isinstance(event, Drawing):
                comm.sum_([torch.zeros(1, device=device)])  # no worker draws before all are ready
                states.mark_drawn(trial.id)
                drawing = True
            elif isinstance(event, Step):
                done = event.done
                if first and (saver.due or notices.new()):
                    saver.save_now(event.checkpoint)
            elif isinstance(event, Epoch) and event.record["step"] < steps:
                publish(result_record(run, event.progress, model) if first else None, "running")
            elif isinstance(event, Finished):
                record = event.record  # follows the last epoch at once
    except Exception:
        # The step that failed was drawn, too.
        if drawing and not restarted:
            facts["steps_drawn"] = min(steps, done + 1)
        raise
    publish(record, "finished")
    if first:
        states.drop_trial(trial.id)


NOTICE_SECONDS = 5.0  # a cloud gives 30 seconds or more


class Notices:
    """Nodes that Ray has been told will go: a spot machine that its cloud takes back."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.asked_at = time.monotonic()

    def new(self) -> bool:
        """Whether another one was told of; asked of Ray every few seconds only."""
        if time.monotonic() - self.asked_at < NOTICE_SECONDS:
            return False
        from ray._private.state import state

        self.asked_at, before = time.monotonic(), self.known
        with suppress(Exception):  # a run goes on without warnings, too
            self.known = before | set(state.get_draining_nodes())
        return self.known != before


def assigned_device(gpus: float) -> torch.device:
    """What Ray gave this worker. Without a GPU of its own it takes none, though torch may see all
    of the machine; with one that torch does not see, it would train for days on the CPU."""
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            f"a GPU is assigned, and torch {torch.__version__} sees none: its build is for CUDA "
            f"{torch.version.cuda or '(none: a CPU wheel)'}, which needs a matching driver; "
            "install another wheel or driver, or use --gpus-per-worker 0"
        )
    return torch.device("cuda")


def start_facts(trial: Trial, sweep: Sweep) -> dict[str, Any]:
    """Who, where and when; a trial that goes on keeps its first start and the time it has used."""
    saved = Store(sweep.storage).get(trial.id)
    before = saved["trial"] if saved else {}
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


def trial_metrics(record: Record) -> dict[str, Any]:
    """What searchers, schedulers, trackers and the live table see of a trial."""
    trial = record["trial"]
    metrics: dict[str, Any] = {"status": trial["status"], "error": trial.get("error")}
    if trial.get("warning"):
        metrics["warning"] = trial["warning"]
    if not record["history"]:
        return metrics
    last = record["history"][-1]
    spent = last["epsilon"].get(record["plan"]["accountant"])
    return {
        **metrics,
        "accuracy": record["metrics"]["accuracy"],
        "epoch": last["epoch"],
        "seconds": trial.get("seconds"),
        "step": last["step"],
        "epsilon": 0.0 if spent is None else spent,
        "guarantee": record["privacy"].get("guarantee", ""),
        **{f"epsilon_{name}": value for name, value in last["epsilon"].items()},
        "loss": last["train_loss"],
        "dev_loss": dev_loss(last),
        "sigma": record["privacy"]["sigma"],
        "examples_per_second": record["cost"]["examples_per_second"],
        "train_seconds": last["train_seconds"],
    }


class LastRecords(Callback):
    """Follows Tune's events, on the driver: such a trial's own process is gone."""

    def __init__(self, storage: str) -> None:
        self.storage = storage
        self.steps: dict[str, int] = {}  # that were saved when a trial was last restarted

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if (trial.last_result or {}).get("status") not in SETTLED:
            ended = Trial.from_config(trial.config["trial"])
            settle(self.storage, ended, "stopped", "stopped early by the scheduler")

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Only restarts without a newer saved state count: the limit moves on with the trial."""
        identity = Trial.from_config(trial.config["trial"]).id
        step = SweepState(self.storage).saved_step(identity)
        if step > self.steps.get(identity, 0):
            self.steps[identity] = step
            trial.max_failures = trial.num_failures + RETRIES

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # A full disk is not its fault: it goes on when there is room.
        if not (has_restarts_left(trial) or no_room(str(trial.get_error()))):
            reason = f"given up after restarts: {last_error(trial)}"
            settle(self.storage, Trial.from_config(trial.config["trial"]), "failed", reason)


def no_room(reason: str) -> str:
    """What a trial said that found its disk full or its store away; empty: it ended otherwise."""
    _, name, said = " ".join(reason.split()).rpartition(f"{NoRoom.__name__}: ")
    return said if name else ""
