"""Which figures the records allow, and their data; each is drawn only if its data exist."""

from collections.abc import Callable, Iterator, Sequence
from statistics import mean, stdev
from typing import Any

from dpfp_ray.plan.method_spec import uses
from dpfp_ray.report import heatmap, paper
from dpfp_ray.report.coordinates import sweep_figures
from dpfp_ray.report.curves import training_figures
from dpfp_ray.report.plots import (
    Drawing,
    canvas,
    clean,
    finish,
    legend,
    log_axis,
    plain_ticks,
    styles,
)
from dpfp_ray.report.runs import ACCOUNTANT_NAMES, NOMINAL, Cell, Run, budgets_of


def all_figures(cells: Sequence[Cell], runs: Sequence[Run], command: str) -> list[Drawing]:
    """In the order in which the page shows them; names are unique."""
    makers: tuple[Callable[[], Iterator[Drawing]], ...] = (
        lambda: epsilon_figures(cells, command),
        lambda: cost_figures(cells, command),
        lambda: heatmap.heat_maps(runs, "batch_size", command, paper.FIGURE_CLAIMS["batch"]),
        lambda: heatmap.heat_maps(runs, "clip", command, paper.FIGURE_CLAIMS["clip"]),
        lambda: micro_figures(runs, command),
        lambda: training_figures(cells, command),
        lambda: sweep_figures(runs, command),
    )
    return [drawing for make in makers for drawing in make()]


def _places(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((cell.key.model, cell.key.task) for cell in cells))


def epsilon_figures(cells: Sequence[Cell], command: str) -> Iterator[Drawing]:
    """Accuracy against ε: all methods, the line without privacy, spread over seeds."""
    number = 0
    for model, task in _places(cells):
        here = [cell for cell in cells if cell.key[:2] == (model, task)]
        plain = [cell for cell in here if not cell.private]
        for accountant in sorted({budget.accountant for budget in budgets_of(here)}):
            private = [c for c in here if c.budget and c.budget.accountant == accountant]
            if len(private) < 2:
                continue
            number += 1
            budgets = budgets_of(private)
            title = f"Accuracy against ε: {task}, {model}"
            if len(budgets) == 1:
                title = f"Accuracy at {budgets[0]}: {task}, {model}"
            with canvas() as (figure, axes):
                _epsilon_axes(axes, plain, private, accountant)
                caption = (
                    "Points: mean over seeds; bars: standard deviation. Dashed: without privacy. "
                    f"{NOMINAL}: nominal ε, no guarantee."
                )
                yield finish(figure, f"epsilon-{number}", title, caption, command)


def _epsilon_axes(axes: Any, plain: Sequence[Cell], cells: Sequence[Cell], accountant: str) -> None:
    names = list(dict.fromkeys(cell.key.method for cell in (*plain, *cells)))
    style = styles(names)
    axes.set_ylabel("dev accuracy (%)")
    axes.margins(y=0.15)
    for cell in plain:
        look = style[cell.key.method]
        level = 100 * cell.accuracy
        axes.axhline(level, color=look["color"], linestyle="--", label=clean(cell.name, 40))
        if cell.spread:
            low, high = level - 100 * cell.spread, level + 100 * cell.spread
            axes.axhspan(low, high, color=look["color"], alpha=0.08, linewidth=0)
    budgets = sorted({cell.key.epsilon for cell in cells if cell.key.epsilon is not None})
    for name in names:
        line = sorted((c for c in cells if c.key.method == name), key=lambda c: c.key.epsilon or 0)
        if line:
            axes.errorbar(
                # With one ε there is no curve: the methods stand side by side.
                [cell.key.epsilon if len(budgets) > 1 else names.index(name) for cell in line],
                [100 * cell.accuracy for cell in line],
                yerr=[100 * (cell.spread or 0.0) for cell in line],
                capsize=3,
                label=clean(max((cell.name for cell in line), key=len), 40),
                **style[name],
            )
    legend(axes)
    if len(budgets) == 1:
        places = [names.index(cell.key.method) for cell in cells]
        axes.set_xticks(places, labels=[_two_lines(cell.name) for cell in cells])
        axes.margins(x=0.2)
        axes.set_xlabel("method")
        return
    log_axis(axes, "x", budgets)
    plain_ticks(axes.xaxis, budgets)
    axes.set_xlabel(
        f"privacy budget ε by {ACCOUNTANT_NAMES.get(accountant, accountant)}, log scale"
    )


