"""Heat maps of accuracy over two hyperparameters, everything else held fixed."""

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from dpfp_ray.report import paper
from dpfp_ray.report.plots import COLOURS, Drawing, canvas, clean, finish, method_label, short
from dpfp_ray.results.runs import NOMINAL, Budget, Run

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
