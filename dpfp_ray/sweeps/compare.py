"""Methods side by side: runs the cells of a comparison and shows them in one table."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.method_spec import spec_file
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.privacy.wording import one_line
from dpfp_ray.results.rows import scalar
from dpfp_ray.results.store import Store
from dpfp_ray.results.summary import Cell, Key, by_key, cells_of, read_runs
from dpfp_ray.sweeps.runner import Runner
from dpfp_ray.sweeps.search_space import DERIVED
from dpfp_ray.sweeps.spaces import has_space, read_search_space, space_path
from dpfp_ray.sweeps.sweep import PUBLIC_SEED, bind_trial
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.training.run import Inputs

Row = dict[str, Any]
Values = dict[str, Any]  # the plan's values for one (method, ε)
# A parameter of a search space that stands for another field.
MEANS = {DERIVED: "micro_batches"}
# Columns of flat rows that the table shows: by each accountant, and averaged over seeds.
SPENT = ("epsilon_gdp", "epsilon_rdp", "epsilon_pld")
MEASURED = (
    *("sigma", "noise_coordinates", "batch_size", "epochs", "learning_rate"),
    *("examples_per_second", "peak_memory_bytes"),
)


def bind_cells(cells: list[Values], seeds: int, inputs_of: Callable[[Plan], Inputs]) -> list[Trial]:
    """Every cell `seeds` times; repetition by repetition, so that a stopped comparison is fair."""
    return [
        bind_trial(values, inputs_of, seed_index) for seed_index in range(seeds) for values in cells
    ]


def differing(trials: list[Trial]) -> list[str]:
    """What tells these trials apart, for the live table."""
    configs = [{**trial.plan.to_dict(), "seed_index": trial.seed_index} for trial in trials]
    names = ("method", "mode", "scope", "epsilon", "seed_index")
    return [n for n in names if n == "method" or len({config[n] for config in configs}) > 1]


def tuned_cells(cells: list[Values], runner: Runner, samples: int) -> list[Values]:
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
    cell: Values, samples: int, inputs_of: Callable[[Plan], Inputs]
) -> list[tuple[Values, Trial]]:
    """The cell itself and random variants of it from the search space of its method; valid ones
    only (a batch may be larger than the data), each once."""
    space = replace(read_search_space(space_path(space_name(cell)), {}), fixed=cell)
    free = [p for p in space.parameters if MEANS.get(p.name, p.name) not in cell]
    rng = keyed_generator(PUBLIC_SEED, f"tune {space.name}", 0)
    found: dict[str, tuple[Values, Trial]] = {}
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


def space_name(cell: Values) -> str:
    """The space of the method's file; one of the scope's own where there is one (`dpsgd_top`)."""
    name = spec_file(str(cell["method"]), cell.get("mode"))
    own = f"{name}_{str(cell.get('scope')).partition(':')[0]}"
    return own if has_space(own) else name


def summarise(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row for each (method, ε): mean ± sd over seeds, everything relative to non-private."""
    runs = read_runs(records)
    cells = {cell.key: cell for cell in cells_of(runs)}
    rows: list[Row] = []
    for key, members in sorted(by_key(runs).items(), key=lambda item: _place(item[0])):
        cell = cells.get(key)
        rows.append(
            {
                "method": key.method,
                "epsilon": key.epsilon,
                "runs": len(cell.runs) if cell else 0,
                "failed": sum(not run.scored for run in members),
                **(_averages(cell) if cell else {}),
            }
        )
    reference = next((row for row in rows if row["epsilon"] is None and row["runs"]), None)
    for row in rows:
        if reference is not None and row["runs"]:
            row["gap"] = row["accuracy"] - reference["accuracy"]
            row["relative_speed"] = _ratio(row, reference, "examples_per_second")
            row["relative_memory"] = _ratio(row, reference, "peak_memory_bytes")
    return rows


def _place(key: Key) -> tuple[bool, float, str]:
    """Where a row stands: what has no ε first, then by budget, then by name."""
    return (key.epsilon is not None, key.epsilon or 0.0, key.method)


def _averages(cell: Cell) -> Row:
    seconds = [scalar(run.part("trial").get("seconds"), float) for run in cell.runs]
    known = [value for value in seconds if value is not None]
    spent = {name: cell.first.row[name] for name in SPENT}
    return {
        "accuracy": cell.accuracy,
        "accuracy_sd": cell.spread,
        "guarantee": cell.first.row["guarantee"],
        **{name: value for name, value in spent.items() if value is not None},
        **{name: cell.average(name) for name in MEASURED},
        "seconds": mean(known) if known else None,
    }


def _ratio(row: Row, reference: Row, name: str) -> float | None:
    value, base = row[name], reference[name]
    return value / base if value is not None and base else None


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


def entries(row: Row) -> list[str]:
    """One text for each heading, the audit's last."""

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
        table.add_row(*entries(row)[: len(headings)])
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
    for run in sorted(read_runs(records), key=lambda run: _place(run.key)):
        if "statement" in run.record:
            budget = "" if run.key.epsilon is None else f" at ε = {run.key.epsilon:g}"
            lines[f"{run.method}{budget}"] = one_line(run.record["statement"])
    return [f"{name}: {line}" for name, line in lines.items()]


def markdown(rows: list[Row]) -> str:
    headings = headings_of(rows)
    lines = [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    lines += [f"| {' | '.join(entries(row)[: len(headings)])} |" for row in rows]
    return "\n".join([*lines, "", *notes_of(rows)]) + "\n"


def _clock(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "—"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
