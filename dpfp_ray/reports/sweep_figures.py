"""Figures of sweeps: heat maps of accuracy over two hyperparameters, everything else fixed, and
Optuna's own plots of the trials.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import mean
from typing import TYPE_CHECKING, Any

from dpfp_ray.reports import paper
from dpfp_ray.reports.plots import (
    COLOURS,
    Drawing,
    canvas,
    clean,
    drawing_alone,
    finish,
    plain_log_labels,
    short,
)
from dpfp_ray.results.runs import Budget, Run, method_label
from dpfp_ray.results.study import study_of, varied_fields

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What makes two settings differ; a map varies two of these and holds the rest.
_FIELDS = ("batch_size", "micro_batches", "clip", "learning_rate", "epochs")
SYMBOLS = {
    "batch_size": "B",
    "micro_batches": "M",
    "clip": "C",
    "learning_rate": "lr",
    "epochs": "E",
}
AXES = {
    "batch_size": "expected batch size B (records)",
    "clip": "clipping norm C",
    "learning_rate": "learning rate",
}
_FULL = 0.75  # a map needs at least this share of its cells; else the trials are no grid
_FEWEST = 3  # settings that are worth a picture

Held = tuple[Any, ...]


def held_fixed(run: Run, varied: Sequence[str]) -> Held:
    """What runs must share to be points of one map: (model, task, method, budget, the rest)."""
    row = run.row
    rest = tuple((name, row[name]) for name in _FIELDS if name not in varied)
    budget = None if row["epsilon"] is None else Budget(row["accountant"] or "?", row["epsilon"])
    return (run.model, run.task, run.method, budget, rest)


def held_text(held: Held) -> str:
    rest = [f"{SYMBOLS[name]} = {short(value)}" for name, value in held[4] if value is not None]
    return ", ".join([*([str(held[3])] if held[3] else []), *rest])


def heat_maps(runs: Sequence[Run], field: str, command: str, claim: str) -> Iterator[Drawing]:
    """Accuracy over `field` × learning rate for every set of runs that makes up a grid."""
    groups: dict[Held, dict[tuple[float, float], list[float]]] = {}
    sweeps: dict[Held, set[str]] = {}
    marks: dict[Held, str] = {}
    for run in runs:
        row = run.row
        if not run.scored or row[field] is None or row["learning_rate"] is None:
            continue
        held = held_fixed(run, (field, "learning_rate"))
        at = (row[field], row["learning_rate"])
        groups.setdefault(held, {}).setdefault(at, []).append(row["accuracy"])
        sweeps.setdefault(held, set()).update([row["sweep"]] if row["sweep"] else [])
        marks[held] = run.mark
    number = 0
    for held, scores in groups.items():
        columns = sorted({at[0] for at in scores})
        rows = sorted({at[1] for at in scores})
        if len(columns) < 2 or len(rows) < 2 or len(scores) < _FULL * len(columns) * len(rows):
            continue
        number += 1
        model, task, method = held[:3]
        method_name = method_label(method) + marks[held]
        title = f"Accuracy over {SYMBOLS[field]} × learning rate: {method_name}, {task}, {model}"
        with canvas(height=1.9 + 0.5 * len(rows)) as (figure, axes):
            averages = {at: 100 * mean(values) for at, values in scores.items()}
            _draw(figure, axes, columns, rows, averages)
            axes.set_xlabel(AXES[field])
            axes.set_ylabel(AXES["learning_rate"])
            axes.set_title(clean(held_text(held)), fontsize=9, loc="left")
            hatched = len(averages) < len(columns) * len(rows)
            caption = "Dev accuracy in percent; the highest is framed, which is no test."
            caption += " One run each." if all(len(s) == 1 for s in scores.values()) else ""
            caption += " Hatched: not run, failed or refused." if hatched else ""
            caption += f" {claim}" if method == paper.METHOD else ""
            name = f"heatmap-{'batch' if field == 'batch_size' else field}-{number}"
            yield finish(figure, name, title, caption, _with_sweeps(command, sweeps[held]))


def _with_sweeps(command: str, sweeps: set[str]) -> str:
    return command + (f"  # sweep {', '.join(sorted(sweeps))}" if sweeps else "")


def _draw(
    figure: Any,
    axes: Any,
    columns: Sequence[float],
    rows: Sequence[float],
    scores: dict[tuple[float, float], float],
) -> None:
    import numpy as np
    from matplotlib.patches import Rectangle

    grid = np.full((len(rows), len(columns)), np.nan)
    for (x, y), score in scores.items():
        grid[rows.index(y), columns.index(x)] = score
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    pad = 0.5 if high == low else 0.0
    image = axes.imshow(
        grid, cmap=COLOURS, aspect="auto", origin="lower", vmin=low - pad, vmax=high + pad
    )
    axes.grid(visible=False)
    best = divmod(int(np.nanargmax(grid)), len(columns))
    for j in range(len(rows)):
        for i in range(len(columns)):
            corner = (i - 0.5, j - 0.5)
            if np.isnan(grid[j, i]):
                axes.add_patch(
                    Rectangle(corner, 1, 1, facecolor="white", edgecolor="#999999", hatch="////")
                )
                continue
            bright = (grid[j, i] - low) / (high - low or 1.0) > 0.55
            axes.text(
                i,
                j,
                f"{grid[j, i]:.1f}",
                ha="center",
                va="center",
                color="black" if bright else "white",
                fontsize=10,
                fontweight="bold" if (j, i) == best else "normal",
            )
    axes.add_patch(
        Rectangle(
            (best[1] - 0.47, best[0] - 0.47), 0.94, 0.94, fill=False, edgecolor="#D55E00", lw=2.5
        )
    )
    axes.set_xticks(range(len(columns)), labels=[short(value) for value in columns])
    axes.set_yticks(range(len(rows)), labels=[short(value) for value in rows])
    figure.colorbar(image, ax=axes, label="dev accuracy (%)")


def sweep_figures(runs: Sequence[Run], command: str) -> Iterator[Drawing]:
    """Optuna's plots of each sweep that tried three settings or more of something."""
    sweeps: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if run.row["sweep"]:
            sweeps.setdefault((run.row["sweep"], run.task, run.model), []).append(run)
    number = 0
    for (sweep, task, model), trials in sweeps.items():
        done = [run.row for run in trials if run.scored]
        fields = [name for name in varied_fields(done) if name not in ("method", "mode", "scope")]
        # A comparison of methods is no search.
        if not fields or len({run.method for run in trials}) > 1 or len(done) < _FEWEST:
            continue
        number += 1
        lost = len(trials) - len(done)
        note = f" {lost} trials without a score are left out." if lost else ""
        mark = "".join(sorted({run.mark for run in trials}))
        note += f" {mark}: no proved guarantee." if mark else ""
        where = f"{sweep}{mark}, {task}, {model}"
        for kind, drawn in optuna_plots(done, fields):
            title, caption = _PLOTS[kind]
            name, made = f"{kind}-{number}", f"{command}  # sweep {sweep}"
            with drawn as figure:
                yield finish(figure, name, f"{title}: {where}", caption + note, made)


