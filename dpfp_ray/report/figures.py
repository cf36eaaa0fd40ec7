"""Which figures the records allow, and their data; each is drawn only if its data exist."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from statistics import mean, stdev
from typing import Any

from dpfp_ray.plan.method_spec import uses
from dpfp_ray.report import heatmap, paper
from dpfp_ray.report.coordinates import sweep_figures
from dpfp_ray.report.curves import training_figures
from dpfp_ray.report.epsilon_figures import difference_figures, epsilon_figures, places
from dpfp_ray.report.plots import (
    Drawing,
    canvas,
    cell_label,
    clean,
    finish,
    legend,
    line_styles,
    log_x_axis,
    method_label,
    plain_ticks,
    styles,
)
from dpfp_ray.report.ranks import rank_figures
from dpfp_ray.results.cells import Cell
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import LEAST_SECONDS, Run


def all_figures(
    cells: Sequence[Cell],
    runs: Sequence[Run],
    command: str,
    contests: Sequence[Contest] | None = None,
) -> list[Drawing]:
    """In the order in which the page shows them; names are unique."""
    found = contests_of(cells) if contests is None else contests
    makers: tuple[Callable[[], Iterator[Drawing]], ...] = (
        lambda: epsilon_figures(cells, command),
        lambda: difference_figures(found, command),
        lambda: rank_figures(found, command),
        lambda: cost_figures(cells, command),
        lambda: heatmap.heat_maps(runs, "batch_size", command, paper.FIGURE_CLAIMS["batch"]),
        lambda: heatmap.heat_maps(runs, "clip", command, paper.FIGURE_CLAIMS["clip"]),
        lambda: micro_figures(runs, command),
        lambda: training_figures(cells, command),
        lambda: sweep_figures(runs, command),
    )
    return [drawing for make in makers for drawing in make()]


def cost_figures(cells: Sequence[Cell], command: str) -> Iterator[Drawing]:
    """Accuracy against the time that it took."""
    for number, (model, task) in enumerate(places(cells), start=1):
        here = [
            cell
            for cell in cells
            if cell.key[:2] == (model, task) and mean(seconds_of(cell) or [0.0]) >= LEAST_SECONDS
        ]
        if len(here) < 2:
            continue
        style = styles(list(dict.fromkeys(cell.key.method for cell in here)))
        with canvas() as (figure, axes):
            named = set()
            for cell in here:
                look = style[cell.key.method]
                seconds = seconds_of(cell)
                axes.errorbar(
                    [mean(seconds)],
                    [100 * cell.accuracy],
                    xerr=[stdev(seconds)] if len(seconds) > 1 else None,
                    yerr=[100 * cell.spread] if cell.spread else None,
                    color=look["color"],
                    marker=look["marker"],
                    linestyle="none",
                    capsize=3,
                    label=None if cell.key.method in named else clean(cell_label(cell), 40),
                )
                named.add(cell.key.method)
                if cell.key.epsilon is not None:
                    axes.annotate(
                        f"ε={cell.key.epsilon:g}",
                        (mean(seconds), 100 * cell.accuracy),
                        xytext=(7, 5),
                        textcoords="offset points",
                        fontsize=8,
                    )
            log_x_axis(axes, [mean(seconds_of(cell)) for cell in here])
            axes.set_xlabel("time before and of training (s), log scale")
            axes.set_ylabel("dev accuracy (%)")
            axes.margins(x=0.12, y=0.15)
            legend(axes)
            title = f"Accuracy against time: {task}, {model}"
            caption = (
                "Measured seconds of reading, tokenising and encoding, as far as no cache had it, "
                "and of training; without evaluation and start-up. Less than a second is not "
                "shown. Bars: standard deviation. Up and left is better."
            )
            yield finish(figure, f"cost-{number}", title, caption, command)


def seconds_of(cell: Cell) -> list[float]:
    """Of each run: what came before training, and training itself."""
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
            held = heatmap.held_fixed(run, ("micro_batches",))
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
                    label=clean(heatmap.held_text(held), 60),
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
