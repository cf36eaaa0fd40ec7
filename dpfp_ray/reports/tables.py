"""One table model: page, terminal, CSV, Markdown and LaTeX are all written from it.

Text comes from data and paths: it stays text in each.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dpfp_ray.results.rows import csv_text
from dpfp_ray.system.terminal import print_columns, print_prose

MISSING = "—"
Item = TypeVar("Item")


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


def build(
    name: str,
    title: str,
    items: Iterable[Item],
    columns: Mapping[str, Callable[[Item], Entry]],
    *,
    tone: Callable[[Item], str] = lambda item: "",
    foot: Sequence[Row] = (),
    notes: Sequence[str] = (),
) -> Table:
    """A row for each item; a column is a title and what makes its entry. Columns without any number
    are words."""
    rows = [Row([entry(item) for entry in columns.values()], tone(item)) for item in items]
    headings = [
        Column(title, numeric=any(row.entries[at].value is not None for row in (*rows, *foot)))
        for at, title in enumerate(columns)
    ]
    return Table(name, title, headings, rows, foot, notes)


def text(value: object) -> Entry:
    """Text from anywhere, on one line; control characters and direction marks could hide some."""
    line = "" if value is None else str(value)
    line = "".join(letter if letter.isprintable() else " " for letter in line).strip()
    return Entry(line or MISSING)


def number(value: float | None, form: str = "g", mark: str = "", bold: bool = False) -> Entry:
    """A number in a format; None is shown as missing, never filled."""
    if value is None or math.isnan(value):
        return Entry(MISSING)
    digits = ("-∞" if value < 0 else "∞") if math.isinf(value) else format(value, form)
    digits = digits.replace("e-0", "e-")
    return Entry(re.sub("^-", "−", digits) + mark, float(value), bold)


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
        words = f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    elif seconds < 3600:
        words = f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    else:
        words = f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"
    return Entry(words, float(seconds))


# Columns beyond which a LaTeX table is shrunk to the line; the paper scales its own by 0.85.
_WIDE = 8
_LONG = 40  # rows beyond which it runs over several pages
_PACKAGES = r"\usepackage[T1]{fontenc} \usepackage{textcomp,booktabs,graphicx,longtable}"
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "-": r"{-}",
    "—": r"---",
    "–": r"--",
    "−": r"$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "÷": r"$\div$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "·": r"$\cdot$",
    "…": r"\ldots{}",
    "†": r"$^{\dagger}$",
    "‡": r"$^{\ddagger}$",
    "²": r"$^{2}$",
    "√": r"$\surd$",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "σ": r"$\sigma$",
    "μ": r"$\mu$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "’": "'",
    "é": r"\'e",
}


def show(table: Table, optional: Sequence[str] = ()) -> None:
    """Print on stdout; on a narrow page columns of `optional` go, the last one first."""
    texts = {
        column.title: [row.entries[at].text for row in (*table.rows, *table.foot)]
        for at, column in enumerate(table.columns)
    }
    print_columns(texts, {c.title for c in table.columns if c.numeric}, optional)
    for note in table.notes:
        print_prose(note)


def to_csv(table: Table) -> str:
    """Numbers are numbers and missing cells are empty; what a guarantee is stands in a column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [csv_text(f"{c.group}: {c.title}" if c.group else c.title) for c in table.columns]
    )
    for row in (*table.rows, *table.foot):
        writer.writerow([_csv_entry(entry) for entry in row.entries])
    return out.getvalue()


def _csv_entry(entry: Entry) -> str:
    if entry.missing:
        return ""
    return repr(entry.value) if entry.value is not None else csv_text(entry.text)


