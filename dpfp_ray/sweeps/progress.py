"""What people see of a running sweep: a live table, gauges for Prometheus, and trackers.

Gauges go through `ray.util.metrics`, as `ray_dpfp_…`. A trial sets its gauges at each report and at
each save; the driver counts trials. Ray forgets a gauge that was not set for some 20 seconds, so
the dashboard looks back with `last_over_time`. Tags are few and public: no paths, no seeds.

`--tracker` uses Ray's own callbacks, one run a trial. They are not given to Tune as they are: they
would show `trial/plan/learning_rate` for `learning_rate` and Tune's made-up names for trials, call
trials that failed finished, and write to a folder that goes when the sweep ends.
"""

import logging
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from ray.tune import Callback
from ray.tune.logger import LoggerCallback, TBXLoggerCallback
from ray.util.metrics import Gauge
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dpfp_ray.plan.method_spec import FIRST_MODE, MARKS, modes_of
from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.privacy.ledger_entries import Spent
from dpfp_ray.privacy.statement import guarantee
from dpfp_ray.results.store import file_name
from dpfp_ray.sweeps.trial import SETTLED, Trial, has_restarts_left, last_error
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import one_line
from dpfp_ray.system.terminal import (
    LINE_EVERY_SECONDS,
    clock,
    print_prose,
    queue_seconds,
    stderr,
    that_fit,
    time_left,
    whole_seconds,
)
from dpfp_ray.training.loop import State

SHOWN = 12  # rows of the live table
LOGGED = 4  # running trials that a log's line a minute is followed by
WIDEST = 24  # characters of a setting in the live table; a path may have any number
TABLE_SECONDS = 0.5  # between two drawings of it


