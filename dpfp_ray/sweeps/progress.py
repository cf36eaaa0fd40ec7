"""What people see of a running sweep: a live table, and gauges for Prometheus and Grafana.

Gauges go through `ray.util.metrics`, as `ray_dpfp_…`. A trial sets its gauges at each report and at
each save; the driver counts trials. Ray forgets a gauge that was not set for some 20 seconds, so
the dashboard looks back with `last_over_time`. Tags are few and public: no paths, no seeds.
"""

import math
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import TracebackType
from typing import Any

import ray
from ray.tune import Callback
from ray.util.metrics import Gauge
from rich.live import Live
from rich.table import Table

from dpfp_ray.plan.method_spec import FIRST_MODE, modes_of
from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.privacy.ledger_entries import Spent
from dpfp_ray.privacy.statement import guarantee
from dpfp_ray.sweeps.trial import SETTLED, Trial, given_up, has_restarts_left, last_error
from dpfp_ray.system.terminal import LINE_EVERY_SECONDS, clock, stderr
from dpfp_ray.training.loop import State

SHOWN = 12
REFRESH_SECONDS = 0.5


class LiveTable(Callback):
    """Follows Tune's events."""

    def __init__(self, title: str, total: int, done: int, varied: list[str]) -> None:
        """`done` of the `total` trials were finished before."""
        self.title = title
        self.total = total
        self.before = self.done = done
        self.varied = varied
        self.started = self.shown_at = time.monotonic()
        self.trials: list[Any] = []
        self.live: Live | None = None
        self.said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Through Ray Client the table is pickled to where Tune runs; a terminal cannot follow."""
        return {**self.__dict__, "live": None, "trials": []}

    def __enter__(self) -> "LiveTable":
        if self.done:
            stderr.print(f"{self.done} of {self.total} trials are finished already")
        if sys.stderr.isatty():
            self.live = Live(
                self._table(),
                console=stderr,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
            )
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self.trials = trials
        now = time.monotonic()
        if self.live is not None and now - self.shown_at > REFRESH_SECONDS:
            self.shown_at = now
            self.live.update(self._table(), refresh=True)
        elif self.live is None and now - self.shown_at > LINE_EVERY_SECONDS:
            self.shown_at = now
            stderr.print(self._state_of_all(), markup=False)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if result.get("warning"):
            self._say_once(f"warning: {result['warning']}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if has_restarts_left(trial):
            self._say_restart(trial)
        else:
            self._say(trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say_restart(trial)

    def _say(self, trial: Any) -> None:
        """A line for each finished trial: the only output where there is no terminal."""
        self.done += 1
        stderr.print(
            f"[{self.done}/{self.total}]  {self._line(trial, _outcome(trial))}", markup=False
        )

    def _say_restart(self, trial: Any) -> None:
        self._say_once(f"again:  {self._line(trial, last_error(trial))}")  # Tune may tell twice

    def _line(self, trial: Any, end: str) -> str:
        facts = [f"{name} {_short(value)}" for name, value in _facts(trial, self.varied)]
        return "  ".join([*facts, end])

    def _say_once(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            stderr.print(line, markup=False)

    def _state_of_all(self) -> str:
        """One line: how many are done, how good the best is, how long it takes."""
        done = [t for t in self.trials if t.is_finished()]
        running = [t for t in self.trials if t.status == "RUNNING"]
        best = self._best()
        elapsed = time.monotonic() - self.started
        left = elapsed / len(done) * (self.total - self.done) if done else None
        return (
            f"{self.done} of {self.total} done, "
            + (f"{len(running)} running" if running or done else "workers start")
            + (f", best {_result(best)['accuracy']:.4f}" if best else "")
            + f", {clock(elapsed)} gone"
            + (f", about {clock(left)} left" if left is not None else "")
        )

    def _best(self) -> Any:
        scored = [t for t in self.trials if "accuracy" in _result(t)]
        return max(scored, key=lambda t: _result(t)["accuracy"], default=None)

    def _table(self) -> Table:
        done = [t for t in self.trials if t.is_finished()]
        running = [t for t in self.trials if t.status == "RUNNING"]
        best, caption = self._best(), self._state_of_all()
        table = Table(
            *self.varied, "state", "epoch", "accuracy", "ε spent", title=self.title, caption=caption
        )
        rest = sorted(
            (t for t in done if t is not best), key=lambda t: -_result(t).get("accuracy", -1.0)
        )
        chosen = running + ([best] if best and best not in running else []) + rest
        for trial in chosen[:SHOWN]:
            result, state = _result(trial), status_of(trial)
            if state == "running" and "status" not in result:
                state = "starts"
            table.add_row(
                *(_short(dict(_facts(trial, self.varied)).get(name)) for name in self.varied),
                state,
                str(result.get("epoch", "")),
                f"{result['accuracy']:.4f}" if "accuracy" in result else "",
                _spent(result),
                style="bold" if trial is best else "",
            )
        return table


class SealedTable(LiveTable):
    """Of a selection: that it runs, and for how long. How many trials there are, or are finished,
    is part of what the selection's theorem keeps secret."""

    def __enter__(self) -> "SealedTable":
        self.done = 0
        super().__enter__()
        if self.live is None:
            stderr.print("selection in progress; only its winner will be shown")
        return self

    def _say(self, trial: Any) -> None:
        pass

    def _say_once(self, line: str) -> None:
        pass

    def _state_of_all(self) -> str:
        return f"selection in progress, {clock(time.monotonic() - self.started)} gone"

    def _table(self) -> Table:
        return Table(self._state_of_all(), title=self.title)


