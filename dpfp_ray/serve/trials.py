"""Trials for the pages: one row each in the table of all, and all about one of them."""

from collections.abc import Sequence
from typing import Any

from dpfp_ray.report.cost_tables import runs_table
from dpfp_ray.report.formats import Column, Entry, Row, Table, duration, number, percent, text
from dpfp_ray.report.plots import method_label
from dpfp_ray.report.statements import statement_text
from dpfp_ray.results.rows import scalar, section
from dpfp_ray.results.runs import ACCOUNTANT_NAMES, Run
from dpfp_ray.serve.snapshot import Snapshot

# Titles of the report's table of runs, in the order of the live page, and what they are called in
# a question. Those that are not in the report's table are added here.
QUERY_NAMES = {
    "Method": "method",
    "ε": "epsilon",
    "Accuracy (%)": "accuracy",
    "Status": "status",
    "Done": None,
    "ε spent": None,
    "Guarantee": "guarantee",
    "Task": "task",
    "B": "batch_size",
    "M": "micro_batches",
    "C": "clip",
    "Learning rate": "learning_rate",
    "E": "epochs",
    "Training time": "train_seconds",
    "Model": "model",
    "Sweep": "sweep",
    "Run": "id",
    "Error": "error",
}
CHOICES = ("method", "task", "status")


def trials_table(runs: Sequence[Run]) -> Table:
    """The report's table of runs with how far each has come, the telling columns first."""
    known = runs_table(runs)
    at = {column.title: index for index, column in enumerate(known.columns)}
    added = {"ε spent": spent, "Done": done}
    columns = [known.columns[at[title]] if title in at else Column(title) for title in QUERY_NAMES]
    rows = [
        Row(
            [row.entries[at[t]] if t in at else added[t](run) for t in QUERY_NAMES],
            row.tone,
        )
        for run, row in zip(runs, known.rows, strict=True)
    ]
    return Table("trials", "Trials", columns, rows)


def spent(run: Run) -> Entry:
    """ε so far, by the accountant that the budget is counted in."""
    accountant = str(run.row["accountant"])
    value = run.row.get(f"epsilon_{accountant}")
    return number(value if run.private else None, ".3f", run.mark)


def done(run: Run) -> Entry:
    """The share of steps; a running trial's record is as old as its last epoch."""
    total = _planned_steps(run)
    step = scalar(run.history[-1].get("step"), float) if run.history else None
    return text(None) if step is None or not total else number(min(1.0, step / total), ".0%")


def _planned_steps(run: Run) -> int | None:
    """T of the plan."""
    row = run.row
    if not (row["records"] and row["batch_size"] and row["epochs"]):
        return None
    return int(row["epochs"] * row["records"] / row["batch_size"]) or None


def choices(now: Snapshot) -> dict[str, list[str]]:
    """What the drop-down lists offer."""
    return {
        name: sorted({str(run.row[name]) for run in now.runs if run.row[name] is not None})
        for name in CHOICES
    }


def trial_facts(run: Run) -> dict[str, Any]:
    trial, environment = run.part("trial"), run.part("environment")
    row, facts = run.row, []
    for name, entry in (
        ("Status", text(row["status"])),
        ("Accuracy (%)", percent(row["accuracy"])),
        (f"ε{run.mark} budget", number(row["epsilon"], "g", run.mark)),
        (f"ε{run.mark} spent", spent(run)),
        ("δ", number(row["delta"], ".3g")),
        ("σ", number(row["sigma"] if run.private else None, ".4g")),
        ("Guarantee", text("refuted" if run.refuted else row["guarantee"])),
        ("Audit", _audit(run)),
        ("Training time", duration(row["train_seconds"])),
        ("Examples/s", number(row["examples_per_second"], ",.0f")),
        ("Peak memory", _mebibytes(row["peak_memory_bytes"])),
        ("Sweep", text(row["sweep"])),
        ("Node", text(trial.get("node"))),
        ("Device", text(environment.get("device"))),
        ("Error", text(row["error"])),
    ):
        if not entry.missing:
            facts.append((name, entry.text))
    return {
        "title": f"{method_label(run.method)}{run.mark} on {run.task}",
        "facts": facts,
        "plan": [
            (str(name), _short(value) + (run.mark if name == "epsilon" else ""))
            for name, value in run.part("plan").items()
            if value is not None
        ],
        "ledger": ledger(run),
        "statement": statement_text(run),
        "nominal": run.nominal,
    }


def ledger(run: Run) -> Table:
    """Epoch by epoch: what was reached and what had been spent by then."""
    splits = list(dict.fromkeys(str(s) for entry in run.history for s in section(entry, "dev")))
    accountants = ACCOUNTANT_NAMES if run.private else {}
    # Of private runs the training loss is there only if it was asked for.
    losses = {"Training loss": [entry.get("train_loss") for entry in run.history]}
    losses |= {
        f"Loss, {s}": [section(section(entry, "dev"), s).get("loss") for entry in run.history]
        for s in splits
    }
    losses = {t: v for t, v in losses.items() if any(value is not None for value in v)}
    titles = ["Epoch", "Steps", *losses, *(f"Accuracy, {s} (%)" for s in splits)]
    titles += [f"ε{run.mark} by {name}" for name in accountants.values()] + ["Training time"]
    rows = []
    for place, entry in enumerate(run.history):
        scores = [section(section(entry, "dev"), split).get("accuracy") for split in splits]
        by = section(entry, "epsilon")
        entries = [
            number(scalar(entry.get("epoch"), float), "g"),
            number(scalar(entry.get("step"), float), ",.0f"),
            *(number(scalar(values[place], float), ".4f") for values in losses.values()),
            *(percent(scalar(score, float)) for score in scores),
            *(number(scalar(by.get(name), float), ".3f", run.mark) for name in accountants),
            duration(scalar(entry.get("train_seconds"), float)),
        ]
        rows.append(Row(entries))
    return Table("ledger", "Ledger", [Column(title) for title in titles], rows)


def _audit(run: Run) -> Entry:
    bound = run.row["audit_epsilon"]
    shown = run.outcome is not None and bound is not None
    return text(f"{run.outcome}: ε ≥ {bound:.2f}" if shown else run.outcome)


def _mebibytes(size: int | None) -> Entry:
    return text(None) if size is None else text(f"{size / 2**20:,.0f} MiB")


def _short(value: Any) -> str:
    return text(f"{value:g}" if isinstance(value, float) else value).text