class LiveTable(Callback):
    """Follows Tune's events on a terminal; elsewhere it prints a line for each trial that ends, and
    one a minute. `done` of the `total` trials were finished before, in `seconds` each."""

    def __init__(
        self,
        title: str,
        total: int,
        done: int,
        varied: list[str],
        seconds: Iterable[float] = (),
    ) -> None:
        self.title, self.total, self.done, self.varied = title, total, done, varied
        self.seconds = list(seconds)
        self.heard_at: dict[int, float] = {}  # when a trial (its id()) started or last reported
        self.started = self.shown_at = time.monotonic()
        self.trials: list[Any] = []
        self.live: Live | None = None
        self.said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Through Ray Client the table is pickled to where Tune runs; a terminal cannot follow."""
        return {**self.__dict__, "live": None, "trials": [], "heard_at": {}}

    def __enter__(self) -> "LiveTable":
        if self.done:
            stderr.print(f"{self.done} of {self.total} trials are finished already")
        if sys.stderr.isatty():
            options: Any = {"auto_refresh": False, "transient": True, "redirect_stdout": False}
            self.live = Live(self.table(), console=stderr, **options)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self.trials = trials
        now = time.monotonic()
        if self.live is not None and now - self.shown_at > TABLE_SECONDS:
            self.shown_at = now
            self.live.update(self.table(), refresh=True)
        elif self.live is None and now - self.shown_at > LINE_EVERY_SECONDS:
            self.shown_at = now
            _say(self._summary())
            for line in self._running_lines():
                _say(line)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.heard_at[id(trial)] = time.monotonic()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.heard_at[id(trial)] = time.monotonic()
        if result.get("warning"):
            self._say_once(f"warning: {result['warning']}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.done += 1
        _say(f"[{self.done}/{self.total}]  {self._line(trial, _outcome(trial))}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        tell = self.on_trial_recover if has_restarts_left(trial) else self.on_trial_complete
        tell(iteration, trials, trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say_once(f"again:  {self._line(trial, last_error(trial))}")  # Tune may tell twice

    def _line(self, trial: Any, end: str) -> str:
        settings = _settings(trial, self.varied).items()
        return "  ".join([*(f"{name} {_short(value)}" for name, value in settings), end])

    def _say_once(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            _say(line)

    def _summary(self) -> str:
        """One line: how many are done, how good the best is, how long it takes."""
        ended = sum(trial.is_finished() for trial in self.trials)
        running = sum(trial.status == "RUNNING" for trial in self.trials)
        best, elapsed = self._best(), time.monotonic() - self.started
        parts = [
            f"{self.done} of {self.total} done",
            f"{running} running" if running or ended else "workers start",
            f"best {_result(best)['accuracy']:.4f}" if best else "",
            f"{clock(elapsed)} gone",
            time_left(self.seconds_left()),
        ]
        return ", ".join(filter(None, parts))

    def _running_lines(self) -> list[str]:
        """The first few running trials of which it is known when they end, for a log."""
        running = [trial for trial in self.trials if trial.status == "RUNNING"]
        ends = [(trial, time_left(self._trial_seconds_left(trial))) for trial in running]
        return [
            "    " + "  ".join(filter(None, [self._line(trial, f"epoch {_epochs(trial)}"), end]))
            for trial, end in ends
            if end and _epochs(trial)
        ][:LOGGED]

    def seconds_left(self) -> float | None:
        """Until the sweep's running trials have ended, and those that wait for a place."""
        running = [trial for trial in self.trials if trial.status == "RUNNING"]
        waiting = max(0, self.total - self.done - len(running))
        each = self._typical_seconds()
        return queue_seconds([self._trial_seconds_left(t, each) for t in running], waiting, each)

    def _trial_seconds_left(self, trial: Any, typical: float | None = None) -> float | None:
        """From its epochs so far; before the first one ends, from the other trials."""
        whole, share = _whole_seconds(trial), _share(trial)
        if whole is None:
            whole, share = self._typical_seconds() if typical is None else typical, 0.0
        if whole is None:
            return None
        now = time.monotonic()
        return max(0.0, whole * (1 - share) - (now - self.heard_at.get(id(trial), now)))

    def _typical_seconds(self) -> float | None:
        """The mean over trials that ended, and over those that run as they will have taken."""
        wholes = list(self.seconds)
        for trial in self.trials:
            result = _result(trial)
            if not trial.is_finished():
                wholes.append(_whole_seconds(trial) or 0.0)
            elif status_of(trial) in ("finished", "stopped"):
                wholes.append(result.get("seconds") or 0.0)
        wholes = [seconds for seconds in wholes if seconds]
        return sum(wholes) / len(wholes) if wholes else None

    def _best(self) -> Any:
        scored = [t for t in self.trials if "accuracy" in _result(t)]
        return max(scored, key=lambda t: _result(t)["accuracy"], default=None)

    def table(self) -> Group:
        """Trials that run, then the best and others that have ended; columns that fit the terminal,
        and no cell with a second line."""
        begun = [t for t in self.trials if t.status == "RUNNING" or t.is_finished()]
        begun.sort(key=lambda t: (t.is_finished(), -_result(t).get("accuracy", -1.0)))
        best = self._best()
        if best in begun[SHOWN:]:
            begun[SHOWN - 1] = best
        visible = begun[:SHOWN]
        rows = [self._cells(trial) for trial in visible]
        optional = (*self.varied, "epoch", "ε spent")
        names = (*self.varied, "state", "epoch", "accuracy", "ε spent", "time left")
        columns = {name: [row[name] for row in rows] for name in names}
        kept = that_fit(columns, optional, gap=3, width=stderr.width - 4)  # 4: the outer lines
        table = Table()
        for name in kept:
            table.add_column(name, no_wrap=True)
        for trial, row in zip(visible, rows, strict=True):
            table.add_row(*(row[name] for name in kept), style="bold" if trial is best else "")
        lines = (
            Text(line, no_wrap=True, overflow="ellipsis") for line in (self.title, self._summary())
        )
        title, summary = lines
        return Group(title, table, summary)

    def _cells(self, trial: Any) -> dict[str, str]:
        result, state = _result(trial), status_of(trial)
        settings = _settings(trial, self.varied)
        runs = trial.status == "RUNNING"
        left = self._trial_seconds_left(trial) if runs else None
        return {
            **{name: _clipped(_short(settings.get(name))) for name in self.varied},
            "state": "starts" if state == "running" and "status" not in result else state,
            "epoch": _epochs(trial),
            "accuracy": f"{result['accuracy']:.4f}" if "accuracy" in result else "",
            "ε spent": _spent(result),
            "time left": clock(left) if left and left >= 1 else "",
        }


