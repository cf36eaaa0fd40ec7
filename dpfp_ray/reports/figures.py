"""Which figures the records allow, and their data; each is drawn only if its data exist."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from statistics import mean, median, stdev
from typing import Any

from dpfp_ray.plan.method_spec import uses
from dpfp_ray.reports import paper
from dpfp_ray.reports.epsilon_figures import (
    MOST_CURVES,
    difference_figures,
    epsilon_figures,
    places,
)
from dpfp_ray.reports.plots import (
    Drawing,
    canvas,
    clean,
    finish,
    legend,
    line_styles,
    log_x_axis,
    plain_ticks,
    styles,
)
from dpfp_ray.reports.sweep_figures import heat_maps, held_fixed, held_text, sweep_figures
from dpfp_ray.results.cells import Cell
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import ACCOUNTANT_NAMES, Budget, Run, method_label
from dpfp_ray.training import LEAST_SECONDS


def all_figures(
    cells: Sequence[Cell],
    runs: Sequence[Run],
    command: str,
    contests: Sequence[Contest] | None = None,
) -> list[Drawing]:
    """In the order in which the page shows them; names are unique."""
    all_contests = contests_of(cells) if contests is None else contests
    makers: tuple[Callable[[], Iterator[Drawing]], ...] = (
        lambda: epsilon_figures(cells, command),
        lambda: difference_figures(all_contests, command),
        lambda: cost_figures(cells, command),
        lambda: heat_maps(runs, "batch_size", command, paper.FIGURE_CLAIMS["batch"]),
        lambda: heat_maps(runs, "clip", command, paper.FIGURE_CLAIMS["clip"]),
        lambda: micro_figures(runs, command),
        lambda: sweep_figures(runs, command),
        lambda: training_figures(cells, command),
    )
    return [drawing for make in makers for drawing in make()]


def cost_figures(cells: Sequence[Cell], command: str) -> Iterator[Drawing]:
    """Accuracy against the time that it took."""
    for number, (model, task) in enumerate(places(cells), start=1):
        here = [
            cell
            for cell in cells
            if cell.key[:2] == (model, task) and median(seconds_of(cell) or [0.0]) >= LEAST_SECONDS
        ]
        if len(here) < 2:
            continue
        style = styles(list(dict.fromkeys(cell.key.method for cell in here)))
        crowded = len(style) > MOST_CURVES
        with canvas() as (figure, axes):
            named = set()
            for cell in here:
                look = style[cell.key.method]
                seconds = seconds_of(cell)
                middle = median(seconds)
                axes.errorbar(
                    [middle],
                    [100 * cell.accuracy],
                    xerr=[[middle - min(seconds)], [max(seconds) - middle]],
                    yerr=[100 * cell.spread] if cell.spread else None,
                    color=look["color"],
                    marker=look["marker"],
                    linestyle="none",
                    capsize=3,
                    label=None if cell.key.method in named else clean(cell.title, 40),
                )
                named.add(cell.key.method)
                if cell.key.epsilon is not None and not crowded:
                    axes.annotate(
                        f"ε={cell.key.epsilon:g}",
                        (middle, 100 * cell.accuracy),
                        xytext=(7, 5),
                        textcoords="offset points",
                        fontsize=8,
                    )
            log_x_axis(axes, [second for cell in here for second in seconds_of(cell)])
            axes.set_xlabel("time before and of training (s), log scale")
            axes.set_ylabel("dev accuracy (%)")
            axes.margins(x=0.12, y=0.15)
            legend(axes)
            title = f"Accuracy against time: {task}, {model}"
            caption = (
                "Measured seconds of reading, tokenising and encoding, as far as no cache had it, "
                "and of training; without evaluation and start-up. Less than a second is not "
                "shown. Across: the run in the middle, from the fastest to the slowest. Upright: "
                "standard deviation. Up and left is better."
            )
            if crowded:
                caption += " Points of one method: its budgets; tables say which."
            yield finish(figure, f"cost-{number}", title, caption, command)


def seconds_of(cell: Cell) -> list[float]:
    """Each run's seconds: what came before training, and training itself."""
    return [
        (run.row["prepare_seconds"] or 0.0) + run.row["train_seconds"]
        for run in cell.runs
        if run.row["train_seconds"]
    ]


