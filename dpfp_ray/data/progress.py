"""Something to see while one waits: a bar where stderr is a terminal, else a line a minute.

Nobody should wonder whether a program that was started an hour ago, in a job or behind a pipe, is
still at work.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TypeVar

LINE_EVERY_SECONDS = 60.0
Part = TypeVar("Part")
Rows = TypeVar("Rows", bound=Sized)


def counted(
    parts: Iterable[Part],
    rows: Callable[[Part], int],
    label: str,
    total: int | None = None,
    *,
    bar: bool = True,
) -> Iterator[Part]:
    """`parts` one by one, with how many rows are done; `bar` is False where a bar would disturb."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from dpfp_ray.data.terminal import stderr

    columns = [SpinnerColumn(), TimeElapsedColumn()]
    if total is not None:
        columns = [*Progress.get_default_columns()]
    columns += [TextColumn("{task.completed:,.0f} rows")]
    minute, done = Minute(), 0
    shown = bar and stderr.is_terminal
    with Progress(*columns, console=stderr, disable=not shown, transient=total is None) as display:
        task = display.add_task(label, total=total)
        for part in parts:
            yield part
            done += rows(part)
            display.update(task, completed=done)
            if not shown and minute.over():
                of = "" if total is None else f" of {total:,}"
                minute.say(f"{label}: {done:,}{of} rows")


def counted_rows(parts: Sequence[Rows], label: str) -> Iterator[Rows]:
    """Parts of a table, each a list of its rows. They are sorted by length: those still to come
    cost more, so a bar's time left is a lower bound."""
    yield from counted(parts, len, label, sum(map(len, parts)))


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """For work without parts: a line every minute until it is done."""
    minute, done = Minute(), threading.Event()

    def remind() -> None:
        while not done.wait(LINE_EVERY_SECONDS):
            minute.say(label)

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


class Minute:
    """Says something at most every minute, with the time since it was made."""

    def __init__(self) -> None:
        self.began = self.said = time.monotonic()

    def over(self) -> bool:
        return time.monotonic() - self.said > LINE_EVERY_SECONDS

    def say(self, text: str) -> None:
        from dpfp_ray.data.terminal import stderr

        self.said = time.monotonic()
        stderr.print(f"{text}, {clock(self.said - self.began)} gone", markup=False)


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
