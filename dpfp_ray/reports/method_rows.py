"""Accuracy with one row a method: for a single ε, and for so many methods that their curves would
lie on each other.

Each ε has its shade and its marker. What it is worth is told without colour: a filled marker is
proved, an open one nominal, a crossed one refuted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpfp_ray.reports.plots import COLOURS, clean, legend, tagged_label
from dpfp_ray.results.cells import Cell
from dpfp_ray.results.runs import ACCOUNTANT_NAMES

WORTH = "Filled: proved ε. Open: nominal (†), no guarantee. Crossed: refuted (‡)."
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
    return sorted(by_method.values(), key=lambda row: (row[0].private, -_mean(row)))


def height_of(rows: Sequence[Sequence[Cell]]) -> float:
    """Inches."""
    return 1.4 + sum(0.16 + 0.1 * len(row) for row in rows)


def row_axes(axes: Any, rows: Sequence[Sequence[Cell]], accountant: str) -> None:
    points = _points([cell for row in rows for cell in row])
    for at, row in enumerate(rows):
        for cell in row:
            _draw(axes, cell, at, points.get(cell.key.epsilon, _WITHOUT_PRIVACY))
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
    found: dict[float | None, _Point] = {}
    for place, epsilon in enumerate(budgets):
        share = place / (len(budgets) - 1) if len(budgets) > 1 else 0.5
        colour = shades(_LIGHTEST * (1 - share)) if len(budgets) > 1 else shades(0.0)
        marker = _MARKERS[place % len(_MARKERS)]
        found[epsilon] = _Point(colour, marker, _SPREAD * (share - 0.5))
    return found


def _draw(axes: Any, cell: Cell, row: int, point: _Point) -> None:
    score, at = 100 * cell.accuracy, row + point.below
    if cell.interval:
        ends = [100 * end for end in cell.interval]
        axes.plot(ends, [at, at], color=point.colour, linewidth=1.1)
    filled = cell.guarantee == "proved" or not cell.private
    face = point.colour if filled else "white"
    axes.plot([score], [at], color=point.colour, marker=point.marker, markerfacecolor=face)
    if cell.guarantee == "refuted":
        axes.plot([score], [at], color="#A8071A", marker="x", markersize=10, zorder=4)


def _mean(row: Sequence[Cell]) -> float:
    return sum(cell.accuracy for cell in row) / len(row)