def _result(trial: Any) -> dict[str, Any]:
    """What a trial has reported last."""
    return trial.last_result or {}


def _say(line: str) -> None:
    print_prose(line, stderr)


def _planned_epochs(trial: Any) -> float:
    return float(trial.config["trial"]["plan"].get("epochs") or 0.0)


def _share(trial: Any) -> float:
    """The share of its planned epochs that a trial has reported."""
    planned = _planned_epochs(trial)
    return min(1.0, _result(trial).get("epoch", 0) / planned) if planned else 0.0


def _epochs(trial: Any) -> str:
    """`2 of 3`"""
    epoch, planned = _result(trial).get("epoch"), _planned_epochs(trial)
    return "" if not epoch else f"{epoch} of {math.ceil(planned)}" if planned else str(epoch)


def _whole_seconds(trial: Any) -> float | None:
    result = _result(trial)
    return whole_seconds(result.get("seconds"), result.get("epoch"), _planned_epochs(trial))


def _clipped(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def _settings(trial: Any, varied: list[str]) -> dict[str, Any]:
    config = trial.config["trial"]
    values = {**config["plan"], **config}
    if len(modes_of(values.get("method"))) < 2:
        values.pop("mode", None)
    return {name: values[name] for name in varied if values.get(name) is not None}


def status_of(trial: Any, ended: bool = False) -> str:
    """A Tune trial's state in the words of records; one that ended while it said that it runs was
    stopped. `ended` is for those of which Tune says it before their status changes."""
    if not (ended or trial.is_finished()):
        return "running" if trial.status == "RUNNING" else "waiting"
    status = "failed" if trial.status == "ERROR" else _result(trial).get("status")
    return status if status in SETTLED else "stopped"


def _outcome(trial: Any) -> str:
    result, end = _result(trial), status_of(trial, ended=True)
    if end == "failed":
        reason = result.get("error") or f"given up after restarts: {last_error(trial)}"
        return f"failed: {reason}"
    end = "done" if end == "finished" else end
    if "accuracy" not in result:
        return end
    spent = f"  ε {_spent(result)}" if _spent(result) else ""
    return f"{end}  accuracy {result['accuracy']:.4f}{spent}"


def _spent(result: dict[str, Any]) -> str:
    """ε by the plan's accountant; with † or § if it is only nominal or claimed."""
    mark = MARKS.get(result.get("guarantee", ""), "")
    return f"{result['epsilon']:.3f}{mark}" if result.get("epsilon") else ""


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


# --- gauges -------------------------------------------------------------------------------------

TRIAL_TAGS = ("sweep", "trial", "method", "task", "epsilon_budget", "guarantee")
COUNT_TAGS = ("sweep", "method", "status")
LEDGER_TAGS = ("sweep", "guarantee")
# Names as code sets them; Prometheus has them with `ray_` in front. Ray wants plain ASCII here.
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dpfp_loss": ("mean training loss of a row in this epoch, if shown", TRIAL_TAGS),
    "dpfp_dev_loss": ("mean dev loss of a row after the last epoch", TRIAL_TAGS),
    "dpfp_accuracy": ("dev accuracy after the last epoch", TRIAL_TAGS),
    "dpfp_epsilon_spent": ("epsilon spent so far, by accountant", (*TRIAL_TAGS, "accountant")),
    "dpfp_sigma": ("standard deviation of the noise", TRIAL_TAGS),
    "dpfp_examples_per_second": ("training rows a second, evaluation not counted", TRIAL_TAGS),
    "dpfp_step": ("training steps done", TRIAL_TAGS),
    "dpfp_trials": ("trials of the sweep, by status", COUNT_TAGS),
    "dpfp_trials_planned": ("trials that the sweep will have", ("sweep",)),
    "dpfp_ledger_epsilon": (
        "epsilon that the people in the data have paid for everything, planned runs included",
        LEDGER_TAGS,
    ),
    "dpfp_ledger_total": ("epsilon that they may ever pay", LEDGER_TAGS),
    "dpfp_restarts": ("times that a trial's process or node was lost", ("sweep", "method")),
}
STATUSES = ("waiting", "running", *SETTLED)
GAUGE_SECONDS = 5.0  # well within the time after which Ray forgets a gauge
LONGEST = 64  # characters of a tag; a plan's hash has 16


