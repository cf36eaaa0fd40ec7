"""The one live table of a sweep: trials, best so far, ε, time left; in place of Tune's output."""

import sys
import time
from typing import Any

from ray.tune import Callback
from rich.live import Live
from rich.table import Table

from dpfp_ray.results import Store
from dpfp_ray.terminal import stderr
from dpfp_ray.trial import Trial

SHOWN = 12
DONE = ("TERMINATED", "ERROR")


class LiveTable(Callback):
    """Follows Tune's events; also settles the record of a trial that did not get to its end."""

    def __init__(self, title: str, total: int, slots: int, storage: str, varied: list[str]) -> None:
        self.title = title
        self.total = total
        self.slots = slots
        self.storage = storage
        self.varied = varied
        self.started = time.monotonic()
        self.done = 0
        self.trials: list[Any] = []
        self.live: Live | None = None

    def setup(
        self, stop: Any = None, num_samples: Any = None, total_num_samples: Any = None, **info: Any
    ) -> None:
        if sys.stderr.isatty():
            self.live = Live(self._table(), console=stderr, refresh_per_second=2, transient=True)
            self.live.start()

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self.trials = trials
        if self.live is not None:
            self.live.update(self._table())

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.trials = trials
        result = trial.last_result or {}
        if not result.get("finished") and not result.get("failed"):
            settle(self.storage, trial, "stopped", "stopped early by the scheduler")
        self._say(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.trials = trials
        settle(self.storage, trial, "failed", "its process died more often than is retried")
        self._say(trial)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        if self.live is not None:
            self.live.stop()

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()

    def _say(self, trial: Any) -> None:
        """A line for each finished trial: the only output where there is no terminal."""
        self.done += 1
        facts = "  ".join(f"{key} {_short(value)}" for key, value in _facts(trial, self.varied))
        outcome = _outcome(trial)
        stderr.print(f"[{self.done}/{self.total}] {facts}  {outcome}", markup=False)

    def _table(self) -> Table:
        done = [t for t in self.trials if t.status in DONE]
        running = [t for t in self.trials if t.status == "RUNNING"]
        scored = [t for t in self.trials if "accuracy" in (t.last_result or {})]
        best = max(scored, key=lambda t: t.last_result["accuracy"], default=None)
        elapsed = time.monotonic() - self.started
        left = elapsed / len(done) * (self.total - len(done)) if done else None
        caption = (
            f"{len(done)} of {self.total} done, {len(running)} running"
            + (f", best {best.last_result['accuracy']:.4f}" if best else "")
            + f", {_clock(elapsed)} gone"
            + (f", about {_clock(left)} left" if left is not None else "")
        )
        table = Table(
            *self.varied, "state", "epoch", "accuracy", "ε spent", title=self.title, caption=caption
        )
        rest = sorted(
            (t for t in done if t is not best),
            key=lambda t: -(t.last_result or {}).get("accuracy", -1.0),
        )
        chosen = running + ([best] if best and best not in running else []) + rest
        for trial in chosen[:SHOWN]:
            result = trial.last_result or {}
            table.add_row(
                *(_short(value) for _, value in _facts(trial, self.varied)),
                "running" if trial.status == "RUNNING" else _outcome(trial).split()[0],
                str(result.get("epoch", "")),
                f"{result['accuracy']:.4f}" if "accuracy" in result else "",
                f"{result['epsilon']:.3f}" if result.get("epsilon") else "",
                style="bold" if trial is best else "",
            )
        return table


def settle(storage: str, trial: Any, status: str, reason: str) -> None:
    """Give a trial that ended early its final status, keeping what it recorded before."""
    store = Store(storage)
    identity = trial_id(trial)
    known = store.get(identity)
    if known is None:
        plan = trial.config.get("trial", {}).get("plan", {})
        known = {"plan": plan, "plan_hash": "", "finished": False, "trial": {"id": identity}}
    if known["trial"].get("status") in ("finished", "failed"):
        return
    store.put({**known, "trial": {**known["trial"], "status": status, "error": reason}})


def trial_id(trial: Any) -> str:
    """Our id of a Tune trial; a searcher's trial says it in its first report."""
    config = trial.config.get("trial")
    if config:
        return Trial.from_config(config).id
    return str((trial.last_result or {}).get("id", trial.trial_id))


def _facts(trial: Any, varied: list[str]) -> list[tuple[str, Any]]:
    config = trial.config.get("trial", trial.config)
    values = {**config.get("plan", {}), **config}
    return [(name, values.get(name)) for name in varied]


def _outcome(trial: Any) -> str:
    result = trial.last_result or {}
    if result.get("failed"):
        return f"failed: {result.get('error', '')}"
    if trial.status == "ERROR":
        return "failed: its process died"
    if "accuracy" not in result:
        return "stopped"
    spent = f"  ε {result['epsilon']:.3f}" if result.get("epsilon") else ""
    word = "done" if result.get("finished") else "stopped"
    return f"{word}  accuracy {result['accuracy']:.4f}{spent}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
