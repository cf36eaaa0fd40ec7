"""A comparison as people see it: one row for each (method, ε), the table, what its words mean, and
every pair of methods.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import mean, stdev
from typing import Any

from dpfp_ray.privacy.statement import one_line
from dpfp_ray.results.cells import Cell, by_key, cells_of
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import Key, read_runs
from dpfp_ray.system.terminal import page_width, print_prose, print_table, stdout, that_fit
from dpfp_ray.training.dev_scores import RULES
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


HEADINGS = (
    "method", "ε", "accuracy", "95% interval", "standing", "gap", "ε gdp", "ε rdp", "ε pld", "σ",
    "noise coords", "B", "E", "speed", "memory", "before", "time",
)  # fmt: skip
# What GLUE scores these tasks by, beside accuracy.
TASK_METRICS = {"qqp": ("f1", "F1"), "mrpc": ("f1", "F1"), "cola": ("matthews", "Matthews")}
AUDIT_HEADING = "audit ε ≥"
GAP = 2  # spaces between columns
# Columns that a page has room for only now and then, those worth most first.
IF_THEY_FIT = (
    "standing", "95% interval", AUDIT_HEADING, "gap", "σ", "time", "speed", "memory", "B", "E",
    "ε pld", "ε rdp", "ε gdp", "noise coords", "before",
)  # fmt: skip
LEGENDS = {
    "speed": "speed (± over seeds): relative to non_private; less than a second of training has no "
    "speed.",
    "memory": "memory: relative to non_private.",
    "before": "before: reading, tokenising, encoding.",
    "time": "time: the whole run.",
    "ε gdp": "ε: the budget; gdp, rdp, pld: what each accountant says was spent.",
}
STANDINGS = {
    "best": "best: better than every other private method at its ε, by a paired test over dev rows "
    "and seeds (Holm over the table, 5%).",
    "tie": "tie: not told apart from the highest mean at its ε.",
    "behind": "behind: another private method at its ε is better.",
    "one seed": "one seed: the spread over seeds is unknown, so no winner is named; use --seeds 5.",
    "one class": "one class: every run answers one class, whatever the row; never a winner.",
    "tuned": "tuned: the best of several settings by these very scores; compared with nothing.",
}
RETRAINED = "settings were tuned: each row is new runs of the best of as many settings."
BEST_EPOCH = "every run quotes its best epoch on dev (--select best), which flatters all of them."
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


def notes_of(rows: list[Row], headings: Sequence[str] = HEADINGS) -> list[str]:
    """What the table's words mean, as far as they are among its `headings`."""
    notes = [line for line in (headline_of(rows),) if line]
    notes += [STANDINGS[name] for name in STANDINGS if any(r.get("standing") == name for r in rows)]
    reasons = dict.fromkeys(str(row["not_tested"]) for row in rows if row.get("not_tested"))
    notes += [reason for reason in reasons if "tuned" not in {r.get("standing") for r in rows}]
    if any(row.get("tuned") == "retrained" for row in rows):
        notes.append(RETRAINED)
    if any(row.get("epoch") == RULES["best"] for row in rows):
        notes.append(BEST_EPOCH)
    if shown := [text for heading, text in LEGENDS.items() if heading in headings]:
        notes.append(" ".join(shown))
    if any(row.get("guarantee") == "nominal" for row in rows):
        notes.append(NOMINAL)
    if any(row.get("verdict") == "refuted" for row in rows):
        notes.append(REFUTED)
    if any(audit_mark(row) == " ○" for row in rows):
        notes.append(POWERLESS)
    return notes


def headline_of(rows: list[Row]) -> str:
    """Who is best at which ε, or that nobody is."""
    said = []
    for epsilon in dict.fromkeys(row["epsilon"] for row in rows if row["epsilon"] is not None):
        here = [row for row in rows if row["epsilon"] == epsilon and row.get("runs")]
        best = next((row["method"] for row in here if row.get("standing") == "best"), None)
        ties = [row["method"] for row in here if row.get("standing") == "tie"]
        if best:
            said.append(f"ε = {epsilon:g}: {best} is best")
        elif len(ties) > 1:
            said.append(f"ε = {epsilon:g}: {' and '.join(ties)} tie")
        elif len(here) > 1:
            said.append(f"ε = {epsilon:g}: no winner")
    return "; ".join(said)


def pair_lines(rows: list[Row]) -> list[str]:
    """Every tested pair once, in points, with what the test calls it."""
    lines, seen = [], set()
    for row in rows:
        for pair in row.get("pairs", ()):
            names = (frozenset((row["method"], pair["against"])), row["epsilon"])
            if names in seen or row["epsilon"] is None:
                continue
            seen.add(names)
            low, high = (100 * end for end in pair["interval"])
            why = f" ({pair['reason']})" if pair["reason"] else ""
            lines.append(
                f"ε = {row['epsilon']:g}: {row['method']} − {pair['against']} "
                f"{100 * pair['difference']:+.2f} points [{low:+.2f}, {high:+.2f}], "
                f"p {pair['p_holm']:.3g}: {pair['call']}{why}"
            )
    return lines


