"""The two streams: results on stdout, everything for the person who waits on stderr."""

import functools
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console

PAGE = 80  # columns: what every terminal has
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it, and RAY_ADDRESS, for whatever a job runs
KEPT = "\u00a0"  # a space that HTML does not fold


class PipeConsole(Console):
    """Leaves a closed pipe to `cli.main`; rich would exit with 1 at once."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


stdout = PipeConsole(soft_wrap=True, highlight=False)
stderr = PipeConsole(stderr=True, soft_wrap=True, highlight=False)


def print_prose(text: str) -> None:
    """Sentences on stdout: broken between words on a terminal, whole lines for programs."""
    if stdout.is_terminal:
        fill = functools.partial(textwrap.fill, width=stdout.width, subsequent_indent="    ")
        text = "\n".join(map(fill, text.split("\n")))
    stdout.print(text, markup=False)


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


def print_table(table: Any, width: int) -> None:
    """A table on stdout, of this width even where the terminal is narrower."""
    file = cast(IO[str], _KeptSpaces(stdout.file)) if JOB in os.environ else stdout.file
    Console(file=file, width=width, highlight=False).print(table)