class TrialGauges:
    """One trial's gauges; silent where there is no Ray, or if the trial is sealed.

    A report has all of them. A save, which a long epoch has many of, has what changes in between.
    """

    def __init__(self, trial: Trial, sweep: str, silent: bool = False) -> None:
        self.silent = silent
        self.tags = trial_tags(trial.plan, trial.id, sweep)
        self.guarantees = {name: guarantee(trial.plan, name) for name in ACCOUNTANTS}
        self.sigma = trial.noise_multiplier * trial.plan.C if trial.plan.private else None

    def report(self, record: Mapping[str, Any]) -> None:
        """Show a result's record as it stands after an epoch."""
        last = record["history"][-1]
        self._show(
            last["epsilon"],
            dpfp_accuracy=record["metrics"]["accuracy_last"],
            dpfp_loss=last["train_loss"],
            dpfp_dev_loss=dev_loss(last),
            dpfp_examples_per_second=record["cost"]["examples_per_second"],
            dpfp_step=last["step"],
        )

    def save(self, state: State) -> None:
        """Show where a saved state stands, in the middle of an epoch."""
        progress = state["progress"]
        rows = state.get("loss_rows")
        self._show(
            state["epsilon"],
            dpfp_loss=state["loss_sum"] / rows if rows else None,
            dpfp_examples_per_second=progress["rows"] / max(progress["train_seconds"], 1e-9),
            dpfp_step=progress["step"],
        )

    def _show(self, spent: Mapping[str, float | None], **values: float | None) -> None:
        if self.silent:
            return
        for name, value in {"dpfp_sigma": self.sigma, **values}.items():
            put(name, value, self.tags)
        for accountant, value in spent.items():
            tags = {"guarantee": self.guarantees[accountant], "accountant": accountant}
            put("dpfp_epsilon_spent", value, {**self.tags, **tags})


def dev_loss(entry: Mapping[str, Any]) -> float | None:
    """The loss on the first dev split, in an entry of the history."""
    scores: Mapping[str, float] = next(iter(entry.get("dev", {}).values()), {})
    return scores.get("loss")


class TrialCounts(Callback):
    """Follows Tune on the driver: how many trials run, are finished, have failed.

    `before` are the records of trials that were settled before this call, so that a sweep which
    goes on counts on. `spent` tells what the ledger says.
    """

    def __init__(
        self,
        sweep: str,
        planned: int,
        before: Iterable[Mapping[str, Any]] = (),
        spent: Callable[[], Spent | None] | None = None,
    ) -> None:
        self.sweep, self.planned, self.spent = clean(sweep), planned, spent
        self.before = Counter(
            (method_tag(record["plan"]), record["trial"]["status"])
            for record in before
            if record["trial"].get("status") in SETTLED
        )
        self.shown_at = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "spent": None}  # Tune writes callbacks to disk

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if time.monotonic() - self.shown_at > GAUGE_SECONDS:
            self.on_trial_complete(iteration, trials, None)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.on_trial_complete(iteration, trials, trial)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.shown_at = time.monotonic()
        counts, restarts = Counter(self.before), Counter[str]()
        for each in trials:
            method = method_tag(each.config["trial"]["plan"])
            counts[method, status_of(each)] += 1
            restarts[method] += each.num_failures
        put("dpfp_trials_planned", self.planned, {"sweep": self.sweep})
        if self.spent is not None and (spent := self.spent()) is not None:
            tags = {"sweep": self.sweep, "guarantee": spent.guarantee}
            put("dpfp_ledger_epsilon", spent.private_epsilon, tags)
            put("dpfp_ledger_total", spent.total, tags)
        for method in {method for method, _ in counts}:
            tags = {"sweep": self.sweep, "method": method}
            put("dpfp_restarts", restarts[method], tags)
            for status in STATUSES:  # zeros too: "no failures" must not look like "no data"
                put("dpfp_trials", counts[method, status], {**tags, "status": status})


