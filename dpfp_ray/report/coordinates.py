"""Parallel coordinates of a sweep: a line for each trial through what was varied, to its score."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from dpfp_ray.report.plots import COLOURS, Drawing, canvas, clean, finish, method_label, short
from dpfp_ray.results.runs import NOMINAL, Run

_FIELDS = {
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


def sweep_figures(runs: Sequence[Run], command: str) -> Iterator[Drawing]:
    """For each sweep that varied two things or more in three settings or more."""
    sweeps: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if run.row["sweep"]:
            sweeps.setdefault((run.row["sweep"], run.task, run.model), []).append(run)
    number = 0
    for (sweep, task, model), trials in sweeps.items():
        done = [run for run in trials if run.scored]
        varied = [name for name in _FIELDS if len({_value(run, name) for run in done}) > 1]
        if len(varied) < 2 or _settings(done) < _FEWEST:
            continue
        number += 1
        title = f"Sweep {sweep}: {task}, {model}"
        with canvas(height=4.2) as (figure, axes):
            _draw(figure, axes, done, varied)
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
        return method_label(run.method) + run.mark
    return run.row[name]


def _draw(figure: Any, axes: Any, runs: Sequence[Run], varied: Sequence[str]) -> None:
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
    names = [*(_FIELDS[name] for name in varied), "accuracy\n(%)"]
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
