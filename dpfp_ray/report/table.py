"""A table as data: what the page, CSV, Markdown and LaTeX are all written from."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

MISSING = "—"


@dataclass(frozen=True)
class Entry:
    """`text` is for people; `value`, where there is one, is what sorts and what CSV holds."""

    text: str
    value: float | None = None
    bold: bool = False
    alarm: bool = False  # an audit refuted what this stands for

    @property
    def missing(self) -> bool:
        return self.text == MISSING


@dataclass(frozen=True)
class Column:
    title: str
    group: str = ""  # a heading over several columns
    numeric: bool = True


@dataclass(frozen=True)
class Row:
    """`tone` is how it looks: "", paper, difference, spent or refuted."""

    entries: Sequence[Entry]
    tone: str = ""


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    foot: Sequence[Row] = ()  # stays below, however the table is sorted
    notes: Sequence[str] = field(default=())
    blocks: bool = False  # rows with the same first entry belong together

    def __post_init__(self) -> None:
        for row in (*self.rows, *self.foot):
            if len(row.entries) != len(self.columns):
                raise ValueError(f"table {self.name}: {len(row.entries)} entries in a row")

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Headings over the columns, with how many each covers; empty if there are none."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return spans if any(group for group, _ in spans) else []


def text(value: object) -> Entry:
    """Text from anywhere, on one line; control characters and direction marks could hide some."""
    shown = "" if value is None else str(value)
    shown = "".join(letter if letter.isprintable() else " " for letter in shown).strip()
    return Entry(shown or MISSING)


def number(value: float | None, form: str = "g", mark: str = "", bold: bool = False) -> Entry:
    """A number in a format; None is shown as missing, never filled."""
    if value is None or math.isnan(value):
        return Entry(MISSING)
    shown = ("-∞" if value < 0 else "∞") if math.isinf(value) else format(value, form)
    shown = shown.replace("e-0", "e-")
    return Entry(re.sub("^-", "−", shown) + mark, float(value), bold)


def percent(
    score: float | None, spread: float | None = None, signed: bool = False, bold: bool = False
) -> Entry:
    """An accuracy from 0 to 1 as a percentage, as the paper prints it."""
    if score is None:
        return Entry(MISSING)
    entry = number(100 * score, "+.2f" if signed else ".2f")
    tail = "" if spread is None else f" ± {100 * spread:.2f}"
    return Entry(entry.text + tail, round(100 * score, 6), bold)


def duration(seconds: float | None) -> Entry:
    if seconds is None or not math.isfinite(seconds):
        return Entry(MISSING)
    if seconds < 60:
        shown = f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    elif seconds < 3600:
        shown = f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    else:
        shown = f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"
    return Entry(shown, float(seconds))
