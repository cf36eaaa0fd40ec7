"""What a person sees while a run is on, and a safe Ctrl-C.

Displays differ in what they show: `terminal` a progress bar, `notebook` (and wherever stderr is no
terminal) plain lines, `silent` nothing. A `Keeper` saves the run every 30 seconds (`--save-every`),
every epoch and on Ctrl-C.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpfp_ray.privacy.calibration import Spending
from dpfp_ray.privacy.statement import guarantee
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.signals import Interrupted, handling
from dpfp_ray.system.terminal import LINE_EVERY_SECONDS, stderr
from dpfp_ray.training.loop import Epoch, Event, Step
from dpfp_ray.training.prepare import Run
from dpfp_ray.training.run_folder import Saver, save_state

REFRESH_SECONDS = 0.5


class Silent:
    def __init__(self, run: Run, label: str) -> None:
        self.plan, self.label = run.plan, label
        self.spending = Spending(run.plan, run.prepared.noise_multiplier)
        self.epsilon_name = "nominal ε" if guarantee(run.plan) == "nominal" else "ε"
        self.dev_scores: dict[str, float] = {}
        self.shown_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    @staticmethod
    def say(message: str) -> None:
        """What the person should know besides the progress."""

    def show(self, event: Event) -> None: ...


class Lines(Silent):
    """A line after every epoch and, between them, every minute; on stderr."""

    @staticmethod
    def say(message: str) -> None:
        stderr.print(message, markup=False)

    every_seconds = LINE_EVERY_SECONDS

    def show(self, event: Event) -> None:
        late = time.monotonic() - self.shown_at > self.every_seconds
        if isinstance(event, Step) and (late or self.is_due(event)):
            self.shown_at = time.monotonic()
            self.show_step(event)
        if isinstance(event, Epoch):
            self.shown_at = time.monotonic()
            self.show_epoch(event)

    def is_due(self, event: Step) -> bool:
        return False

    def show_step(self, event: Step) -> None:
        place = f"step {event.done:,} of {self.plan.steps:,}"
        self.say(f"{self.label}  {place}  {self.facts(event)}")

    def show_epoch(self, event: Epoch) -> None:
        record = event.record
        scores = next(iter(record["dev"].values()))
        self.dev_scores = {"dev loss": scores["loss"], "acc": scores["accuracy"]}
        accuracies = "  ".join(
            f"{name} accuracy {dev['accuracy']:.4f}" for name, dev in record["dev"].items()
        )
        # The loss of private rows is shown only where it was asked for.
        loss = "" if record["train_loss"] is None else f"loss {record['train_loss']:.4f}  "
        spent, budget = record["epsilon"].get(self.plan.accountant), ""
        if spent is not None:
            budget = f"  {self.epsilon_name} spent {spent:.3f} of {self.plan.epsilon:g}"
        stderr.print(f"{self.label}  epoch {record['epoch']}  {loss}{accuracies}{budget}")

    def facts(self, event: Step) -> str:
        """The training loss, if it may be shown; the last scores on dev; ε so far."""
        scores = {"loss": event.loss(), **self.dev_scores}
        facts = [f"{name} {value:.3f}" for name, value in scores.items() if value is not None]
        spent = self.spending.at_most(event.done)
        if spent is not None:
            facts.append(f"{self.epsilon_name} ≤ {spent:.2f}")
        return "  ".join(facts)


class Bar(Lines):
    """A progress bar, and a line after every epoch."""

    every_seconds = REFRESH_SECONDS

    def __enter__(self) -> Self:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=stderr,
        )
        self.task = self.bar.add_task(self.label, total=self.plan.steps, facts="")
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def is_due(self, event: Step) -> bool:
        return event.done == self.plan.steps

    def show_step(self, event: Step) -> None:
        self.bar.update(self.task, completed=event.done, facts=self.facts(event))


DISPLAYS: dict[str, type[Silent]] = {"terminal": Bar, "notebook": Lines, "silent": Silent}


def choose_display(name: str) -> type[Silent]:
    """The display called `name`; "auto" is a bar where stderr is a terminal, else lines."""
    if name == "auto":
        name = "terminal" if sys.stderr.isatty() else "notebook"
    if name not in DISPLAYS:
        raise UserError(unknown("reporter", name, ("auto", *DISPLAYS)))
    return DISPLAYS[name]


class Keeper:
    """Saves a run in `folder`, if there is one, and stops it after the step in which a signal came.

    `data_mark` is the mark of data in memory (`run_folder.data_mark`), for the saved state.
    """

    def __init__(
        self,
        run: Run,
        display: type[Silent],
        folder: Path | None = None,
        save_every: float = 30.0,
        data_mark: str | None = None,
    ) -> None:
        self.steps, self.say, self.folder = run.plan.steps, display.say, folder
        facts: Any = {"seed": run.seed, "seed_known": run.seed_known, "data_mark": data_mark}
        self.saver = Saver(partial(save_state, folder, **facts), save_every) if folder else None
        self.stop_signal: int | None = None  # the signal that asked to stop

    @contextmanager
    def on_signals(self) -> Iterator[Self]:
        with handling(signal.SIGINT, self._stop), handling(signal.SIGTERM, self._stop):
            yield self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal is None:
            self.stop_signal = number
            with suppress(RuntimeError):  # the signal has interrupted another line on stderr
                self.say(
                    "stopping: this step ends, then the run is saved; once more stops it at once"
                    if self.saver
                    else "stopping after this step; nothing is saved, because there is no output"
                )
        elif not (self.saver and self.saver.saving):  # a save ends; a step need not
            kept = "; the same command goes on from the last save" if self.saver else ""
            raise Interrupted(f"stopped at once{kept}", number)

    def follow(self, event: Event) -> None:
        """Save where a save is due; raise Interrupted after a step if a signal asked to stop."""
        if self.saver and (
            (isinstance(event, Epoch) and event.record["step"] < self.steps)
            or (isinstance(event, Step) and (self.stop_signal or self.saver.due))
        ):
            self.saver.save_now(event.checkpoint)
        if self.stop_signal and isinstance(event, Step) and event.done < self.steps:
            end = "nothing was saved, because no output was given"
            if self.folder:
                end = f"saved in {self.folder}. The same command continues it."
            raise Interrupted(f"stopped; {end}", self.stop_signal)
