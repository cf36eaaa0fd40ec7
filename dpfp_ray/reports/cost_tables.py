"""Tables beside the main one: cost, noise and accounting of cells; the audits, and every run, also
while it is running.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from dpfp_ray.plan.method_spec import uses
from dpfp_ray.reports import paper
from dpfp_ray.reports.formats import (
    MISSING,
    Column,
    Entry,
    Row,
    Table,
    duration,
    number,
    percent,
    text,
)
from dpfp_ray.reports.plots import cell_label, method_label
from dpfp_ray.reports.statements import proved_epsilon, tuning_epsilon, unamplified_epsilon
from dpfp_ray.results.cells import Cell, relative
from dpfp_ray.results.runs import ACCOUNTANT_NAMES, NOMINAL, REFUTED, Run

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


MARKS = (
    f"{NOMINAL} nominal ε: what the accounting says, and no guarantee; the statement says why.",
    f"{REFUTED} refuted: an audit found more leakage than the stated ε allows.",
)
_WHO = ("Model", "Task", "Method")


def cost_table(cells: Sequence[Cell]) -> Table:
    """Measured memory and time, beside the orders of growth of the paper's Table "cmp"."""
    names = [
        *("ε", "Peak memory (MiB)", "Memory ÷ Non-DP", "Memory, paper"),
        *("Before training", "Training time", "Time ÷ Non-DP", "Examples/s", "Speed ÷ Non-DP"),
        *("Compute, paper", "B", "E", "Device"),
    ]
    columns = columns_of(names, {"Memory, paper", "Compute, paper", "Device"})
    rows = []
    for cell in cells:
        base = _plain(cells, cell)
        memory = cell.average("peak_memory_bytes")
        claims = _claims(cell)
        entries = [
            *who(cell),
            number(cell.key.epsilon, "g", cell.mark),
            number(None if memory is None else memory / 2**20, ",.0f"),
            number(relative(cell, base, "peak_memory_bytes"), ".2f"),
            text(claims.get("memory")),
            duration(cell.average("prepare_seconds")),
            duration(cell.average("train_seconds")),
            number(relative(cell, base, "train_seconds"), ".2f"),
            _rate(cell),
            _relative_rate(cell, base),
            text(claims.get("compute")),
            number(cell.average("batch_size"), ",.0f"),
            number(cell.average("epochs"), "g"),
            text(_device(cell.first)),
        ]
        rows.append(Row(entries, tone(cell)))
    notes = [
        "Measured, mean over seeds. ÷ Non-DP: against training without privacy of the same model "
        "and task. Peak memory is that of the whole process. Times are measured on private "
        "records: no ε covers them.",
        "Before training: reading, tokenising, encoding, calibration and building the model, as "
        "far as no cache had it. ±: standard deviation over seeds. Less than a second of training "
        "tells no rate, and is not compared.",
        "Paper: the orders of growth of its Table cmp (m batch, d model size, w width, r rank, "
        "K power iterations).",
        *marks_legend(cells),
    ]
    return Table("cost", "Measured memory and time", columns, rows, notes=notes)


def noise_table(cells: Sequence[Cell]) -> Table:
    """How many coordinates get noise and how strong it is, beside the paper's claims."""
    names = [
        *("ε", "Calibrated by", "Noise coordinates k", "Coordinates, paper", "σ", "C"),
        *("Noise power σ²", "Total power σ²k", "(σ/C)² ÷ DP-SGD’s", "Paper’s claim", "B", "M"),
    ]
    columns = columns_of(names, {"Calibrated by", "Coordinates, paper", "Paper’s claim"})
    rows = []
    for cell in cells:
        if not cell.private:
            continue
        sigma, width = cell.average("sigma"), cell.average("noise_coordinates")
        power = None if sigma is None else sigma**2
        count = cell.average("micro_batches") if uses(cell.base_method, "micro_batches") else None
        plain = cell.key.method == cell.base_method and count is not None
        entries = [
            *who(cell),
            number(cell.key.epsilon, "g", cell.mark),
            text(ACCOUNTANT_NAMES.get(cell.key.accountant or "", cell.key.accountant)),
            number(width, ",.0f"),
            text(_claims(cell).get("coordinates")),
            number(sigma, ".4g"),
            number(cell.average("clip"), "g"),
            number(power, ".3g"),
            number(None if power is None or width is None else power * width, ".3g"),
            number(_noise_ratio(cells, cell), ".3g"),
            text(f"1/M = {1 / count:.3g}" if plain and count else None),
            number(cell.average("batch_size"), ",.0f"),
            number(count, ",.0f"),
        ]
        rows.append(Row(entries, tone(cell)))
    notes = [
        "(σ/C)² ÷ DP-SGD’s: at the same ε, accountant and B, where both were run; the paper claims "
        "1/M, which holds for C/σ ≪ 1 only. d model size, k representation, w width.",
        *marks_legend(cells),
    ]
    return Table("noise", "Noise: coordinates and power", columns, rows, notes=notes)