def trial_tags(plan: Plan, identity: str, sweep: str) -> dict[str, str]:
    return {
        "sweep": clean(sweep),
        "trial": clean(identity),
        "method": method_tag(plan.to_dict()),
        "task": re.sub(r"[^a-z0-9]", "", plan.task.lower())[:LONGEST],
        "epsilon_budget": f"{plan.epsilon:g}" if plan.epsilon is not None else "none",
        "guarantee": guarantee(plan),
    }


def method_tag(plan: Mapping[str, Any]) -> str:
    """As `dpfp compare --methods` names it: `dpfp` is the paper's mode, others are named."""
    mode = plan.get("mode", FIRST_MODE)
    return clean(f"{plan.get('method')}" + ("" if mode == FIRST_MODE else f":{mode}"))


def clean(text: str) -> str:
    """A name as one short word of plain characters."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", text)[:LONGEST]


def put(name: str, value: float | None, tags: dict[str, str]) -> None:
    """Set a gauge, if there is a number to show and a Ray to show it."""
    if value is None or not math.isfinite(value) or not ray.is_initialized():
        return
    try:
        gauge(name).set(float(value), tags)
    except Exception as error:  # a gauge that cannot be set must not cost a trial
        warnings.warn(f"metric {name} is not exported: {error}", stacklevel=2)


@cache
def gauge(name: str) -> Gauge:
    description, tags = GAUGES[name]
    return Gauge(name, description, tag_keys=tags)


# --- trackers -----------------------------------------------------------------------------------

# Each tracker's module and what installs it.
PACKAGES = {
    "mlflow": ("mlflow", "mlflow-skinny"),
    "wandb": ("wandb", "wandb"),
    "tensorboard": ("tensorboardX", "tensorboardX"),
}
# The numbers that a trial reports (`experiment.trial_metrics`), without Tune's own.
PLOTTED = ("accuracy", "dev_loss", "loss", "epsilon", *(f"epsilon_{name}" for name in ACCOUNTANTS))
PLOTTED += ("sigma", "examples_per_second", "train_seconds", "epoch")


def make_tracker(name: str, sweep: str, storage: str) -> "Tracked":
    """A Tune callback, ready to work; a UserError if a package, key or server is missing."""
    module, package = PACKAGES[name]
    if find_spec(module) is None:
        raise UserError(f"tracker {name} needs a package; pip install {package}")
    if "://" not in storage:
        folder = Path(storage) / name
    elif name == "tensorboard":
        raise UserError(
            f"tracker tensorboard writes to a folder, but results go to {storage.split('?')[0]}; "
            f"use --storage FOLDER, or --tracker mlflow with MLFLOW_TRACKING_URI"
        )
    else:
        folder = Path(tempfile.gettempdir()) / f"dpfp-{name}-{mark(storage)}"
    logging.getLogger(module).setLevel(logging.WARNING)
    inner: LoggerCallback
    if name == "mlflow":
        inner = mlflow_callback(sweep, storage, folder)
    elif name == "wandb":
        from ray.air.integrations.wandb import WandbLoggerCallback

        project = os.environ.get("WANDB_PROJECT", "dpfp-ray")
        # A trial that goes on after a crash goes on in its own run. Of our environment, Ray passes
        # only the key on to the processes that write.
        mode = os.environ.get("WANDB_MODE", "online")
        inner = WandbLoggerCallback(project=project, group=sweep, resume="allow", mode=mode)
    else:
        inner = TBXLoggerCallback()
    try:
        inner.setup()  # Tune would do it when all else is up, and fail with pages of traceback
    except Exception as error:
        raise UserError(f"tracker {name} does not start: {one_line(error)}") from None
    return Tracked(name, inner, sweep, storage, folder)


def mlflow_callback(sweep: str, storage: str, folder: Path) -> LoggerCallback:
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    tags = {"dpfp.store": mark(storage)}

    class Mlflow(MLflowLoggerCallback):
        """Takes up the run that a killed sweep has left open, instead of a second one."""

        def log_trial_start(self, trial: Any) -> None:
            if trial not in self._trial_runs:
                wanted = {**tags, "trial_name": str(trial)}
                clauses = [f"tags.`{key}` = '{value}'" for key, value in wanted.items()]
                open_runs = self.mlflow_util._get_client().search_runs(
                    [str(self.mlflow_util.experiment_id)],
                    " and ".join([*clauses, "attributes.status = 'RUNNING'"]),
                )
                if open_runs:
                    self._trial_runs[trial] = open_runs[0].info.run_id
            super().log_trial_start(trial)

    address = os.environ.get("MLFLOW_TRACKING_URI")
    if not address:
        folder.mkdir(parents=True, exist_ok=True)
        address = f"sqlite:///{folder}/mlflow.db"  # MLflow 3 wants no plain files any more
    return Mlflow(tracking_uri=address, experiment_name=sweep, tags=tags)


class TrackedTrial:
    """What Ray's callbacks may see of a trial: its id, its plan, and what its ε is worth."""

    def __init__(self, trial: Trial, sweep: str, storage: str, folder: Path) -> None:
        self.name = trial.id
        # W&B never frees an id: the same trial of another sweep must have another.
        self.trial_id = f"{file_name(trial.id)}-{mark(sweep, storage)}"
        self.experiment_dir_name = sweep
        self.folder = folder / file_name(trial.id)
        plan = {**trial.plan.to_dict(), "labels": ",".join(trial.plan.labels or ()) or None}
        self.config = self.evaluated_params = {
            **{name: value for name, value in plan.items() if value is not None},
            "noise_multiplier": trial.noise_multiplier,
            "seed_index": trial.seed_index,
            "plan_hash": trial.plan.hash,
            "guarantee": guarantee(trial.plan),
            "sweep": sweep,
        }

    @property
    def local_path(self) -> str:
        """Made only for a tracker that asks."""
        self.init_local_path()
        return str(self.folder)

    def init_local_path(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return self.name


class Tracked(Callback):
    """Passes Tune's events on. A tracker that breaks down costs a warning, never a trial."""

    def __init__(
        self, name: str, inner: LoggerCallback, sweep: str, storage: str, folder: Path
    ) -> None:
        self.name, self.inner, self.place = name, inner, (sweep, storage, folder)
        self.views: dict[str, TrackedTrial] = {}

    def setup(self, *_: Any, **info: Any) -> None:
        self._tell(self.inner.setup)  # again: through Ray Client this is another process

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._tell(self.inner.log_trial_start, self._view(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "step" in result:  # a trial that only says that it failed has nothing to plot
            values = {name: float(result[name]) for name in PLOTTED if result.get(name) is not None}
            # Ray's callbacks plot over this field; here that is the training step.
            values["training_iteration"] = int(result["step"])
            self._tell(self.inner.log_trial_result, iteration, self._view(trial), values)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # For Tune a trial that reports its own failure has done its work.
        failed = _result(trial).get("status") == "failed"
        self._tell(self.inner.log_trial_end, self._view(trial), failed=failed)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._tell(self.inner.log_trial_end, self._view(trial), failed=True)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._tell(self.inner.on_experiment_end, trials)

    def _view(self, trial: Any) -> TrackedTrial:
        if trial.trial_id not in self.views:
            own = Trial.from_config(trial.config["trial"])
            self.views[trial.trial_id] = TrackedTrial(own, *self.place)
        return self.views[trial.trial_id]

    def _tell(self, event: Callable[..., Any], *arguments: Any, **keys: Any) -> None:
        try:
            event(*arguments, **keys)
        except Exception as error:
            warnings.warn(f"tracker {self.name} missed an event: {one_line(error)}", stacklevel=2)


def mark(*texts: str) -> str:
    return blake2b("\n".join(texts).encode(), digest_size=4).hexdigest()
