"""What a person sees while a run is on: a progress bar on stderr, and a safe Ctrl-C."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from dpfp_ray.data.terminal import stderr
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.spending import Ledger
from dpfp_ray.privacy.statement import guarantee
from dpfp_ray.training.loop import State
from dpfp_ray.training.run import save_state

SAVE_EVERY_SECONDS = 60.0
REFRESH_SECONDS = 0.5


class Interrupted(Exception):
    """The user asked to stop; the run is saved and can be resumed."""


class ConsoleReporter:
    """Shows loss, accuracy and ε spent; saves the run every minute, every epoch and on Ctrl-C."""

    def __init__(
        self,
        plan: Plan,
        noise_multiplier: float,
        label: str,
        folder: Path | None,
        seed: int,
        seed_known: bool = False,
    ) -> None:
        self.plan = plan
        self.ledger = Ledger(plan, noise_multiplier)
        self.epsilon_name = "nominal ε" if guarantee(plan) == "nominal" else "ε"
        self.folder = folder
        self.seed = seed
        self.seed_known = seed_known
        self.accuracy: float | None = None
        self.stop_requested = False
        self.saved_at = self.shown_at = time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=stderr,
            disable=not sys.stderr.isatty(),
        )
        self.task: TaskID = self.bar.add_task(label, total=plan.steps, facts="")
        self.label = label

    def __enter__(self) -> "ConsoleReporter":
        self.bar.start()
        self._handlers = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.bar.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:  # the second Ctrl-C does not wait for the step to end
            raise KeyboardInterrupt
        self.stop_requested = True

    def step(self, done: int, loss: Callable[[], float], checkpoint: Callable[[], State]) -> None:
        now = time.monotonic()
        if now - self.shown_at > REFRESH_SECONDS and not self.bar.disable:
            self.shown_at = now
            self.bar.update(self.task, completed=done, facts=self._facts(done, loss()))
        if self.folder and (self.stop_requested or now - self.saved_at > SAVE_EVERY_SECONDS):
            save_state(self.folder, checkpoint(), self.seed, self.seed_known)
            self.saved_at = time.monotonic()
        if self.stop_requested and done < self.plan.steps:
            raise Interrupted

    def epoch(self, record: dict[str, Any], checkpoint: Callable[[], State]) -> None:
        scores = {name: score["accuracy"] for name, score in record["dev"].items()}
        self.accuracy = next(iter(scores.values()))
        if self.folder and record["step"] < self.plan.steps:
            save_state(self.folder, checkpoint(), self.seed, self.seed_known)
            self.saved_at = time.monotonic()
        spent = record["epsilon"].get(self.plan.accountant)
        shown = "  ".join(f"{name} accuracy {value:.4f}" for name, value in scores.items())
        # Modes of one release have no loss: it would be a second look at private rows.
        loss = "" if record["train_loss"] is None else f"loss {record['train_loss']:.4f}  "
        budget = ""
        if spent is not None:
            budget = f"  {self.epsilon_name} spent {spent:.3f} of {self.plan.epsilon:g}"
        stderr.print(f"{self.label}  epoch {record['epoch']}  {loss}{shown}{budget}")

    def _facts(self, done: int, loss: float) -> str:
        facts = [f"loss {loss:.3f}"]
        if self.accuracy is not None:
            facts.append(f"acc {self.accuracy:.3f}")
        spent = self.ledger.at_most(done)
        if spent is not None:
            facts.append(f"{self.epsilon_name} ≤ {spent:.2f}")
        return "  ".join(facts)
