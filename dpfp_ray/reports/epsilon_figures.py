"""Accuracy against ε with interval bands, and differences between methods with theirs.

What an ε is worth is told without colour: a proved one has a filled marker and a solid line, a
nominal one an open marker and dashes, a refuted one a crossed marker and dots. A single ε, or so
many methods that their curves would lie on each other, get one row a method in place of curves;
each ε then has its shade and its marker.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dpfp_ray.reports.plots import (
    COLOURS,
    Drawing,
    canvas,
    clean,
    finish,
    legend,
    log_x_axis,
    plain_ticks,
    styles,
    tagged_label,
)
from dpfp_ray.results.cells import Cell, budgets_of
from dpfp_ray.results.contests import Contest
from dpfp_ray.results.runs import ACCOUNTANT_NAMES
from dpfp_ray.results.statistics import Pair

ROWS_WORTH = "Filled: proved ε. Open: nominal (†) or claimed (§). Crossed: refuted (‡)."
_MARKERS = "osD^vPh*"
_LIGHTEST = 0.75  # of the colour map; lighter markers are hard to see on white
_SPREAD = 0.5  # of a row's height, over which its points are spread


class _Point(NamedTuple):
    """How the points of one ε look, and where they are in a row, from its middle downwards."""

    colour: Any
    marker: str
    below: float


_WITHOUT_PRIVACY = _Point("#000000", "|", 0.0)


def rows_of(plain: Sequence[Cell], private: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of each row, from the top: without privacy first, then the best mean first."""
    by_method: dict[str, list[Cell]] = {}
    for cell in (*plain, *private):
        by_method.setdefault(cell.key.method, []).append(cell)
    return sorted(by_method.values(), key=lambda row: (row[0].private, -_mean_accuracy(row)))


def height_of(rows: Sequence[Sequence[Cell]]) -> float:
    """Inches."""
    return 1.4 + sum(0.16 + 0.1 * len(row) for row in rows)


