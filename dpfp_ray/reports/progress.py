"""Tables of runs that may still be running: how far each has come, and one run by its epochs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpfp_ray.reports.cost_tables import runs_table
from dpfp_ray.reports.formats import Column, Row, Table, number
from dpfp_ray.results.runs import Run

# What people who watch trials look for; the other columns of the report's table follow.
FIRST = ("Run", "Status", "Method", "ε", "Accuracy (%)", "Done", "ε spent")


def progress_table(runs: Sequence[Run]) -> Table:
    """The report's table of runs, with how far each has come."""
    table = runs_table(runs)
    columns = [*table.columns, Column("Done"), Column("ε spent")]
    titles = [column.title for column in columns]
    places = [titles.index(title) for title in FIRST]
    places += [at for at, title in enumerate(titles) if title not in FIRST]
    rows = []
    for run, row in zip(runs, table.rows, strict=True):
        history, epochs = run.record["history"], run.row["epochs"]
        epoch = history[-1]["epoch"] if history else None
        done = min(1.0, epoch / epochs) if epoch and epochs else None
        spent = run.row.get(f"epsilon_{run.row['accountant']}") if run.private else None
        entries = [*row.entries, number(done, ".0%"), number(spent, ".3f", run.mark)]
        tone = "running" if run.row["status"] == "running" else row.tone
        rows.append(Row([entries[at] for at in places], tone))
    shown = [columns[at] for at in places]
    return Table(table.name, table.title, shown, rows, notes=table.notes)


def epochs_table(run: Run) -> Table:
    """One run epoch by epoch, as its record has it: scores, and ε spent by then."""
    epochs = [dict(flat_numbers(entry)) for entry in run.record["history"]]
    titles = dict.fromkeys(title for epoch in epochs for title in epoch)
    marks = {title: run.mark if "epsilon" in title else "" for title in titles}
    rows = [Row([number(epoch.get(t), ".4g", marks[t]) for t in titles]) for epoch in epochs]
    return Table("epochs", "Epoch by epoch", [Column(title) for title in titles], rows)


def flat_numbers(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested facts, by names such as `dev dev accuracy`."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{name} ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