_PLOTS = {
    "history": ("Trials in order", "Each point is a trial; the line is the best so far."),
    "parallel": ("Settings and scores", "Each line is a trial; darker is better."),
    "slices": (
        "Accuracy against each field",
        "Also against what follows from the fields: σ, and how long the noise is beside the "
        "signal (noise_to_signal), which says why a setting wins.",
    ),
    "contour": ("Two fields at a time", "Interpolated between the trials, which are the points."),
    "importance": (
        "Which fields mattered",
        "PED-ANOVA: how far the good half of the trials agrees on a field.",
    ),
    "pareto": ("Accuracy against time", "Red: no other trial is both better and faster."),
}
_MOST_CONTOURS = 3  # fields; their pairs fill a square


def optuna_plots(
    rows: Sequence[Mapping[str, Any]], fields: list[str]
) -> Iterator[tuple[str, "AbstractContextManager[Figure]"]]:
    """Optuna's pictures of a study rebuilt from the rows, by the names of `_PLOTS`."""
    import optuna
    from optuna.visualization import matplotlib as plots

    study = study_of(rows, fields)
    why = [name for name in ("sigma", "noise_to_signal") if len({r[name] for r in rows}) > 1]
    wide = study_of(rows, [*fields, *why])
    if len(fields) > 1:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        scores = optuna.importance.get_param_importances(study, evaluator=evaluator)
        first = list(scores)[:_MOST_CONTOURS]
        yield "parallel", pyplot_figure(plots.plot_parallel_coordinate, study)
        yield "importance", pyplot_figure(plots.plot_param_importances, study, evaluator=evaluator)
        yield "contour", pyplot_figure(plots.plot_contour, study, params=first)
    yield "slices", pyplot_figure(plots.plot_slice, wide)
    yield "history", pyplot_figure(plots.plot_optimization_history, study)
    both = study_of(rows, fields, ("accuracy", "train_seconds"))
    names = ["accuracy", "seconds of training"]
    yield "pareto", pyplot_figure(plots.plot_pareto_front, both, target_names=names)


_WIDTHS = {1: 7.0, 2: 7.0}  # inches, by how many plots stand side by side


@contextmanager
def pyplot_figure(plot: Callable[..., Any], study: Any, **options: Any) -> "Iterator[Figure]":
    """What an Optuna plot draws. It uses pyplot, whose state is the whole process's."""
    import matplotlib
    import numpy as np

    if "matplotlib.pyplot" not in sys.modules:
        matplotlib.use("Agg")  # no window; whoever has loaded pyplot has chosen
    from matplotlib import pyplot

    with drawing_alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental, says Optuna of each of its plots
        matplotlib.rcParams["figure.constrained_layout.use"] = True
        first = np.ravel(np.asarray(plot(study, **options), dtype=object))[0]
        figure = first.figure
        try:
            for axes in figure.axes:
                axes.set_title("")
                for axis in (axes.xaxis, axes.yaxis):
                    if axis.get_scale() == "log":
                        plain_log_labels(axis)
            parallel = plot.__name__ == "plot_parallel_coordinate"  # its axes share one place
            across = len({round(axes.get_position().x0, 2) for axes in figure.axes})
            figure.set_size_inches(_WIDTHS.get(across, 9.0) if not parallel else 9.0, 4.4)
            if plot.__name__ == "plot_contour" and across > 2:
                figure.set_size_inches(9.0, 8.0)
            if parallel:
                figure.set_layout_engine("none")
                figure.subplots_adjust(left=0.1, right=0.88, top=0.85, bottom=0.27)
            yield figure
        finally:
            pyplot.close(figure)
