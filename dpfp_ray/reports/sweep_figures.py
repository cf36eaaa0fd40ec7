"""Figures of sweeps: heat maps of accuracy over two hyperparameters, everything else fixed, and
parallel coordinates: a line for each trial through what was varied, to its score.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from dpfp_ray.reports import paper
from dpfp_ray.reports.plots import COLOURS, Drawing, canvas, clean, finish, short
from dpfp_ray.results.runs import NOMINAL, Budget, Run, method_label

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
# What a line goes through, as its axis is called.
_VARIED = {
    "method": "method",
    "epsilon": "ε",
    "batch_size": "B",
    "micro_batches": "M",
    "clip": "C",
    "learning_rate": "learning\nrate",
    "epochs": "E",
}
_FEWEST = 3  # settings that are worth a picture
_MOST_LABELS = 6

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
    nominal: set[Held] = set()
    for run in runs:
        row = run.row
        if not run.scored or row[field] is None or row["learning_rate"] is None:
            continue
        held = held_fixed(run, (field, "learning_rate"))
        at = (row[field], row["learning_rate"])
        groups.setdefault(held, {}).setdefault(at, []).append(row["accuracy"])
        sweeps.setdefault(held, set()).update([row["sweep"]] if row["sweep"] else [])
        if run.nominal:
            nominal.add(held)
    number = 0
    for held, scores in groups.items():
        columns = sorted({at[0] for at in scores})
        rows = sorted({at[1] for at in scores})
        if len(columns) < 2 or len(rows) < 2 or len(scores) < _FULL * len(columns) * len(rows):
            continue
        number += 1
        model, task, method = held[:3]
        shown = method_label(method) + (NOMINAL if held in nominal else "")
        title = f"Accuracy over {SYMBOLS[field]} × learning rate: {shown}, {task}, {model}"
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
    """For each sweep that varied two things or more in three settings or more."""
    sweeps: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if run.row["sweep"]:
            sweeps.setdefault((run.row["sweep"], run.task, run.model), []).append(run)
    number = 0
    for (sweep, task, model), trials in sweeps.items():
        done = [run for run in trials if run.scored]
        varied = [name for name in _VARIED if len({_value(run, name) for run in done}) > 1]
        if len(varied) < 2 or _settings(done) < _FEWEST:
            continue
        number += 1
        title = f"Sweep {sweep}: {task}, {model}"
        with canvas(height=4.2) as (figure, axes):
            _draw_lines(figure, axes, done, varied)
            lost = len(trials) - len(done)
            caption = f"{len(done)} finished trials, the best one drawn thick."
            caption += f" {lost} failed, refused or stopped: see Every run." if lost else ""
            nominal = any(run.nominal for run in done)
            caption += f" {NOMINAL}: nominal ε, no guarantee." if nominal else ""
            made = f"{command}  # sweep {sweep}"
            yield finish(figure, f"sweep-{number}", title, caption, made)


def _settings(runs: Sequence[Run]) -> int:
    """How many settings of one method at one ε were tried: a comparison of methods is no search."""
    tried: dict[tuple[str, float | None], set[str]] = {}
    for run in runs:
        tried.setdefault((run.method, run.row["epsilon"]), set()).add(run.setting)
    return max((len(settings) for settings in tried.values()), default=0)


def _value(run: Run, name: str) -> Any:
    if name == "method":
        return run.title
    return run.row[name]


def _draw_lines(figure: Any, axes: Any, runs: Sequence[Run], varied: Sequence[str]) -> None:
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scores = [100 * run.row["accuracy"] for run in runs]
    low, high = min(scores), max(scores)
    shade = Normalize(low, high if high > low else low + 1)
    # The lightest tenth of the scale would vanish on white.
    colours = matplotlib.colormaps[COLOURS].resampled(256)
    scales = [_scale([_value(run, name) for run in runs]) for name in varied]
    scales.append(_scale(scores))
    best = scores.index(max(scores))  # one of them, should several be equally good
    for number, (run, score) in sorted(
        enumerate(zip(runs, scores, strict=True)), key=lambda pair: (pair[0] == best, pair[1][1])
    ):
        values = [*(_value(run, name) for name in varied), score]
        heights = [place(value) for (place, _), value in zip(scales, values, strict=True)]
        axes.plot(
            range(len(values)),
            heights,
            color=colours(0.9 * shade(score)),
            linewidth=3.0 if number == best else 1.2,
            alpha=1.0 if number == best else 0.75,
            marker="o",
            markersize=4,
            clip_on=False,
        )
    for at, (_, ticks) in enumerate(scales):
        axes.axvline(at, color="#444444", linewidth=0.8, zorder=0)
        for height, label in ticks:
            axes.annotate(
                clean(label, 24),
                (at, height),
                xytext=(-5, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "alpha": 0.75, "pad": 0.5, "linewidth": 0},
            )
    names = [*(_VARIED[name] for name in varied), "accuracy\n(%)"]
    axes.set_xticks(range(len(names)), labels=names)
    axes.set_xlim(-0.45, len(names) - 0.9)
    axes.set_ylim(-0.04, 1.04)
    axes.set_yticks([])
    axes.grid(visible=False)
    for side in ("left", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="x", length=0)
    scalar = ScalarMappable(
        norm=shade, cmap=matplotlib.colors.ListedColormap(colours([i / 284 for i in range(256)]))
    )
    figure.colorbar(scalar, ax=axes, label="dev accuracy (%)")


def _scale(values: Sequence[Any]) -> tuple[Any, list[tuple[float, str]]]:
    """Where a value lies from 0 to 1 on its axis, and the axis's labels. Wide ranges are log."""
    known = [value for value in values if value is not None]
    if any(isinstance(value, str) for value in known) or not known:
        names = sorted({str(value) for value in values})
        step = {name: i / max(1, len(names) - 1) for i, name in enumerate(names)}
        return (lambda value: step[str(value)]), [(at, name) for name, at in step.items()]
    log = min(known) > 0 and max(known) / min(known) > 8
    warp = math.log if log else float
    low, high = warp(min(known)), warp(max(known))

    def place(value: float | None) -> float:
        if value is None:
            return math.nan
        return 0.5 if high == low else (warp(value) - low) / (high - low)

    distinct = sorted(set(known))
    if len(distinct) > _MOST_LABELS:
        ends = [low + (high - low) * i / 4 for i in range(5)]
        distinct = [math.exp(end) if log else end for end in ends]
    return place, [(place(value), short(value, ".3g")) for value in distinct]
