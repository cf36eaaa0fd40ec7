"""Training curves: accuracy epoch by epoch, with the ε spent so far on the second axis."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from dpfp_ray.report.plots import Drawing, canvas, cell_label, clean, finish, styles
from dpfp_ray.results.cells import Cell
from dpfp_ray.results.rows import scalar, section
from dpfp_ray.results.runs import ACCOUNTANT_NAMES, NOMINAL, Budget, Run

Point = tuple[float, float, float | None]  # epochs done, accuracy, ε spent


def training_figures(cells: Sequence[Cell], command: str) -> Iterator[Drawing]:
    """One figure for each model, task and budget, with training without privacy in all of them."""
    places = dict.fromkeys((c.key.model, c.key.task, c.budget) for c in cells if c.budget)
    number = 0
    for model, task, budget in places:
        here = [
            cell
            for cell in cells
            if cell.key[:2] == (model, task) and cell.budget in (None, budget)
        ]
        lines = [(cell, points) for cell in here if (points := averaged(cell.runs))]
        if max((len(points) for _, points in lines), default=0) < 2:
            continue
        number += 1
        assert budget is not None
        with canvas() as (figure, axes):
            _draw(axes, lines, budget)
            title = f"Training at {budget}: {task}, {model}"
            caption = (
                "Solid, left: dev accuracy, mean over seeds. Dotted, right: ε spent by then. "
                f"{NOMINAL}: nominal ε, no guarantee."
            )
            yield finish(figure, f"training-{number}", title, caption, command)


def _draw(axes: Any, lines: Sequence[tuple[Cell, list[Point]]], budget: Budget) -> None:
    style = styles(list(dict.fromkeys(cell.key.method for cell, _ in lines)))
    spent_axes = axes.twinx()
    spent_axes.spines["right"].set_visible(True)
    spent_axes.grid(visible=False)
    shown = False
    for cell, points in lines:
        look = style[cell.key.method]
        epochs = [point[0] for point in points]
        scores = [100 * point[1] for point in points]
        axes.plot(epochs, scores, label=clean(cell_label(cell), 40), **look)
        spent = [(point[0], point[2]) for point in points if point[2] is not None]
        if cell.private and spent:
            shown = True
            start = [(0.0, 0.0), *spent]
            spent_axes.plot(
                [x for x, _ in start],
                [y for _, y in start],
                color=look["color"],
                linestyle=":",
                linewidth=1.2,
                alpha=0.8,
            )
    axes.set_xlim(left=0)
    axes.set_xlabel("passes over the training data (epochs)")
    axes.set_ylabel("dev accuracy (%)")
    name = ACCOUNTANT_NAMES.get(budget.accountant, budget.accountant)
    spent_axes.set_ylabel(f"ε spent, by {name} (dotted)" if shown else "")
    spent_axes.set_ylim(bottom=0)
    if not shown:
        spent_axes.set_yticks([])
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=4, frameon=False, borderaxespad=0
    )


def averaged(runs: Sequence[Run]) -> list[Point]:
    """The mean curve over seeds; epochs that some seed lacks are left out."""
    curves = [curve for run in runs if (curve := curve_of(run))]
    if not curves:
        return []
    points: list[Point] = []
    for same in zip(*curves, strict=False):
        spent = [point[2] for point in same if point[2] is not None]
        points.append((same[0][0], mean(p[1] for p in same), mean(spent) if spent else None))
    return points


def curve_of(run: Run) -> list[Point]:
    """Whatever of a record's history can be drawn."""
    last = max((step for entry in run.history if (step := _number(entry, "step"))), default=None)
    epochs, accountant = run.row["epochs"], str(run.row["accountant"])
    points: list[Point] = []
    for entry in run.history:
        first = next(iter(section(entry, "dev")), "")
        score = _number(entry, "dev", first, "accuracy")
        step, done = _number(entry, "step"), _number(entry, "epoch")
        if step and last and epochs:
            # The last "epoch" of a fractional E ends early: steps say how far it really got.
            done = epochs * step / last
        if score is not None and done is not None:
            points.append((done, score, _number(entry, "epsilon", accountant)))
    return points


def _number(entry: Mapping[str, Any], *path: str) -> float | None:
    """Only what can be drawn: an ε of "inf" in a record cannot."""
    for name in path[:-1]:
        entry = section(entry, name)
    found = scalar(entry.get(path[-1]), float)
    return found if found is not None and math.isfinite(found) else None