def row_axes(axes: Any, rows: Sequence[Sequence[Cell]], accountant: str) -> None:
    points = _points([cell for row in rows for cell in row])
    for at, row in enumerate(rows):
        for cell in row:
            _draw_cell(axes, cell, at, points.get(cell.key.epsilon, _WITHOUT_PRIVACY))
    by = ACCOUNTANT_NAMES.get(accountant, accountant)
    for epsilon, point in points.items():
        axes.plot([], [], color=point.colour, marker=point.marker, label=f"ε = {epsilon:g} by {by}")
    majority = next((c.majority for row in rows for c in row if c.majority is not None), None)
    if majority is not None:
        axes.axvline(
            100 * majority, color="#000000", linestyle=":", linewidth=1.2, label="majority class"
        )
    legend(axes)
    names = [clean(max((tagged_label(cell) for cell in row), key=len), 40) for row in rows]
    axes.set_yticks(range(len(rows)), labels=names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("dev accuracy (%)")


def _points(cells: Sequence[Cell]) -> Mapping[float | None, _Point]:
    """From light, the smallest ε, to dark."""
    import matplotlib

    shades = matplotlib.colormaps[COLOURS]
    budgets = sorted({c.key.epsilon for c in cells if c.key.epsilon is not None})
    points: dict[float | None, _Point] = {}
    for place, epsilon in enumerate(budgets):
        share = place / (len(budgets) - 1) if len(budgets) > 1 else 0.5
        colour = shades(_LIGHTEST * (1 - share)) if len(budgets) > 1 else shades(0.0)
        marker = _MARKERS[place % len(_MARKERS)]
        points[epsilon] = _Point(colour, marker, _SPREAD * (share - 0.5))
    return points


def _draw_cell(axes: Any, cell: Cell, row: int, point: _Point) -> None:
    score, at = 100 * cell.accuracy, row + point.below
    if cell.interval:
        ends = [100 * end for end in cell.interval]
        axes.plot(ends, [at, at], color=point.colour, linewidth=1.1)
    filled = cell.guarantee == "proved" or not cell.private
    face = point.colour if filled else "white"
    axes.plot([score], [at], color=point.colour, marker=point.marker, markerfacecolor=face)
    if cell.guarantee == "refuted":
        axes.plot([score], [at], color="#A8071A", marker="x", markersize=10, zorder=4)


def _mean_accuracy(row: Sequence[Cell]) -> float:
    return sum(cell.accuracy for cell in row) / len(row)


WORTH = (
    "Filled, solid: proved ε. Open, dashed: nominal (†) or claimed (§). Crossed, dotted: "
    "refuted (‡)."
)
MOST_CURVES = 8  # more cannot be followed by eye: a row each
MOST_PAIRS = 60  # more are not read one by one: those with the best method remain
_LINES = {"proved": "-", "refuted": ":"}
_CALLS = {
    "better": ("s", "#0072B2", "told apart"),
    "worse": ("s", "#0072B2", "told apart"),
    "tie": ("o", "#555555", "tie"),
    "these models only": ("d", "#D55E00", "one seed: these models only"),
}


def places(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((cell.key.model, cell.key.task) for cell in cells))


def epsilon_figures(cells: Sequence[Cell], command: str) -> Iterator[Drawing]:
    """Accuracy against ε: all methods, the lines without privacy and of the majority class."""
    number = 0
    for model, task in places(cells):
        here = [cell for cell in cells if cell.key[:2] == (model, task)]
        plain = [cell for cell in here if not cell.private]
        for accountant in sorted({budget.accountant for budget in budgets_of(here)}):
            private = [c for c in here if c.budget and c.budget.accountant == accountant]
            if len(private) < 2:
                continue
            number += 1
            budgets = budgets_of(private)
            by = ACCOUNTANT_NAMES.get(accountant, accountant)
            said = f"at {budgets[0]}" if len(budgets) == 1 else f"against ε ({by})"
            title = f"Accuracy {said}: {task}, {model}"
            rows = rows_of(plain, private)
            as_rows = len(budgets) == 1 or len(rows) > MOST_CURVES
            caption = _caption(private) + (ROWS_WORTH if as_rows else WORTH)
            with canvas(height_of(rows) if as_rows else 4.0) as (figure, axes):
                if as_rows:
                    row_axes(axes, rows, accountant)
                else:
                    _epsilon_axes(axes, plain, private, accountant)
                yield finish(figure, f"epsilon-{number}", title, caption, command)


def _caption(cells: Sequence[Cell]) -> str:
    said = "Points: mean over seeds. "
    if any(cell.interval for cell in cells):
        said += "Bands and bars: 95% interval over dev rows and seeds. "
    if any(cell.interval is None for cell in cells):
        said += "Without one: the record kept no dev predictions. "
    if any(cell.tuning for cell in cells):
        said += "Tuned: the best of several settings, not compared with the others. "
    if any(cell.one_class for cell in cells):
        said += "One class: the model gives every row the same answer. "
    return said


def _epsilon_axes(axes: Any, plain: Sequence[Cell], cells: Sequence[Cell], accountant: str) -> None:
    names = list(dict.fromkeys(cell.key.method for cell in (*plain, *cells)))
    style = styles(names)
    axes.set_ylabel("dev accuracy (%)")
    axes.margins(y=0.15)
    for cell in plain:
        look = style[cell.key.method]
        axes.axhline(
            100 * cell.accuracy,
            color=look["color"],
            linestyle=(0, (6, 2)),
            label=clean(tagged_label(cell), 40),
        )
        if cell.interval:
            low, high = (100 * end for end in cell.interval)
            axes.axhspan(low, high, color=look["color"], alpha=0.08, linewidth=0)
    majority = next((c.majority for c in (*cells, *plain) if c.majority is not None), None)
    if majority is not None:
        axes.axhline(
            100 * majority, color="#000000", linestyle=":", linewidth=1.2, label="majority class"
        )
    budgets = sorted({cell.key.epsilon for cell in cells if cell.key.epsilon is not None})
    for name in names:
        line = sorted((c for c in cells if c.key.method == name), key=lambda c: c.key.epsilon or 0)
        if line:
            _method_line(axes, line, style[name])
    legend(axes)
    log_x_axis(axes, budgets)
    plain_ticks(axes.xaxis, budgets)
    axes.set_xlabel(
        f"privacy budget ε by {ACCOUNTANT_NAMES.get(accountant, accountant)}, log scale"
    )


def _method_line(axes: Any, line: Sequence[Cell], look: Any) -> None:
    """One method's points; each point's marker says what its own ε is worth."""
    across = [cell.key.epsilon for cell in line]
    scores = [100 * cell.accuracy for cell in line]
    worst = min((cell.guarantee for cell in line), key=_rank)
    axes.plot(
        across,
        scores,
        color=look["color"],
        linestyle=_LINES.get(worst, "--"),
        marker=look["marker"],
        markerfacecolor="white" if worst != "proved" else look["color"],
        label=clean(max((tagged_label(cell) for cell in line), key=len), 40),
    )
    for at, cell, score in zip(across, line, scores, strict=True):
        if cell.guarantee == "proved" and worst != "proved":
            axes.plot([at], [score], color=look["color"], marker=look["marker"])
        if cell.guarantee == "refuted":
            axes.plot([at], [score], color="#A8071A", marker="x", markersize=10, zorder=4)
    bars = [(x, cell.interval) for x, cell in zip(across, line, strict=True) if cell.interval]
    lows = [100 * ends[0] for _, ends in bars]
    highs = [100 * ends[1] for _, ends in bars]
    if len(bars) > 1:
        axes.fill_between([x for x, _ in bars], lows, highs, color=look["color"], alpha=0.13, lw=0)
    for (x, _), low, high in zip(bars, lows, highs, strict=True):
        axes.plot([x, x], [low, high], color=look["color"], linewidth=1.1, marker="_", alpha=0.8)


def _rank(guarantee: str) -> int:
    """The least that any point of a line is worth decides how the line looks."""
    order = ("refuted", "nominal", "claimed", "unknown", "none", "proved")
    return order.index(guarantee) if guarantee in order else 1


def difference_figures(contests: Sequence[Contest], command: str) -> Iterator[Drawing]:
    """Tested pairs as dots with their intervals, one figure for each model and task."""
    tables: dict[tuple[str, str], list[tuple[Contest, Pair]]] = {}
    for contest in contests:
        for pair in contest.statistics.pairs if contest.statistics else ():
            tables.setdefault((contest.model, contest.task), []).append((contest, pair))
    for number, ((model, task), pairs) in enumerate(tables.items(), start=1):
        caption = (
            "Dots: difference of mean accuracies; bars: 95% intervals for all tested pairs "
            "together. Square: told apart. Circle: a tie. Diamond: one seed, so only these "
            "models are compared."
        )
        if len(pairs) > MOST_PAIRS:
            tested = len(pairs)
            pairs = [
                (contest, pair)
                for contest, pair in pairs
                if contest.ranked[0].key.method in (pair.first, pair.second)
            ]
            caption += f" Of {tested} pairs, those with the best mean at each ε; tables have all."
        with canvas(height=1.7 + 0.32 * len(pairs)) as (figure, axes):
            _difference_axes(axes, pairs)
            title = f"Differences between methods: {task}, {model}"
            yield finish(figure, f"differences-{number}", title, caption, command)


def _difference_axes(axes: Any, pairs: Sequence[tuple[Contest, Pair]]) -> None:
    labels: list[str] = []
    named = set()
    for at, (contest, pair) in enumerate(pairs):
        cells = {c.key.method: c for c in (*contest.ranked, *contest.beside)}
        marker, colour, word = _CALLS[pair.call]
        low, high = (100 * end for end in pair.simultaneous)
        axes.plot([low, high], [at, at], color=colour, linewidth=1.4)
        axes.plot(
            [100 * pair.difference],
            [at],
            marker=marker,
            color=colour,
            linestyle="none",
            markerfacecolor=colour if word == "told apart" else "white",
            label=None if word in named else word,
        )
        named.add(word)
        budget = "" if contest.budget is None else f", ε = {contest.budget.epsilon:g}"
        names = [clean(tagged_label(cells[name]), 32) for name in (pair.first, pair.second)]
        labels.append(" − ".join(names) + budget)
    axes.axvline(0, color="#222222", linewidth=1)
    axes.set_yticks(range(len(labels)), labels=labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("difference of dev accuracies (points)")
    legend(axes)
