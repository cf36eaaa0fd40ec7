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

from rich.progress import BarColumn, Progress, TextColumn

from dpfp_ray.plan.method_spec import MARKS
from dpfp_ray.privacy.calibration import Spending
from dpfp_ray.privacy.statement import guarantee
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.signals import Interrupted, handling
from dpfp_ray.system.terminal import LINE_EVERY_SECONDS, print_prose, stderr, time_left
from dpfp_ray.training.loop import Epoch, Event, Step
from dpfp_ray.training.prepare import Run
from dpfp_ray.training.run_folder import Saver, save_state

REFRESH_SECONDS = 0.5
BAR_COLUMNS = 16


class Silent:
    def __init__(self, run: Run, label: str) -> None:
        self.plan, self.label = run.plan, label
        self.spending = Spending(run.plan, run.prepared.noise_multiplier)
        kind = guarantee(run.plan)
        self.epsilon_name = f"{kind} ε" if kind in MARKS else "ε"
        self.dev_scores: dict[str, float] = {}
        self.shown_at = time.monotonic()
        self.first: tuple[int, float] | None = None  # a step of this process, and when it was done

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
        print_prose(message, stderr)

    every_seconds = LINE_EVERY_SECONDS

    def show(self, event: Event) -> None:
        late = time.monotonic() - self.shown_at > self.every_seconds
        if isinstance(event, Step) and self.first is None:
            self.first = event.done, time.monotonic()
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
        facts = [self.label, place, self.time_left(event.done), *self.facts(event)]
        self.say("  ".join(filter(None, facts)))

    def time_left(self, done: int) -> str:
        """At the pace of this process, evaluations included; empty at its first step."""
        if self.first is None or done <= self.first[0]:
            return ""
        pace = (time.monotonic() - self.first[1]) / (done - self.first[0])
        return time_left(pace * (self.plan.steps - done))

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
        left = self.time_left(record["step"]) if self.says_time_left else ""
        left = f"  {left}" if left else ""
        self.say(f"{self.label}  epoch {record['epoch']}  {loss}{accuracies}{budget}{left}")

    says_time_left = True

    def facts(self, event: Step) -> list[str]:
        """The training loss, if it may be shown; the last scores on dev; ε so far."""
        scores = {"loss": event.loss(), **self.dev_scores}
        facts = [f"{name} {value:.3f}" for name, value in scores.items() if value is not None]
        spent = self.spending.at_most(event.done)
        if spent is not None:
            facts.append(f"{self.epsilon_name} ≤ {spent:.2f}")
        return facts


class Bar(Lines):
    """A progress bar, and a line after every epoch."""

    every_seconds = REFRESH_SECONDS
    says_time_left = False  # the bar has it

    def __enter__(self) -> Self:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=BAR_COLUMNS),
            TextColumn("{task.fields[facts]}", markup=False),
            console=stderr,
        )
        facts = self.that_fit([self.place(0)])
        self.task = self.bar.add_task(self.label, total=self.plan.steps, facts=facts)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def is_due(self, event: Step) -> bool:
        return event.done == self.plan.steps

    def show_step(self, event: Step) -> None:
        facts = [self.place(event.done), self.time_left(event.done), *self.facts(event)]
        self.bar.update(self.task, completed=event.done, facts=self.that_fit(facts))

    def place(self, done: int) -> str:
        return f"{done}/{self.plan.steps}"

    def that_fit(self, facts: list[str]) -> str:
        """The facts from the first to the last for which the line has room."""
        room = stderr.width - len(self.label) - BAR_COLUMNS - 2
        kept = ""
        for fact in filter(None, facts):
            longer = f"{kept}  {fact}" if kept else fact
            if len(longer) > room:
                break
            kept = longer
        return kept


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
