"""What a person sees while a run is on, and a safe Ctrl-C.

All of them save the run every 30 seconds (`--save-every`), every epoch and on Ctrl-C. They differ
in what they show: `terminal` a progress bar, `notebook` (and wherever stderr is no terminal) plain
lines, `silent` nothing.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from dpfp_ray.data.terminal import LINE_EVERY_SECONDS, stderr
from dpfp_ray.plan.errors import UserError, unknown
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.signals import Interrupted
from dpfp_ray.privacy.spending import Spending
from dpfp_ray.privacy.statement import guarantee
from dpfp_ray.training.checkpoints import Saver, save_seconds, save_state
from dpfp_ray.training.loop import State

REFRESH_SECONDS = 0.5


class SilentReporter:
    """Says nothing. With a `folder`, keeps there what is needed to continue."""

    def __init__(
        self,
        plan: Plan,
        noise_multiplier: float,
        label: str,
        folder: Path | None,
        seed: int,
        seed_known: bool = False,
        data_mark: str | None = None,
        save_every: float | None = None,
    ) -> None:
        self.plan = plan
        self.spending = Spending(plan, noise_multiplier)
        self.epsilon_name = "nominal ε" if guarantee(plan) == "nominal" else "ε"
        self.label = label
        self.folder = folder
        self.saver: Saver | None = None
        if folder is not None:
            self.saver = Saver(
                lambda state: save_state(folder, state, seed, seed_known, data_mark),
                save_seconds(save_every),
            )
        self.accuracy: float | None = None
        self.dev_loss: float | None = None
        self.stop_signal: int | None = None  # the signal that asked to stop
        self.saving = False

    def __enter__(self) -> Self:
        self._handlers: dict[int, Any] = {}
        # Python lets only the main thread handle signals; in another, Ctrl-C is the caller's.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal is None:
            self.stop_signal = number
            with suppress(RuntimeError):  # the signal has interrupted another line on stderr
                self.say(
                    "stopping: this step ends, then the run is saved; once more stops it at once"
                    if self.saver
                    else "stopping after this step; nothing is saved, because there is no output"
                )
        elif not self.saving:  # the second does not wait for the step to end
            kept = "; the same command goes on from the last save" if self.saver else ""
            raise Interrupted(f"stopped at once{kept}", number)

    def step(
        self, done: int, loss: Callable[[], float | None], checkpoint: Callable[[], State]
    ) -> None:
        self.show_step(done, loss)
        if self.saver and (self.stop_signal or self.saver.due):
            self.save(self.saver, checkpoint)
        if self.stop_signal and done < self.plan.steps:
            raise Interrupted(
                f"stopped; saved in {self.folder}. The same command continues it."
                if self.folder
                else "stopped; nothing was saved, because no output was given",
                self.stop_signal,
            )

    def save(self, saver: Saver, checkpoint: Callable[[], State]) -> None:
        """Save to the end, whatever signals arrive."""
        self.saving = True
        try:
            saver.save_now(checkpoint)
        finally:
            self.saving = False

    def epoch(self, record: dict[str, Any], checkpoint: Callable[[], State]) -> None:
        scores = next(iter(record["dev"].values()))
        self.accuracy, self.dev_loss = scores["accuracy"], scores["loss"]
        if self.saver and record["step"] < self.plan.steps:
            self.save(self.saver, checkpoint)
        self.show_epoch(record)

    @staticmethod
    def say(message: str) -> None:
        """What the person should know besides the progress."""

    def show_step(self, done: int, loss: Callable[[], float | None]) -> None: ...

    def show_epoch(self, record: dict[str, Any]) -> None: ...

    def facts(self, done: int, loss: float | None) -> str:
        """What is known so far: training loss, if it may be shown; dev scores; ε."""
        shown = {"loss": loss, "dev loss": self.dev_loss, "acc": self.accuracy}
        facts = [f"{name} {value:.3f}" for name, value in shown.items() if value is not None]
        spent = self.spending.at_most(done)
        if spent is not None:
            facts.append(f"{self.epsilon_name} ≤ {spent:.2f}")
        return "  ".join(facts)


class LineReporter(SilentReporter):
    """A line after every epoch and, between them, every minute; on stderr."""

    def __enter__(self) -> Self:
        self.shown_at = time.monotonic()
        return super().__enter__()

    @staticmethod
    def say(message: str) -> None:
        stderr.print(message, markup=False)

    def show_step(self, done: int, loss: Callable[[], float | None]) -> None:
        if time.monotonic() - self.shown_at > LINE_EVERY_SECONDS:
            self.shown_at = time.monotonic()
            self.say(f"{self.label}  step {done:,} of {self.plan.steps:,}  "
                     f"{self.facts(done, loss())}")  # fmt: skip

    def show_epoch(self, record: dict[str, Any]) -> None:
        self.shown_at = time.monotonic()
        scores = {name: score["accuracy"] for name, score in record["dev"].items()}
        spent = record["epsilon"].get(self.plan.accountant)
        shown = "  ".join(f"{name} accuracy {value:.4f}" for name, value in scores.items())
        # The loss of private rows is shown only where it was asked for.
        loss = "" if record["train_loss"] is None else f"loss {record['train_loss']:.4f}  "
        budget = ""
        if spent is not None:
            budget = f"  {self.epsilon_name} spent {spent:.3f} of {self.plan.epsilon:g}"
        stderr.print(f"{self.label}  epoch {record['epoch']}  {loss}{shown}{budget}")


class ConsoleReporter(LineReporter):
    """A progress bar, and a line after every epoch."""

    def __enter__(self) -> Self:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=stderr,
        )
        self.task: TaskID = self.bar.add_task(self.label, total=self.plan.steps, facts="")
        self.bar.start()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self.bar.stop()

    def show_step(self, done: int, loss: Callable[[], float | None]) -> None:
        if time.monotonic() - self.shown_at > REFRESH_SECONDS or done == self.plan.steps:
            self.shown_at = time.monotonic()
            self.bar.update(self.task, completed=done, facts=self.facts(done, loss()))


REPORTERS: dict[str, type[SilentReporter]] = {
    "terminal": ConsoleReporter,
    "notebook": LineReporter,
    "silent": SilentReporter,
}


def choose_reporter(name: str) -> type[SilentReporter]:
    """The reporter called `name`; "auto" is a bar where stderr is a terminal, else lines."""
    if name == "auto":
        name = "terminal" if sys.stderr.isatty() else "notebook"
    if name not in REPORTERS:
        raise UserError(unknown("reporter", name, ("auto", *REPORTERS)))
    return REPORTERS[name]