def micro_figures(runs: Sequence[Run], command: str) -> Iterator[Drawing]:
    """Accuracy against the number of micro-batches M, everything else equal."""
    groups: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    marks: dict[tuple[Any, ...], str] = {}
    for run in runs:
        if run.scored and uses(run.row["method"], "micro_batches") and run.row["micro_batches"]:
            held = held_fixed(run, ("micro_batches",))
            marks[held[:3]] = run.mark
            scores = groups.setdefault(held, {}).setdefault(run.row["micro_batches"], [])
            scores.append(run.row["accuracy"])
    lines = {held: by for held, by in groups.items() if len(by) > 1}
    for number, key in enumerate(dict.fromkeys(held[:3] for held in lines), start=1):
        model, task, method = key
        with canvas() as (figure, axes):
            here = [(held, by) for held, by in lines.items() if held[:3] == key]
            for (held, by), look in zip(here, cycle(line_styles()), strict=False):
                counts = sorted(by)
                deviations = [stdev(by[m]) if len(by[m]) > 1 else 0.0 for m in counts]
                axes.errorbar(
                    counts,
                    [100 * mean(by[m]) for m in counts],
                    yerr=[100 * deviation for deviation in deviations],
                    capsize=3,
                    label=clean(held_text(held), 60),
                    **look,
                )
            every = sorted({m for _, by in here for m in by})
            log_x_axis(axes, every, base=2)
            plain_ticks(axes.xaxis, every)
            axes.set_xlabel("micro-batches a step M, log scale")
            axes.set_ylabel("dev accuracy (%)")
            axes.margins(y=0.15)
            axes.legend(loc="lower right", fontsize=8)
            title = f"Accuracy against M: {method_label(method)}{marks[key]}, {task}, {model}"
            claim = paper.FIGURE_CLAIMS["micro"]
            caption = f"Bars: standard deviation over seeds. {claim}"
            yield finish(figure, f"micro-batches-{number}", title, caption, command)


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
                "† nominal, § claimed ε: no proved guarantee."
            )
            yield finish(figure, f"training-{number}", title, caption, command)


def _draw(axes: Any, lines: Sequence[tuple[Cell, list[Point]]], budget: Budget) -> None:
    style = styles(list(dict.fromkeys(cell.key.method for cell, _ in lines)))
    spent_axes = axes.twinx()
    spent_axes.spines["right"].set_visible(True)
    spent_axes.grid(visible=False)
    any_spent = False
    for cell, points in lines:
        look = style[cell.key.method]
        epochs = [point[0] for point in points]
        scores = [100 * point[1] for point in points]
        axes.plot(epochs, scores, label=clean(cell.title, 40), **look)
        spent = [(point[0], point[2]) for point in points if point[2] is not None]
        if cell.private and spent:
            any_spent = True
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
    spent_axes.set_ylabel(f"ε spent, by {name} (dotted)" if any_spent else "")
    spent_axes.set_ylim(bottom=0)
    if not any_spent:
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
    history, epochs = run.record["history"], run.row["epochs"]
    points: list[Point] = []
    for epoch in history:
        # The last "epoch" of a fractional E ends early: steps say how far it really got.
        last = history[-1]["step"]
        done = epochs * epoch["step"] / last if epochs and last else float(epoch["epoch"])
        spent = epoch["epsilon"].get(str(run.row["accountant"]))
        drawn = spent if spent is not None and math.isfinite(spent) else None
        points.append((done, next(iter(epoch["dev"].values()))["accuracy"], drawn))
    return points
