"""Tables of single runs: the audits, and every run."""

from collections.abc import Sequence

from dpfp_ray.plan.method_spec import uses
from dpfp_ray.report.cost_tables import MARKS, columns_of
from dpfp_ray.report.plots import method_label
from dpfp_ray.report.table import Row, Table, duration, number, percent, text
from dpfp_ray.results.rows import scalar
from dpfp_ray.results.runs import Run


def audit_table(runs: Sequence[Run]) -> Table:
    """Lower bounds on ε that attacks reached; a bound above the stated ε refutes it."""
    names = [
        *("Stated ε", "Audit: ε at least", "Outcome", "Most it could show", "Canaries"),
        *("Guesses", "Correct", "Canary family", "Access", "Confidence", "Run"),
    ]
    columns = columns_of(names, {"Outcome", "Canary family", "Access", "Run"})
    rows = []
    for run in runs:
        audit = run.part("audit")
        if not audit:
            continue
        stated = scalar(audit.get("stated_epsilon", audit.get("stated")), float)
        entries = [
            *(text(run.model), text(run.task), text(method_label(run.method) + run.mark)),
            number(run.row["epsilon"] if stated is None else stated, ".3g", run.mark),
            number(run.row["audit_epsilon"], ".3f"),
            text(run.outcome),
            number(scalar(audit.get("ceiling"), float), ".3f"),
            *(
                number(scalar(audit.get(name), float), ",.0f")
                for name in ("canaries", "guesses", "correct")
            ),
            *(text(audit.get(name)) for name in ("family", "access")),
            number(scalar(audit.get("confidence"), float), ".0%"),
            text(run.row["id"]),
        ]
        rows.append(Row(entries, "refuted" if run.refuted else ""))
    notes = [
        "What right guesses prove about ε at the given confidence. Consistent proves nothing: this "
        "attack found no more, and it could not have shown more than the column says."
    ]
    return Table("audit", "Audits", columns, rows, notes=[*notes, MARKS[0]] if rows else notes)


def runs_table(runs: Sequence[Run]) -> Table:
    """Every record, also those that failed, were refused or stopped."""
    names = [
        *("ε", "Accuracy (%)", "B", "M", "C", "Learning rate", "E", "Training time", "Guarantee"),
        *("Status", "Sweep", "Run", "Error"),
    ]
    columns = columns_of(names, {"Guarantee", "Status", "Sweep", "Run", "Error"})
    rows = []
    for run in runs:
        row = run.row
        entries = [
            *(text(run.model), text(run.task), text(method_label(run.method) + run.mark)),
            number(row["epsilon"], "g", run.mark),
            percent(row["accuracy"]),
            number(row["batch_size"], ",d"),
            number(row["micro_batches"] if uses(row["method"], "micro_batches") else None, ",d"),
            number(row["clip"] if run.private else None, "g"),
            number(row["learning_rate"], ".3g"),
            number(row["epochs"], "g"),
            duration(row["train_seconds"]),
            text("refuted" if run.refuted else row["guarantee"]),
            *(text(row[name]) for name in ("status", "sweep", "id", "error")),
        ]
        rows.append(Row(entries, "refuted" if run.refuted else ""))
    notes = list(MARKS[:1]) if any(run.nominal for run in runs) else []
    return Table("runs", "Every run", columns, rows, notes=notes)
