"""Methods side by side: from the records of a comparison to one row for each (method, ε)."""

from collections.abc import Iterable
from statistics import mean, stdev
from typing import Any

from dpfp_ray.results.cells import Cell, by_key, cells_of
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import Key, read_runs
from dpfp_ray.training.record import Record, Select

Row = dict[str, Any]
# Columns of flat rows that the table shows: by each accountant, and averaged over seeds.
SPENT = ("epsilon_gdp", "epsilon_rdp", "epsilon_pld")
MEASURED = (
    *("sigma", "noise_coordinates", "batch_size", "epochs", "learning_rate"),
    *("f1", "matthews", "calibration_error", "peak_memory_bytes", "prepare_seconds"),
    "train_seconds",
)


def with_candidates(shown: list[Record], records: Iterable[Record]) -> list[Record]:
    """The records of a comparison and those that its settings were chosen by."""
    chosen = {id(record) for record in shown}
    tried = [r for r in records if r["trial"].get("group") == "tune" and id(r) not in chosen]
    return [*shown, *tried]


def summarise(records: Iterable[Record], select: Select = "last") -> list[Row]:
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
    seconds = [run.record["trial"].get("seconds") for run in cell.runs]
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