def cost_figures(cells: Sequence[Cell], command: str) -> Iterator[Drawing]:
    """Accuracy against training time; memory is the size of a point."""
    for number, (model, task) in enumerate(_places(cells), start=1):
        here = [c for c in cells if c.key[:2] == (model, task) and c.average("train_seconds")]
        if len(here) < 2:
            continue
        style = styles(list(dict.fromkeys(cell.key.method for cell in here)))
        with canvas() as (figure, axes):
            named = set()
            for cell in here:
                look = style[cell.key.method]
                seconds = [
                    run.row["train_seconds"] for run in cell.runs if run.row["train_seconds"]
                ]
                axes.errorbar(
                    [mean(seconds)],
                    [100 * cell.accuracy],
                    xerr=[stdev(seconds)] if len(seconds) > 1 else None,
                    yerr=[100 * cell.spread] if cell.spread else None,
                    color=look["color"],
                    marker=look["marker"],
                    linestyle="none",
                    capsize=3,
                    label=None if cell.key.method in named else clean(cell.name, 40),
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
            log_axis(axes, "x", [cell.average("train_seconds") or 1.0 for cell in here])
            axes.set_xlabel("training time (s), log scale")
            axes.set_ylabel("dev accuracy (%)")
            axes.margins(x=0.12, y=0.15)
            legend(axes)
            title = f"Accuracy against training cost: {task}, {model}"
            caption = (
                "Measured seconds of training, evaluation not included; up and left is better."
            )
            yield finish(figure, f"cost-{number}", title, caption, command)


def micro_figures(runs: Sequence[Run], command: str) -> Iterator[Drawing]:
    """Accuracy against the number of micro-batches M, everything else equal."""
    groups: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    marks: dict[tuple[Any, ...], str] = {}
    for run in runs:
        if run.scored and uses(run.row["method"], "micro_batches") and run.row["micro_batches"]:
            held = heatmap.held_fixed(run, ("micro_batches",))
            marks[held[:3]] = NOMINAL if run.row["guarantee"] == "nominal" else ""
            scores = groups.setdefault(held, {}).setdefault(run.row["micro_batches"], [])
            scores.append(run.row["accuracy"])
    lines = {held: by for held, by in groups.items() if len(by) > 1}
    for number, key in enumerate(dict.fromkeys(held[:3] for held in lines), start=1):
        model, task, method = key
        with canvas() as (figure, axes):
            spare = styles([f"line {n}" for n in range(len(lines))]).values()
            looks = [*styles(["DP-FP", "DP-SGD", "RGP"]).values(), *spare]
            here = [(held, by) for held, by in lines.items() if held[:3] == key]
            for (held, by), look in zip(here, looks, strict=False):
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
            log_axis(axes, "x", every, base=2)
            plain_ticks(axes.xaxis, every)
            axes.set_xlabel("micro-batches a step M, log scale")
            axes.set_ylabel("dev accuracy (%)")
            axes.margins(y=0.15)
            axes.legend(loc="lower right", fontsize=8)
            title = f"Accuracy against M: {method}{marks[key]}, {task}, {model}"
            claim = paper.FIGURE_CLAIMS["micro"]
            caption = f"Bars: standard deviation over seeds. {claim}"
            yield finish(figure, f"micro-batches-{number}", title, caption, command)


def _two_lines(name: str) -> str:
    """DP-FP (release once) as two lines: neighbours' labels must not touch."""
    return clean(name, 24).replace(" (", "\n(", 1)
