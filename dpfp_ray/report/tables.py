"""The tables beside the main one: cost, accounting, audits, every run, and the paper's own."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpfp_ray.plan.method_spec import is_private, uses
from dpfp_ray.report import paper
from dpfp_ray.report.runs import ACCOUNTANT_NAMES, METHOD_NAMES, NOMINAL, REFUTED, Cell, Run
from dpfp_ray.report.statements import proved_epsilon, tuning_epsilon, unamplified_epsilon
from dpfp_ray.report.table import Column, Entry, Row, Table, duration, number, percent, text

MARKS = (
    f"{NOMINAL} nominal ε: what the accounting says, and no guarantee; the statement says why.",
    f"{REFUTED} refuted: an audit found more leakage than the stated ε allows.",
)
_WHO = ("Model", "Task", "Method")


def cost_table(cells: Sequence[Cell]) -> Table:
    """Measured memory and time, beside the orders of growth of the paper's Table "cmp"."""
    names = [
        *("ε", "Peak memory (MiB)", "Memory ÷ Non-DP", "Memory, paper", "Training time"),
        *("Time ÷ Non-DP", "Examples/s", "Speed ÷ Non-DP", "Compute, paper", "B", "E", "Device"),
    ]
    columns = _columns(names, {"Memory, paper", "Compute, paper", "Device"})
    rows = []
    for cell in cells:
        base = _plain(cells, cell)
        memory = cell.average("peak_memory_bytes")
        claims = _claims(cell)
        entries = [
            *_who(cell),
            number(cell.key.epsilon, "g", cell.mark),
            number(None if memory is None else memory / 2**20, ",.0f"),
            _relative(cell, base, "peak_memory_bytes"),
            text(claims.get("memory")),
            duration(cell.average("train_seconds")),
            _relative(cell, base, "train_seconds"),
            number(cell.average("examples_per_second"), ",.0f"),
            _relative(cell, base, "examples_per_second"),
            text(claims.get("compute")),
            number(cell.average("batch_size"), ",.0f"),
            number(cell.average("epochs"), "g"),
            text(_device(cell.first)),
        ]
        rows.append(Row(entries, _tone(cell)))
    notes = [
        "Measured, mean over seeds. ÷ Non-DP: against training without privacy of the same model "
        "and task. Peak memory is that of the whole process. Times are measured on private "
        "records: no ε covers them.",
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
    columns = _columns(names, {"Calibrated by", "Coordinates, paper", "Paper’s claim"})
    rows = []
    for cell in cells:
        if not cell.private:
            continue
        sigma, width = cell.average("sigma"), cell.average("noise_coordinates")
        power = None if sigma is None else sigma**2
        count = cell.average("micro_batches") if uses(cell.base_method, "micro_batches") else None
        plain = cell.key.method == "DP-FP" and count is not None
        entries = [
            *_who(cell),
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
        rows.append(Row(entries, _tone(cell)))
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
    columns = _columns(names, {"Calibrated by", "Guarantee"})
    rows = []
    for cell in cells:
        if not cell.private:
            continue
        run, row, mark = cell.first, cell.first.row, cell.mark
        accountant = str(row["accountant"] or "")
        entries = [
            *_who(cell),
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
        rows.append(Row(entries, _tone(cell)))
    notes = [
        "GDP + CLT is asymptotic and no upper bound; RDP and PLD are upper bounds, PLD is tight. "
        "All three count on amplification by sampling.",
        "Without amplification: if draws show. Proved: the smallest ε that is a theorem for the "
        "run, — if there is none. With tuning: choosing among settings on private data costs "
        "privacy too; — if that was not counted.",
        *marks_legend(cells),
    ]
    return Table("accounting", "What each accountant says was spent", columns, rows, notes=notes)


def audit_table(runs: Sequence[Run]) -> Table:
    """Lower bounds on ε that attacks reached; a bound above the stated ε refutes it."""
    names = [
        *("Stated ε", "Audit: ε at least", "Verdict", "Most it could show", "Canaries"),
        *("Guesses", "Correct", "Canary family", "Access", "Confidence", "Run"),
    ]
    columns = _columns(names, {"Verdict", "Canary family", "Access", "Run"})
    rows = []
    for run in runs:
        audit = run.part("audit")
        if not audit:
            continue
        mark = NOMINAL if run.row["guarantee"] == "nominal" else ""
        stated = _float(audit.get("stated_epsilon", audit.get("stated")))
        entries = [
            *(text(run.model), text(run.task), text(run.method + mark)),
            number(run.row["epsilon"] if stated is None else stated, ".3g", mark),
            number(run.row["audit_epsilon"], ".3f"),
            text(run.row["verdict"]),
            number(_float(audit.get("ceiling")), ".3f"),
            *(
                number(_float(audit.get(name)), ",.0f")
                for name in ("canaries", "guesses", "correct")
            ),
            *(text(audit.get(name)) for name in ("family", "access")),
            number(_float(audit.get("confidence")), ".0%"),
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
    columns = _columns(names, {"Guarantee", "Status", "Sweep", "Run", "Error"})
    rows = []
    for run in runs:
        row = run.row
        mark = NOMINAL if row["guarantee"] == "nominal" else ""
        entries = [
            *(text(run.model), text(run.task), text(run.method + mark)),
            number(row["epsilon"], "g", mark),
            percent(row["accuracy"]),
            number(row["batch_size"], ",d"),
            number(row["micro_batches"] if uses(row["method"], "micro_batches") else None, ",d"),
            number(row["clip"] if is_private(row["method"]) else None, "g"),
            number(row["learning_rate"], ".3g"),
            number(row["epochs"], "g"),
            duration(row["train_seconds"]),
            text("refuted" if run.refuted else row["guarantee"]),
            *(text(row[name]) for name in ("status", "sweep", "id", "error")),
        ]
        rows.append(Row(entries, "refuted" if run.refuted else ""))
    notes = list(MARKS[:1]) if any(run.row["guarantee"] == "nominal" for run in runs) else []
    return Table("runs", "Every run", columns, rows, notes=notes)


def paper_table() -> Table:
    """The paper's main table as printed, to lay ours beside."""
    titles = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "Avg.")
    columns = [Column(name, numeric=False) for name in ("Model", "Method", "Whose number")]
    columns += [Column(t, f"ε = {b} (RDP)") for b in paper.BUDGETS for t in titles]
    rows, seen = [], dict.fromkeys((d.family, d.method) for d in paper.DOCUMENTED.values())
    for family, method in seen:
        found = [paper.DOCUMENTED[family, method, budget] for budget in paper.BUDGETS]
        scores = [s for d in found for s in (*d.scores.values(), d.average)]
        head = [text(family), text(METHOD_NAMES[method]), text(found[0].cited)]
        rows.append(Row([*head, *(number(score, ".2f") for score in scores)]))
    foot = []
    for accountant, name in (("gdp", "Gaussian DP + CLT"), ("pld", "Compose tradeoff func.")):
        spent = [
            number(known.get(column.split()[0]), ".2f")
            for budget in paper.BUDGETS
            for known in [paper.SPENT[accountant][budget]]
            for column in (*paper.COLUMNS, "average")
        ]
        foot.append(Row([text("ε ≈"), text(name), text(paper.OWN), *spent], "spent"))
    title = f"What the paper documents ({paper.SOURCE})"
    return Table("paper", title, columns, rows, foot, blocks=True)


def guarantee_text(cell: Cell) -> str:
    refutation = cell.refutation
    if refutation is None:
        return cell.guarantee
    bound = refutation.row["audit_epsilon"]
    return "refuted" if bound is None else f"refuted: audit says ε ≥ {bound:.2f}"


def _columns(names: Sequence[str], words: set[str]) -> list[Column]:
    """Who was run, then `names`, which are numbers but for `words`."""
    words = words | set(_WHO)
    return [Column(name, numeric=name not in words) for name in (*_WHO, *names)]


def _who(cell: Cell) -> list[Entry]:
    return [text(cell.key.model), text(cell.key.task), text(cell.name)]


def _tone(cell: Cell) -> str:
    return "refuted" if cell.guarantee == "refuted" else ""


def marks_legend(cells: Sequence[Cell]) -> list[str]:
    """The words for those of the marks that these cells carry."""
    marks = "".join(cell.mark for cell in cells)
    return [legend for legend in MARKS if legend[0] in marks]


def _claims(cell: Cell) -> Mapping[str, str]:
    """The paper's, for the methods it describes; not for variants of ours."""
    plain = METHOD_NAMES.get(cell.base_method) == cell.key.method
    return paper.CLAIMS.get(cell.base_method, {}) if plain else {}


def _plain(cells: Sequence[Cell], cell: Cell) -> Cell | None:
    """Training without privacy on the same model and task."""
    same = [c for c in cells if c.key[:2] == cell.key[:2] and not c.private]
    return next((c for c in same if c.key.method == "Non-DP"), None)


def _noise_ratio(cells: Sequence[Cell], cell: Cell) -> float | None:
    """(σ/C)² against DP-SGD's at the same model, task, ε and expected batch."""
    for other in cells:
        same = other.key[:2] == cell.key[:2] and other.budget == cell.budget
        if same and other.key.method == "DP-SGD" and uses(cell.base_method, "micro_batches"):
            ours, theirs = cell.average("noise_multiplier"), other.average("noise_multiplier")
            if cell.average("batch_size") == other.average("batch_size"):
                ratio = _ratio(ours, theirs)
                return None if ratio is None else ratio**2
    return None


def _relative(cell: Cell, base: Cell | None, column: str) -> Entry:
    return number(_ratio(cell.average(column), base.average(column) if base else None), ".2f")


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _device(run: Run) -> str | None:
    where: Mapping[str, Any] = run.part("environment")
    if not where.get("device"):
        return None
    threads = where.get("threads")
    return f"{where['device']}, {threads} threads" if threads else str(where["device"])


def _float(value: Any) -> float | None:
    """A number of an untyped part of a record; anything else counts as missing."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return None if isinstance(value, bool) or math.isnan(found) else found