def majority_entries(rows: list[Row]) -> list[str] | None:
    """The line that every method must beat: always answering the most frequent class."""
    shares = [row["majority_accuracy"] for row in rows if row.get("majority_accuracy") is not None]
    if not shares:
        return None
    line = ["majority class", "—", f"{shares[0]:.4f}"]
    return line + ["—"] * (len(HEADINGS) + 1 - len(line))


def entries(row: Row) -> list[str]:
    """One text for each heading, the audit's last."""

    def number(key: str, form: str) -> str:
        value = row.get(key)
        return "—" if value is None else format(float(value), form)

    mark = "†" if row.get("guarantee") == "nominal" else ""
    spread = f" ± {row['accuracy_sd']:.4f}" if row.get("accuracy_sd") is not None else ""
    budget = "—" if row["epsilon"] is None else f"{row['epsilon']:g}{mark}"
    spent = [number(f"epsilon_{name}", ".2f") for name in ("gdp", "rdp", "pld")]
    interval = row.get("accuracy_interval")
    column, name = TASK_METRICS.get(str(row.get("task")), ("", ""))
    metric = f" ({name} {number(column, '.4f')})" if row.get(column) is not None else ""
    return [
        row["method"],
        budget,
        number("accuracy", ".4f") + spread + metric if row["runs"] else "failed",
        f"{interval[0]:.3f}–{interval[1]:.3f}" if interval else "—",
        row.get("standing") or "—",
        number("gap", "+.4f"),
        *(f"{value}{mark if value != '—' else ''}" for value in spent),
        number("sigma", ".3f"),
        number("noise_coordinates", ",.0f"),
        number("batch_size", ".0f"),
        number("epochs", "g"),
        _speed(row),
        number("relative_memory", ".2f"),
        _clock(row.get("prepare_seconds")),
        _clock(row.get("seconds")),
        number("audit_epsilon", ".2f") + audit_mark(row),
    ]


def _speed(row: Row) -> str:
    """Relative to non-private, with its own spread over seeds."""
    speed, rate = row.get("relative_speed"), row.get("examples_per_second")
    if speed is None or not rate:
        return "—"
    spread = row.get("examples_per_second_sd")
    return f"{speed:.2f}" + ("" if spread is None else f" ± {speed * spread / rate:.2f}")


def table_lines(rows: list[Row]) -> list[list[str]]:
    """The rows as texts, the majority class last."""
    majority = majority_entries(rows)
    return [*(entries(row) for row in rows), *([majority] if majority else [])]


def print_comparison(rows: list[Row], records: list[Record], *, wide: bool = False) -> None:
    """The table, what its marks mean, and each method's privacy in a line or two."""
    from rich.table import Table

    columns = {
        heading: [texts[number] for texts in table_lines(rows)]
        for number, heading in enumerate(headings_of(rows))
    }
    shown = list(columns) if wide else that_fit(columns, IF_THEY_FIT, GAP, page_width())
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for heading in shown:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for texts in zip(*(columns[heading] for heading in shown), strict=True):
        table.add_row(*texts)
    # At its natural width (about 160 columns) also where rich, not seeing a terminal, assumes 80.
    print_table(table, max(page_width(), 190 if wide else 0))
    for note in notes_of(rows, shown):
        print_prose(note)
    if len(shown) < len(columns):
        print_prose("--wide shows all columns, --json all numbers.")
    for line in pair_lines(rows):
        print_prose(f"  {line}")
    stdout.print("\nprivacy")
    for line in privacy_lines(records):
        print_prose(f"  {line}")


def privacy_lines(records: list[Record]) -> list[str]:
    """One line for each (method, ε): its statement in short."""
    lines = {}
    for run in sorted(read_runs(records), key=lambda run: place(run.key)):
        if run.record["statement"]:
            budget = "" if run.key.epsilon is None else f" at ε = {run.key.epsilon:g}"
            lines[f"{run.method}{budget}"] = one_line(run.record["statement"])
    return [f"{name}: {line}" for name, line in lines.items()]


def markdown(rows: list[Row]) -> str:
    headings = headings_of(rows)
    lines = [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    lines += [f"| {' | '.join(line[: len(headings)])} |" for line in table_lines(rows)]
    pairs = [f"- {line}" for line in pair_lines(rows)]
    return "\n".join([*lines, "", *notes_of(rows), *(["", *pairs] if pairs else [])]) + "\n"


def _clock(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "—"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
