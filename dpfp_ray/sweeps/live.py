"""The one live table of a sweep: trials, best so far, ε, time left; in place of Tune's output."""

import sys
import time
from types import TracebackType
from typing import Any

from ray.tune import Callback
from rich.live import Live
from rich.table import Table

from dpfp_ray.plan.method_spec import modes_of
from dpfp_ray.sweeps.trial import given_up, has_restarts_left, last_error
from dpfp_ray.system.terminal import LINE_EVERY_SECONDS, clock, stderr

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
            result = _result(trial)
            table.add_row(
                *(_short(dict(_facts(trial, self.varied)).get(name)) for name in self.varied),
                _state(trial),
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


def _state(trial: Any) -> str:
    if trial.status == "RUNNING":
        return "running" if "status" in _result(trial) else "starts"
    return _ending(trial)


def _ending(trial: Any) -> str:
    """How a trial ended; one that last reported that it runs was stopped by the scheduler."""
    if trial.status == "ERROR":
        return "failed"
    status = _result(trial).get("status", "stopped")
    return {"finished": "done", "running": "stopped"}.get(status, status)


def _outcome(trial: Any) -> str:
    result, ending = _result(trial), _ending(trial)
    if ending == "failed":
        return f"failed: {result.get('error') or given_up(trial)}"
    if "accuracy" not in result:
        return ending
    spent = f"  ε {_spent(result)}" if _spent(result) else ""
    return f"{ending}  accuracy {result['accuracy']:.4f}{spent}"


def _spent(result: dict[str, Any]) -> str:
    """ε by the plan's accountant; with a † if it is only nominal."""
    mark = "†" if result.get("nominal") else ""
    return f"{result['epsilon']:.3f}{mark}" if result.get("epsilon") else ""


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