def to_markdown(table: Table) -> str:
    lines = [f"**{markdown_text(table.title)}**", ""]
    titles = [f"{c.group}: {c.title}" if c.group else c.title for c in table.columns]
    lines.append(f"| {' | '.join(markdown_text(title) for title in titles)} |")
    lines.append(f"|{'|'.join(' ---: ' if c.numeric else ' --- ' for c in table.columns)}|")
    for row in (*table.rows, *table.foot):
        texts = (markdown_text(e.text) for e in row.entries)
        cells = [f"**{s}**" if e.bold else s for e, s in zip(row.entries, texts, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    if table.notes:
        lines += ["", *(f"- {markdown_text(note)}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def markdown_text(text: str) -> str:
    """One line in which nothing is markup, link, table or HTML."""
    one_line = " ".join(_printable(text).split())
    return re.sub(r"([\\`*_{}\[\]<>|#~$!&])", r"\\\1", one_line)


def to_latex(table: Table) -> str:
    """A booktabs table to \\input; needs the packages that its first line names."""
    kinds = "".join("r" if column.numeric else "l" for column in table.columns)
    head = [r"\toprule", *_latex_groups(table)]
    head += [" & ".join(latex_text(c.title) for c in table.columns) + r" \\", r"\midrule"]
    rows = _latex_rows(table.rows, table.blocks)
    if table.foot:
        rows += [r"\midrule", *_latex_rows(table.foot, table.blocks)]
    notes = "".join(f" {latex_text(note)}" for note in table.notes)
    caption = rf"\caption{{{latex_text(table.title)}.{notes}}}\label{{table:{table.name}}}"
    if len(rows) > _LONG:
        lines = [
            rf"{{\tiny\begin{{longtable}}{{{kinds}}}",
            caption + r" \\",
            *head,
            r"\endhead",
            *rows,
            r"\bottomrule",
            r"\end{longtable}}",
        ]
    else:
        lines = [rf"\begin{{tabular}}{{{kinds}}}", *head, *rows, r"\bottomrule", r"\end{tabular}"]
        if len(table.columns) > _WIDE:
            lines = [r"\resizebox{\textwidth}{!}{%", *lines[:-1], lines[-1] + "}"]
        lines = [r"\begin{table*}", r"\centering\small", *lines, caption, r"\end{table*}"]
    return "\n".join([f"% {_PACKAGES}", *lines]) + "\n"


def _latex_groups(table: Table) -> list[str]:
    """The headings over several columns, each with a rule below it."""
    if not table.groups:
        return []
    heads, rules, at = [], [], 1
    for group, span in table.groups:
        if group:
            heads.append(rf"\multicolumn{{{span}}}{{c}}{{{latex_text(group)}}}")
            rules.append(rf"\cmidrule(lr){{{at}-{at + span - 1}}}")
        else:
            heads.append(" & ".join([""] * span))
        at += span
    return [" & ".join(heads) + r" \\", " ".join(rules)]


def _latex_rows(rows: Sequence[Row], blocks: bool) -> list[str]:
    lines: list[str] = []
    last = None
    for row in rows:
        cells = [
            rf"\textbf{{{latex_text(e.text)}}}" if e.bold else latex_text(e.text)
            for e in row.entries
        ]
        if blocks:
            first, cells[0] = cells[0], "" if cells[0] == last else cells[0]
            if last not in (None, first):
                lines.append(r"\midrule")
            last = first
        # A row that starts with [ would be read as the option of the \\ before it.
        lines.append("{}" + " & ".join(cells) + r" \\")
    return lines


def latex_text(text: str) -> str:
    """Plain text that pdflatex sets as it is; characters it has no font for are named."""
    return "".join(_latex_letter(letter) for letter in " ".join(_printable(text).split()))


def _latex_letter(letter: str) -> str:
    if letter in _LATEX:
        return _LATEX[letter]
    return letter if letter.isascii() else f"[U+{ord(letter):04X}]"


def latex_document(names: list[str]) -> str:
    """All tables in one document, to look at them or to see that they compile."""
    inputs = "\n\\clearpage\n".join(rf"\input{{{name}.tex}}" for name in names)
    return (
        "\\documentclass[10pt]{article}\n"
        f"{_PACKAGES}\n"
        "\\usepackage[a4paper,landscape,margin=15mm]{geometry}\n"
        f"\\begin{{document}}\n{inputs}\n\\end{{document}}\n"
    )


def _printable(text: str) -> str:
    """Control characters and direction marks become spaces: they could hide or reorder text."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