def _result(trial: Any) -> dict[str, Any]:
    """What a trial has reported last."""
    return trial.last_result or {}


def _facts(trial: Any, varied: list[str]) -> list[tuple[str, Any]]:
    config = trial.config["trial"]
    values = {**config["plan"], **config}
    if len(modes_of(values.get("method"))) < 2:
        values.pop("mode", None)
    return [(name, values[name]) for name in varied if values.get(name) is not None]


def ending(trial: Any) -> str:
    """How a Tune trial ended; a trial that last reported that it runs was stopped."""
    status = "failed" if trial.status == "ERROR" else _result(trial).get("status")
    return status if status in SETTLED else "stopped"


def status_of(trial: Any) -> str:
    """A Tune trial's state in the words of records."""
    if trial.status == "RUNNING":
        return "running"
    return ending(trial) if trial.is_finished() else "waiting"


def _outcome(trial: Any) -> str:
    result, end = _result(trial), ending(trial)
    if end == "failed":
        return f"failed: {result.get('error') or given_up(trial)}"
    end = "done" if end == "finished" else end
    if "accuracy" not in result:
        return end
    spent = f"  ε {_spent(result)}" if _spent(result) else ""
    return f"{end}  accuracy {result['accuracy']:.4f}{spent}"


def _spent(result: dict[str, Any]) -> str:
    """ε by the plan's accountant; with a † if it is only nominal."""
    mark = "†" if result.get("nominal") else ""
    return f"{result['epsilon']:.3f}{mark}" if result.get("epsilon") else ""


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


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
REFRESH_SECONDS = 5.0  # well within the time after which Ray forgets a gauge
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
            dpfp_sigma=self.sigma,
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
            dpfp_sigma=self.sigma,
            dpfp_examples_per_second=progress["rows"] / max(progress["train_seconds"], 1e-9),
            dpfp_step=progress["step"],
        )

    def _show(self, spent: Mapping[str, float | None], **values: float | None) -> None:
        if self.silent:
            return
        for name, value in values.items():
            put(name, value, self.tags)
        for accountant, value in spent.items():
            guarantee = self.guarantees[accountant]
            tags = {**self.tags, "guarantee": guarantee, "accountant": accountant}
            put("dpfp_epsilon_spent", value, tags)


def dev_loss(entry: Mapping[str, Any]) -> float | None:
    """Of an entry of the history, on the first dev split."""
    scores: Mapping[str, float] = next(iter(entry.get("dev", {}).values()), {})
    return scores.get("loss")


def nothing_known() -> Spent | None:
    return None


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
        spent: Callable[[], Spent | None] = nothing_known,
    ) -> None:
        self.sweep = clean(sweep)
        self.spent = spent
        self.planned = planned
        self.before = Counter(
            (method_tag(record["plan"]), record["trial"]["status"])
            for record in before
            if record["trial"].get("status") in SETTLED
        )
        self.shown_at = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "spent": nothing_known}  # Tune writes callbacks to disk

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if time.monotonic() - self.shown_at > REFRESH_SECONDS:
            self._show(trials)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._show(trials)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._show(trials)

    def _show(self, trials: list[Any]) -> None:
        self.shown_at = time.monotonic()
        counts, restarts = Counter(self.before), Counter[str]()
        for trial in trials:
            method = method_tag(trial.config["trial"]["plan"])
            counts[method, status_of(trial)] += 1
            restarts[method] += trial.num_failures
        put("dpfp_trials_planned", self.planned, {"sweep": self.sweep})
        spent = self.spent()
        if spent is not None:
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
