"""Trials for the pages: one row each in the table of all, and all about one of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpfp_ray.plan.method_spec import is_private
from dpfp_ray.report.runs import ACCOUNTANT_NAMES, NOMINAL, Run
from dpfp_ray.report.statements import statement_text
from dpfp_ray.report.table import Column, Entry, Row, Table, duration, number, percent, text
from dpfp_ray.report.tables import runs_table
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


def mark(run: Run) -> str:
    return NOMINAL if run.row["guarantee"] == "nominal" else ""


def spent(run: Run) -> Entry:
    """ε so far, by the accountant that the budget is counted in."""
    accountant = str(run.row["accountant"])
    value = run.row.get(f"epsilon_{accountant}")
    return number(value if is_private(run.row["method"]) else None, ".3f", mark(run))


def done(run: Run) -> Entry:
    """The share of steps; a running trial's record is as old as its last epoch."""
    history, total = _history(run), _planned_steps(run)
    step = _number(history[-1].get("step")) if history else None
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
        (f"ε{mark(run)} budget", number(row["epsilon"], "g", mark(run))),
        (f"ε{mark(run)} spent", spent(run)),
        ("δ", number(row["delta"], ".3g")),
        ("σ", number(row["sigma"] if is_private(row["method"]) else None, ".4g")),
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
        "title": f"{run.method}{mark(run)} on {run.task}",
        "facts": facts,
        "plan": [
            (str(name), _short(value) + (mark(run) if name == "epsilon" else ""))
            for name, value in run.part("plan").items()
            if value is not None
        ],
        "ledger": ledger(run),
        "statement": statement_text(run),
        "nominal": bool(mark(run)),
    }


def ledger(run: Run) -> Table:
    """Epoch by epoch: what was reached and what had been spent by then."""
    history = _history(run)
    splits = list(dict.fromkeys(str(s) for entry in history for s in _part(entry, "dev")))
    private = is_private(run.row["method"])
    accountants = ACCOUNTANT_NAMES if private else {}
    titles = ["Epoch", "Steps", "Training loss", *(f"Accuracy, {s} (%)" for s in splits)]
    titles += [f"ε{mark(run)} by {name}" for name in accountants.values()] + ["Training time"]
    rows = []
    for entry in history:
        scores = [_part(_part(entry, "dev"), split).get("accuracy") for split in splits]
        by = _part(entry, "epsilon")
        entries = [
            number(_number(entry.get("epoch")), "g"),
            number(_number(entry.get("step")), ",.0f"),
            number(_number(entry.get("train_loss")), ".4f"),
            *(percent(_number(score)) for score in scores),
            *(number(_number(by.get(name)), ".3f", mark(run)) for name in accountants),
            duration(_number(entry.get("train_seconds"))),
        ]
        rows.append(Row(entries))
    return Table("ledger", "Ledger", [Column(title) for title in titles], rows)


def _audit(run: Run) -> Entry:
    bound, verdict = run.row["audit_epsilon"], run.row["verdict"]
    if verdict is None:
        return text(None)
    return text(verdict if bound is None else f"{verdict}: ε ≥ {bound:.2f}")


def _mebibytes(size: int | None) -> Entry:
    return text(None) if size is None else text(f"{size / 2**20:,.0f} MiB")


def _history(run: Run) -> list[Mapping[str, Any]]:
    found = run.record.get("history")
    return [e for e in found if isinstance(e, Mapping)] if isinstance(found, list) else []


def _part(entry: Any, name: str) -> Mapping[str, Any]:
    found = entry.get(name) if isinstance(entry, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)  # "inf" is how JSON files hold an infinite ε
    except ValueError:
        return None


def _short(value: Any) -> str:
    return text(f"{value:g}" if isinstance(value, float) else value).text
