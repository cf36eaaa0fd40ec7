"""Methods side by side: runs the cells of a comparison and sums them up in one table."""

import math
from collections.abc import Iterable
from statistics import mean, stdev
from typing import Any

from dpfp_ray.results import Store
from dpfp_ray.sampling import keyed_generator
from dpfp_ray.spaces import read_search_space, space_path
from dpfp_ray.sweep import PUBLIC_SEED, InputsOnce, bind_trial
from dpfp_ray.trial import Trial
from dpfp_ray.tuning import Runner

Row = dict[str, Any]


def bind_cells(cells: list[dict[str, Any]], seeds: int, inputs_of: InputsOnce) -> list[Trial]:
    """Every cell `seeds` times; repetition by repetition, so that a stopped comparison is fair."""
    return [
        bind_trial(values, inputs_of, seed_index) for seed_index in range(seeds) for values in cells
    ]


def tuned_cells(cells: list[dict[str, Any]], runner: Runner, samples: int) -> list[dict[str, Any]]:
    """Each cell with the best of `samples` random settings: the same effort for every method.

    The method's paper's own settings are the first candidate, so tuning never loses to them by
    accident of the draw. What the user has fixed stays fixed.
    """
    candidates = [
        [(values, bind_trial(values, runner.inputs_of, group="tune")) for values in tried]
        for tried in ([cell, *drawn(cell, samples - 1)] for cell in cells)
    ]
    runner.run(
        [trial for tried in candidates for _, trial in tried],
        varied=["method", "epsilon", "batch_size", "learning_rate"],
    )
    store = Store(runner.storage)

    def score(trial: Trial) -> float:
        record = store.get(trial.id) or {}
        return float(record.get("metrics", {}).get("accuracy", -1.0))

    return [max(tried, key=lambda one: score(one[1]))[0] for tried in candidates]


def drawn(cell: dict[str, Any], samples: int) -> list[dict[str, Any]]:
    """Random settings from the search space that is shipped for the cell's method."""
    space = read_search_space(space_path(cell["method"]), {})
    rng = keyed_generator(PUBLIC_SEED, f"tune {cell['method']}", 0)
    names = {parameter.name for parameter in space.parameters}
    tried = []
    for _ in range(samples):
        values = space.plan_values({p.name: p.draw(rng) for p in space.parameters} | {})
        tried.append({name: values[name] for name in names if name in values} | cell)
    return tried


def summarise(records: Iterable[dict[str, Any]]) -> list[Row]:
    """One row for each (method, ε): mean ± sd over seeds, everything relative to non-private."""
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((label(record["plan"]), record["plan"].get("epsilon")), []).append(record)
    order = sorted(groups, key=lambda key: (key[1] is not None, key[1] or 0.0, key[0]))
    base = next((groups[key] for key in order if key[1] is None), [])
    reference = _average([r for r in base if r.get("finished")])
    rows = []
    for key in order:
        done = [record for record in groups[key] if record.get("finished")]
        row: Row = {
            "method": key[0],
            "epsilon": key[1],
            "runs": len(done),
            "failed": len(groups[key]) - len(done),
        }
        row |= _average(done)
        if reference and done:
            row["gap"] = row["accuracy"] - reference["accuracy"]
            row["relative_speed"] = row["examples_per_second"] / reference["examples_per_second"]
            row["relative_memory"] = row["peak_memory_bytes"] / reference["peak_memory_bytes"]
        rows.append(row)
    return rows


def label(plan: dict[str, Any]) -> str:
    """A method's name, with what makes it a variant."""
    parts = [plan["method"]]
    if plan["method"] == "dpfp" and plan.get("mode") not in (None, "paper"):
        parts.append(plan["mode"])
    elif plan.get("scope") == "head":
        parts.append("head")
    return " ".join(parts)


def _average(done: list[dict[str, Any]]) -> Row:
    if not done:
        return {}
    scores = [record["metrics"]["accuracy"] for record in done]
    first = done[0]
    return {
        "accuracy": mean(scores),
        "accuracy_sd": stdev(scores) if len(scores) > 1 else None,
        "guarantee": first["privacy"]["guarantee"],
        **{f"epsilon_{name}": value for name, value in first["privacy"]["epsilon"].items()},
        "sigma": first["privacy"]["sigma"],
        "noise_coordinates": first["privacy"]["noise_coordinates"],
        "batch_size": first["plan"]["batch_size"],
        "epochs": first["plan"]["epochs"],
        "learning_rate": first["plan"]["learning_rate"],
        "examples_per_second": mean(r["cost"]["examples_per_second"] for r in done),
        "peak_memory_bytes": mean(r["cost"]["peak_memory_bytes"] for r in done),
        "seconds": mean(r["trial"]["seconds"] for r in done),
    }


HEADINGS = (
    "method", "ε", "accuracy", "gap", "ε gdp", "ε rdp", "ε pld", "σ", "noise coords", "B", "E",
    "speed", "memory", "time",
)  # fmt: skip
LEGEND = (
    "speed, memory: relative to non_private. ε: the budget; gdp, rdp, pld: what each accountant "
    "says was spent."
)
NOMINAL = (
    "† nominal ε: the method's guarantee rests on assumptions that do not hold for it "
    "(docs/privacy.md)."
)


def cells_of(row: Row) -> list[str]:
    def number(key: str, form: str) -> str:
        value = row.get(key)
        return "—" if value is None else format(float(value), form)

    mark = "†" if row.get("guarantee") == "nominal" else ""
    spread = f" ± {row['accuracy_sd']:.4f}" if row.get("accuracy_sd") is not None else ""
    budget = "—" if row["epsilon"] is None else f"{row['epsilon']:g}{mark}"
    spent = [number(f"epsilon_{name}", ".2f") for name in ("gdp", "rdp", "pld")]
    return [
        row["method"],
        budget,
        number("accuracy", ".4f") + spread if row["runs"] else "failed",
        number("gap", "+.4f"),
        *(f"{value}{mark if value != '—' else ''}" for value in spent),
        number("sigma", ".3f"),
        number("noise_coordinates", ",.0f"),
        number("batch_size", ".0f"),
        number("epochs", "g"),
        number("relative_speed", ".2f"),
        number("relative_memory", ".2f"),
        _clock(row.get("seconds")),
    ]


def print_comparison(rows: list[Row]) -> None:
    from rich.table import Table

    from dpfp_ray.terminal import stdout

    table = Table(*HEADINGS, pad_edge=False)
    for row in rows:
        table.add_row(*cells_of(row))
    # A redirected table keeps its columns; a narrow terminal wraps them by itself.
    stdout.print(table, width=None if stdout.is_terminal else 150)
    stdout.print(LEGEND)
    if any(row.get("guarantee") == "nominal" for row in rows):
        stdout.print(NOMINAL)


def markdown(rows: list[Row]) -> str:
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(cells_of(row))} |" for row in rows]
    notes = [LEGEND] + ([NOMINAL] if any(r.get("guarantee") == "nominal" for r in rows) else [])
    return "\n".join([*lines, "", *notes]) + "\n"


def _clock(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "—"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
