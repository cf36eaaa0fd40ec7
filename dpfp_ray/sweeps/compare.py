"""Methods side by side: the cells of a comparison, how they are tuned, and their rows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from dpfp_ray.data.terminal import stderr
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.method_spec import spec_file
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.rows import scalar
from dpfp_ray.results.store import Store
from dpfp_ray.results.summary import Cell, Key, by_key, cells_of, read_runs
from dpfp_ray.sweeps.foresight import sensitivity_line
from dpfp_ray.sweeps.runner import Runner
from dpfp_ray.sweeps.search_space import DERIVED
from dpfp_ray.sweeps.spaces import has_space, read_search_space, space_path
from dpfp_ray.sweeps.sweep import PUBLIC_SEED, bind_trial
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.training.dev_scores import Select
from dpfp_ray.training.run import Inputs

Row = dict[str, Any]
Values = dict[str, Any]  # the plan's values for one (method, ε)
# A parameter of a search space that stands for another field.
MEANS = {DERIVED: "micro_batches"}
# Columns of flat rows that the table shows: by each accountant, and averaged over seeds.
SPENT = ("epsilon_gdp", "epsilon_rdp", "epsilon_pld")
MEASURED = (
    *("sigma", "noise_coordinates", "batch_size", "epochs", "learning_rate"),
    *("f1", "matthews", "calibration_error", "peak_memory_bytes", "prepare_seconds"),
    "train_seconds",
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


def announce(trials: list[Trial], seeds: int, inputs_of: Callable[[Plan], Inputs]) -> None:
    """Before anything runs: what the planned seeds and dev rows can show."""
    plans = list({trial.plan.hash: trial.plan for trial in trials}.values())
    table = next(iter(inputs_of(plans[0]).data.dev.values()))
    stderr.print(sensitivity_line(plans, seeds, len(table)), markup=False)


def with_candidates(
    shown: list[dict[str, Any]], records: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The records of a comparison and those that its settings were chosen by."""
    chosen = {id(record) for record in shown}
    tried = [r for r in records if r["trial"].get("group") == "tune" and id(r) not in chosen]
    return [*shown, *tried]


def summarise(records: Iterable[Mapping[str, Any]], select: Select = "last") -> list[Row]:
    """One row for each (method, ε): mean ± sd over seeds, everything relative to non-private.

    `pairs` are the row's paired tests against the others at its ε, `standing` is what follows.
    """
    runs = read_runs(records, select)
    cells = {cell.key: cell for cell in cells_of(runs)}
    contests = contests_of(list(cells.values()))
    rows: list[Row] = []
    for key, members in sorted(by_key(runs).items(), key=lambda item: place(item[0])):
        cell = cells.get(key)
        compared = [run for run in members if not run.tuning]
        rows.append(
            {
                "task": members[0].row["task"],
                "method": key.method,
                "epsilon": key.epsilon,
                "runs": len(cell.runs) if cell else 0,
                "failed": sum(not run.scored for run in compared),
                **(_averages(cell) if cell else {}),
                **(_called(cell, contests) if cell else {}),
            }
        )
    reference = next((row for row in rows if row["epsilon"] is None and row["runs"]), None)
    for row in rows:
        if reference is not None and row["runs"]:
            row["gap"] = row["accuracy"] - reference["accuracy"]
            row["relative_speed"] = _ratio(row, reference, "examples_per_second")
            row["relative_memory"] = _ratio(row, reference, "peak_memory_bytes")
    return rows


def _called(cell: Cell, contests: list[Contest]) -> Row:
    """What the tests say of a row, and against whom."""
    mine = [contest for contest in contests if cell in contest.ranked]
    pairs = [pair for contest in mine for pair in contest.pairs_of(cell)]
    standing = next((found for one in mine if (found := one.standing(cell))), "")
    return {
        "accuracy_interval": list(cell.interval) if cell.interval else None,
        "standing": standing or ("one class" if cell.one_class else None),
        "one_class": cell.one_class,
        "majority_accuracy": cell.majority,
        "settings_tried": cell.settings,
        "tuned": cell.tuning or None,
        "epoch": cell.first.metrics.get("rule"),
        "recall": cell.first.metrics.get("recall"),
        "dev_rows": cell.first.answers.rows if cell.first.answers else None,
        "not_tested": next((one.why_not for one in mine if one.why_not), None),
        "pairs": [
            {
                "against": pair.second,
                "difference": pair.difference,
                "interval": list(pair.simultaneous),
                "p": pair.p,
                "p_holm": pair.p_holm,
                "call": pair.call,
                "reason": pair.reason,
            }
            for pair in pairs
        ],
    }


def place(key: Key) -> tuple[bool, float, str]:
    """Where a row stands: what has no ε first, then by budget, then by name."""
    return (key.epsilon is not None, key.epsilon or 0.0, key.method)


def _averages(cell: Cell) -> Row:
    seconds = [scalar(run.part("trial").get("seconds"), float) for run in cell.runs]
    known = [value for value in seconds if value is not None]
    spent = {name: cell.first.row[name] for name in SPENT}
    rates = cell.rates
    return {
        "accuracy": cell.accuracy,
        "accuracy_sd": cell.spread,
        "guarantee": cell.first.row["guarantee"],
        **{name: value for name, value in spent.items() if value is not None},
        **{name: cell.average(name) for name in MEASURED},
        # Of less than a second of training there is no rate.
        "examples_per_second": mean(rates) if rates else None,
        "examples_per_second_sd": stdev(rates) if len(rates) > 1 else None,
        "seconds": mean(known) if known else None,
    }


def _ratio(row: Row, reference: Row, name: str) -> float | None:
    value, base = row[name], reference[name]
    return value / base if value is not None and base else None
