"""The two streams: results on stdout, everything for the person who waits on stderr.

Who waits sees a bar where stderr is a terminal, else a line a minute: nobody should wonder whether
a program that was started an hour ago, in a job or behind a pipe, is still at work.
"""

import heapq
import os
import re
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import zip_longest
from typing import IO, Any, TypeVar, cast

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

PAGE = 80  # columns: what every terminal has
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it, and RAY_ADDRESS, for whatever a job runs
KEPT = "\u00a0"  # a space that HTML does not fold
LINE_EVERY_SECONDS = 60.0
Part = TypeVar("Part")
Rows = TypeVar("Rows", bound=Sized)


class PipeConsole(Console):
    """Leaves a closed pipe to `cli.main`; rich would exit with 1 at once."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


stdout = PipeConsole(soft_wrap=True, highlight=False)
stderr = PipeConsole(stderr=True, soft_wrap=True, highlight=False)


def print_prose(text: str, console: Console = stdout) -> None:
    """Sentences: broken between words on a terminal, whole lines for programs."""
    if console.is_terminal:
        whole = {"break_long_words": False, "break_on_hyphens": False}  # 1e-05 has a hyphen
        layout: Any = {"width": console.width, "subsequent_indent": "    ", **whole}
        text = "\n".join(textwrap.fill(line, **layout) for line in text.split("\n"))
    console.print(text, markup=False)


class _KeptSpaces:
    """A stream whose columns stay columns in the Ray dashboard's log viewer."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, text: str) -> int:
        text = re.sub(r" +$", "", text, flags=re.MULTILINE)
        return self.file.write(re.sub(" {2,}", lambda run: KEPT * len(run[0]), text))

    def flush(self) -> None:
        self.file.flush()


def page_width() -> int:
    """The terminal's, if it has more than a page; programs and logs get a page."""
    return max(stdout.width, PAGE) if stdout.is_terminal else PAGE


def that_fit(
    columns: Mapping[str, Sequence[str]], optional: Sequence[str], gap: int, width: int
) -> list[str]:
    """The columns of a table without those of `optional`, the last first, for which a page has no
    room; by heading, with the texts below it."""
    kept = list(columns)
    sizes = {name: max(map(cell_len, [name, *texts])) for name, texts in columns.items()}
    for name in reversed(optional):
        if sum(sizes[one] + gap for one in kept) - gap <= width:
            break
        if name in kept:
            kept.remove(name)
    return kept


def print_columns(
    columns: Mapping[str, Sequence[str]],
    numbers: Collection[str],
    optional: Sequence[str] = (),
    *,
    gap: int = 2,
    fold: bool = False,
    styles: Sequence[str | None] = (),
) -> None:
    """A table on stdout: texts by heading. On a narrow page those of `optional` go, the last first;
    what then does not fit is as wide as it is, or, with `fold`, folded."""
    from rich.table import Table

    kept = that_fit(columns, optional, gap, page_width())
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name in kept:
        whole, side = name in numbers or not fold, "right" if name in numbers else "left"
        table.add_column(Text(name), justify=cast(Any, side), no_wrap=whole, overflow="fold")
    rows = zip(*(columns[name] for name in kept), strict=True)
    for row, style in zip_longest(rows, styles):
        # Text, not str: a task called "[red]" is a name and no markup.
        table.add_row(*map(Text, row), style=style)
    natural = sum(max(map(cell_len, [name, *columns[name]])) + gap for name in kept)
    width = page_width() if fold else max(page_width(), natural)
    file = cast(IO[str], _KeptSpaces(stdout.file)) if JOB in os.environ else stdout.file
    Console(file=file, width=width, highlight=False).print(table)


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

    columns = [SpinnerColumn(), TimeElapsedColumn()]
    if total is not None:
        columns = [*Progress.get_default_columns()]
    columns += [TextColumn("{task.completed:,.0f} rows")]
    minute, done = Minute(), 0
    visible = bar and stderr.is_terminal
    with Progress(
        *columns, console=stderr, disable=not visible, transient=total is None
    ) as display:
        task = display.add_task(label, total=total)
        for part in parts:
            yield part
            done += rows(part)
            display.update(task, completed=done)
            if not visible and minute.over():
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
        self.said = time.monotonic()
        stderr.print(f"{text}, {clock(self.said - self.began)} gone", markup=False)


def time_left(seconds: float | None) -> str:
    """`time left 3:20`; nothing where it is not known, or where an estimate is used up."""
    return "" if seconds is None or seconds < 1 else f"time left {clock(seconds)}"


def whole_seconds(seconds: float | None, epoch: float | None, epochs: float | None) -> float | None:
    """What a run will have taken: its first `epoch` of `epochs` took `seconds`."""
    return seconds * max(1.0, epochs / epoch) if seconds and epoch and epochs else None


def queue_seconds(
    running: Sequence[float | None], waiting: int, each: float | None
) -> float | None:
    """Seconds until a queue is empty; None if they are not known.

    `running` are the seconds that the current ones still need. Each of the `waiting` ones takes
    `each` seconds and starts when another one ends.
    """
    places = [each if left is None else left for left in running] or [0.0]
    lefts = [left for left in places if left is not None]
    if len(lefts) < len(places) or (waiting and each is None):
        return None
    heapq.heapify(lefts)
    for _ in range(waiting):
        heapq.heapreplace(lefts, lefts[0] + (each or 0.0))
    return max(lefts)


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_last_signal: int = signal.SIGINT
