"""Methods side by side: runs the cells of a comparison and sums them up in one table."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.method_spec import FIRST_MODE, spec_file
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.privacy.wording import one_line
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.runner import Runner
from dpfp_ray.sweeps.search_space import DERIVED
from dpfp_ray.sweeps.spaces import read_search_space, space_path
from dpfp_ray.sweeps.sweep import PUBLIC_SEED, bind_trial
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.training.run import Inputs

Row = dict[str, Any]
Cell = dict[str, Any]  # the plan's values for one (method, ε)
# A parameter of a search space that stands for another field.
MEANS = {DERIVED: "micro_batches"}


def bind_cells(cells: list[Cell], seeds: int, inputs_of: Callable[[Plan], Inputs]) -> list[Trial]:
    """Every cell `seeds` times; repetition by repetition, so that a stopped comparison is fair."""
    return [
        bind_trial(values, inputs_of, seed_index) for seed_index in range(seeds) for values in cells
    ]


def differing(trials: list[Trial]) -> list[str]:
    """What tells these trials apart, for the live table."""
    configs = [{**trial.plan.to_dict(), "seed_index": trial.seed_index} for trial in trials]
    names = ("method", "mode", "scope", "epsilon", "seed_index")
    return [n for n in names if n == "method" or len({config[n] for config in configs}) > 1]


def tuned_cells(cells: list[Cell], runner: Runner, samples: int) -> list[Cell]:
    """Each cell with the best of `samples` settings: the same effort for every method.

    The method's paper's own settings are the first candidate, so tuning never loses to them by
    accident of the draw. What the user has fixed stays fixed.
    """
    candidates = [drawn(cell, samples, runner.inputs_of) for cell in cells]
    runner.run(
        [trial for tried in candidates for _, trial in tried],
        varied=["method", "epsilon", "batch_size", "learning_rate"],
    )
    store = Store(runner.storage)

    def score(trial: Trial) -> float:
        record = store.get(trial.id) or {}
        return float(record.get("metrics", {}).get("accuracy", -1.0))

    return [max(tried, key=lambda one: score(one[1]))[0] for tried in candidates]


def drawn(
    cell: Cell, samples: int, inputs_of: Callable[[Plan], Inputs]
) -> list[tuple[Cell, Trial]]:
    """The cell itself and random variants of it from the search space of its method; valid ones
    only (a batch may be larger than the data), each once."""
    space = replace(read_search_space(space_path(space_name(cell)), {}), fixed=cell)
    free = [p for p in space.parameters if MEANS.get(p.name, p.name) not in cell]
    rng = keyed_generator(PUBLIC_SEED, f"tune {space.name}", 0)
    found: dict[str, tuple[Cell, Trial]] = {}
    for attempt in range(20 * samples):
        values = space.plan_values({p.name: p.draw(rng) for p in free if attempt})
        try:
            trial = bind_trial(values, inputs_of, group="tune")
        except UserError:
            if not attempt:
                raise
            continue
        found.setdefault(trial.id, (values, trial))
        if len(found) == samples:
            break
    return list(found.values())


def space_name(cell: Cell) -> str:
    return spec_file(str(cell["method"]), cell.get("mode"))


def summarise(records: Iterable[dict[str, Any]]) -> list[Row]:
    """One row for each (method, ε): mean ± sd over seeds, everything relative to non-private."""
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: _place(record["plan"])):
        groups.setdefault((label(record["plan"]), record["plan"].get("epsilon")), []).append(record)
    order = list(groups)
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


def _place(plan: dict[str, Any]) -> tuple[bool, float, str]:
    """Where a plan's row stands: what has no ε first, then by budget, then by name."""
    budget = plan.get("epsilon")
    return (budget is not None, budget or 0.0, label(plan))


def label(plan: dict[str, Any]) -> str:
    """A method's name, with what makes it a variant."""
    parts = [plan["method"]]
    if plan.get("mode") not in (None, FIRST_MODE):
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
AUDIT_HEADING = "audit ε ≥"
LEGEND = (
    "speed, memory: relative to non_private. ε: the budget; gdp, rdp, pld: what each accountant "
    "says was spent."
)
NOMINAL = (
    "† nominal ε: the method's guarantee rests on assumptions that do not hold for it "
    "(docs/privacy.md)."
)


REFUTED = "✗ refuted: an audit of this method proved more than the stated ε."


POWERLESS = "○ this audit could not have refuted the ε: more canaries, or a smaller δ, would help."


def audit_mark(row: Row) -> str:
    if row.get("verdict") == "refuted":
        return " ✗"
    powerless = row["epsilon"] is not None and row.get("audit_ceiling", math.inf) <= row["epsilon"]
    return " ○" if powerless else ""


def headings_of(rows: list[Row]) -> list[str]:
    return [*HEADINGS, *([AUDIT_HEADING] if any("verdict" in row for row in rows) else [])]


def notes_of(rows: list[Row]) -> list[str]:
    notes = [LEGEND]
    if any(row.get("guarantee") == "nominal" for row in rows):
        notes.append(NOMINAL)
    if any(row.get("verdict") == "refuted" for row in rows):
        notes.append(REFUTED)
    if any(audit_mark(row) == " ○" for row in rows):
        notes.append(POWERLESS)
    return notes


def cells_of(row: Row) -> list[str]:
    """One cell for each heading, the audit's last."""

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
        number("audit_epsilon", ".2f") + audit_mark(row),
    ]


def print_comparison(rows: list[Row], records: list[dict[str, Any]]) -> None:
    """The table, what its marks mean, and each method's privacy in a line or two."""
    from rich.table import Table

    from dpfp_ray.data.terminal import print_table, stdout

    table = Table(box=None, pad_edge=False)
    headings = headings_of(rows)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*cells_of(row)[: len(headings)])
    # At its natural width (about 120 columns) also where rich, not seeing a terminal, assumes 80.
    print_table(table, max(stdout.width, 150))
    for note in notes_of(rows):
        stdout.print(note, markup=False)
    stdout.print("\nprivacy")
    for line in privacy_lines(records):
        stdout.print(f"  {line}", markup=False)


def privacy_lines(records: list[dict[str, Any]]) -> list[str]:
    """One line for each (method, ε): its statement in short."""
    lines = {}
    for record in sorted(records, key=lambda record: _place(record["plan"])):
        plan = record["plan"]
        if "statement" in record:
            budget = "" if plan.get("epsilon") is None else f" at ε = {plan['epsilon']:g}"
            lines[f"{label(plan)}{budget}"] = one_line(record["statement"])
    return [f"{name}: {line}" for name, line in lines.items()]


def markdown(rows: list[Row]) -> str:
    headings = headings_of(rows)
    lines = [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    lines += [f"| {' | '.join(cells_of(row)[: len(headings)])} |" for row in rows]
    return "\n".join([*lines, "", *notes_of(rows)]) + "\n"


def _clock(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "—"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
