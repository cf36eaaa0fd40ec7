"""What Prometheus and Grafana see of a sweep: gauges through `ray.util.metrics`, as `ray_dpfp_…`.

A trial sets its gauges at each report and at each save, some microseconds every half minute or so;
the sweep's driver counts trials. Ray forgets a gauge that was not set for some 20 seconds, which
keeps the number of series down to what runs now; the dashboard looks back with `last_over_time`.

Tags are few and public: no paths, no seeds, no free text of any length.
"""

import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import ray
from ray.tune import Callback
from ray.util.metrics import Gauge

from dpfp_ray.plan.method_spec import FIRST_MODE
from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.privacy.ledger_entries import Spent
from dpfp_ray.privacy.statement import guarantee
from dpfp_ray.sweeps.trial import SETTLED, Trial
from dpfp_ray.training.loop import State
from dpfp_ray.training.record import Record

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

    def report(self, record: Record) -> None:
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


def status_of(trial: Any) -> str:
    """A Tune trial's state in our words; one that ended while "running" was stopped."""
    if trial.status in ("RUNNING", "ERROR"):
        return "running" if trial.status == "RUNNING" else "failed"
    if trial.status != "TERMINATED":
        return "waiting"
    last = (trial.last_result or {}).get("status")
    return last if last in SETTLED else "stopped"


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