def accounting_table(cells: Sequence[Cell]) -> Table:
    """One ε by every accountant, with and without amplification, and with tuning paid for."""
    names = [
        *("ε budget", "Calibrated by", "δ", "ε by GDP + CLT", "ε by RDP", "ε by PLD"),
        *("ε without amplification", "Proved ε", "Settings tried", "ε with tuning", "σ/C"),
        *("Steps", "Guarantee"),
    ]
    columns = columns_of(names, {"Calibrated by", "Guarantee"})
    rows = []
    for cell in cells:
        if not cell.private:
            continue
        run, row, mark = cell.first, cell.first.row, cell.mark
        accountant = str(row["accountant"] or "")
        entries = [
            *who(cell),
            number(cell.key.epsilon, "g", mark),
            text(ACCOUNTANT_NAMES.get(accountant, accountant)),
            number(row["delta"], ".3g"),
            *(number(row[f"epsilon_{name}"], ".3f", mark) for name in ACCOUNTANT_NAMES),
            number(unamplified_epsilon(run), ".3f", mark),
            number(proved_epsilon(run), ".3f"),
            number(cell.settings, ",d"),
            number(tuning_epsilon(run), ".3f", mark),
            number(row["noise_multiplier"], ".4g"),
            number(row["steps"], ",d"),
            text(guarantee_text(cell)),
        ]
        rows.append(Row(entries, tone(cell)))
    notes = [
        "GDP + CLT is asymptotic and no upper bound; RDP and PLD are upper bounds, PLD is tight. "
        "All three count on amplification by sampling.",
        "Without amplification: if draws show. Proved: the smallest ε that is a theorem for the "
        "run, — if there is none. With tuning: choosing among settings on private data costs "
        "privacy too; — if that was not counted.",
        *marks_legend(cells),
    ]
    return Table("accounting", "What each accountant says was spent", columns, rows, notes=notes)


def guarantee_text(cell: Cell) -> str:
    refutation = cell.refutation
    if refutation is None:
        return cell.guarantee
    bound = refutation.row["audit_epsilon"]
    return "refuted" if bound is None else f"refuted: audit says ε ≥ {bound:.2f}"


def columns_of(names: Sequence[str], words: set[str]) -> list[Column]:
    """Who was run, then `names`, which are numbers but for `words`."""
    words = words | set(_WHO)
    return [Column(name, numeric=name not in words) for name in (*_WHO, *names)]


def who(cell: Cell) -> list[Entry]:
    return [text(cell.key.model), text(cell.key.task), text(cell_label(cell))]


def tone(cell: Cell) -> str:
    return "refuted" if cell.guarantee == "refuted" else ""


def marks_legend(cells: Sequence[Cell]) -> list[str]:
    """The words for those of the marks that these cells carry."""
    marks = "".join(cell.mark for cell in cells)
    return [legend for legend in MARKS if legend[0] in marks]


def _claims(cell: Cell) -> Mapping[str, str]:
    """The paper's, for the methods it describes; not for variants of ours."""
    return paper.CLAIMS.get(cell.key.method, {})


def _plain(cells: Sequence[Cell], cell: Cell) -> Cell | None:
    """Training without privacy on the same model and task."""
    same = [c for c in cells if c.key[:2] == cell.key[:2] and not c.private]
    return next((c for c in same if c.key.method == c.base_method), None)


def _noise_ratio(cells: Sequence[Cell], cell: Cell) -> float | None:
    """(σ/C)² against DP-SGD's at the same model, task, ε and expected batch."""
    for other in cells:
        same = other.key[:2] == cell.key[:2] and other.budget == cell.budget
        same = same and cell.average("batch_size") == other.average("batch_size")
        if same and other.key.method == paper.BASELINE and uses(cell.base_method, "micro_batches"):
            ratio = relative(cell, other, "noise_multiplier")
            return None if ratio is None else ratio**2
    return None


def _rate(cell: Cell) -> Entry:
    """Examples a second with their spread over seeds."""
    if not cell.rates:
        return Entry(MISSING)
    shown = number(mean(cell.rates), ",.0f")
    spread = f" ± {stdev(cell.rates):,.0f}" if len(cell.rates) > 1 else ""
    return Entry(shown.text + spread, shown.value)


def _relative_rate(cell: Cell, base: Cell | None) -> Entry:
    if base is None or not cell.rates or not base.rates:
        return Entry(MISSING)
    return number(mean(cell.rates) / mean(base.rates), ".2f")


def _device(run: Run) -> str | None:
    where = run.record["environment"]
    if not where.get("device"):
        return None
    threads = where.get("threads")
    return f"{where['device']}, {threads} threads" if threads else str(where["device"])


def audit_table(runs: Sequence[Run]) -> Table:
    """Lower bounds on ε that attacks reached; a bound above the stated ε refutes it."""
    names = [
        *("Stated ε", "Audit: ε at least", "Outcome", "Most it could show", "Canaries"),
        *("Guesses", "Correct", "Canary family", "Access", "Confidence", "Run"),
    ]
    columns = columns_of(names, {"Outcome", "Canary family", "Access", "Run"})
    rows = []
    for run in runs:
        audit = run.record["audit"]
        if not audit:
            continue
        stated = audit.get("stated_epsilon")
        entries = [
            *(text(run.model), text(run.task), text(method_label(run.method) + run.mark)),
            number(run.row["epsilon"] if stated is None else stated, ".3g", run.mark),
            number(run.row["audit_epsilon"], ".3f"),
            text(run.outcome),
            number(audit.get("ceiling"), ".3f"),
            number(audit.get("canaries"), ",.0f"),
            number(audit.get("guesses"), ",.0f"),
            number(audit.get("correct"), ",.0f"),
            text(audit.get("family")),
            text(audit.get("access")),
            number(audit.get("confidence"), ".0%"),
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
