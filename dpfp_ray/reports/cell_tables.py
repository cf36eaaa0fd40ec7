"""Tables of cells and runs: the overview that answers first, and the details behind it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from dpfp_ray.plan.method_spec import MARKS as UNPROVED
from dpfp_ray.plan.method_spec import uses
from dpfp_ray.reports import paper
from dpfp_ray.reports.tables import (
    MISSING,
    Column,
    Entry,
    Row,
    Table,
    build,
    duration,
    number,
    percent,
    text,
)
from dpfp_ray.results.cells import Cell, relative
from dpfp_ray.results.contests import FEWEST_SEEDS, Contest
from dpfp_ray.results.runs import ACCOUNTANT_NAMES, REFUTED, Run
from dpfp_ray.results.statistics import Pair

CellEntry = Callable[[Cell], Entry]
MARKS = (
    f"{UNPROVED['nominal']} nominal ε: what the accounting says, and no guarantee; the statement "
    "says why.",
    f"{UNPROVED['claimed']} claimed ε: it holds if another library, whose code trained, does what "
    "it says.",
    f"{REFUTED} refuted: an audit found more leakage than the stated ε allows.",
)
POWERLESS = "○ this audit could not have refuted the ε: more canaries, or a smaller δ, would help."
STANDINGS = {
    "best": "best: better than every other private method at its ε, by a paired test over dev rows "
    "and seeds (Holm over the table, 5%).",
    "tie": "tie: not told apart from the highest mean at its ε.",
    "behind": "behind: another private method at its ε is better.",
    "few seeds": "few seeds: too few to tell methods apart; use --seeds 5.",
    "one class": "one class: every run answers one class, whatever the row; never a winner.",
    "tuned": "tuned: the best of several settings by these very scores; compared with nothing.",
}
WHO: dict[str, CellEntry] = {
    "Model": lambda cell: text(cell.key.model),
    "Task": lambda cell: text(cell.key.task),
    "Method": lambda cell: text(cell.title),
}


def epsilon_entry(cell: Cell) -> Entry:
    return number(cell.key.epsilon, "g", cell.mark)


def overview(cells: Sequence[Cell], contests: Sequence[Contest]) -> Table:
    """The first table of a comparison: what each method scored, what its ε is, and its standing."""
    where = Counter(cell.key[:2] for cell in cells)
    # Few cells of another task or model say so beside the method; many places get columns.
    (usual, _), *others = where.most_common() or [(("", ""), 0)]
    places = {name: WHO[name] for name in ("Model", "Task")} if len(others) > 1 else {}

    def name(cell: Cell) -> Entry:
        parts = [p for p, mine in zip(cell.key[:2], usual, strict=True) if p != mine]
        return text(cell.title + (f" on {', '.join(parts)}" if parts and not places else ""))

    standings = {id(cell): standing_of(cell, contests) for cell in cells}
    accountants = {cell.key.accountant for cell in cells if cell.private}
    notes = [words for name, words in STANDINGS.items() if name in standings.values()]
    notes += dict.fromkeys(
        contest.why_not for contest in contests if contest.why_not and contest.tuning != "picked"
    )
    notes += marks_legend(cells)
    notes += [note for cell in cells for note in library_notes(cell)]
    if any("○" in audit_entry(cell).text for cell in cells):
        notes.append(POWERLESS)
    majority = next((cell.majority for cell in cells if cell.majority is not None), None)
    columns: dict[str, CellEntry] = {
        **places,
        "Method": name,
        "ε": epsilon_entry,
        **({"By": lambda c: text(c.key.accountant)} if len(accountants) > 1 else {}),
        "Accuracy (%)": accuracy_entry,
        "Against non-private": lambda cell: against(cell, contests, "plain"),
        "Private records added": lambda cell: against(cell, contests, "floor"),
        "Standing": lambda cell: text(standings[id(cell)]),
        "Audit": audit_entry,
    }
    for title in ("Against non-private", "Private records added", "Standing", "Audit"):
        if all(columns[title](cell).missing for cell in cells):
            del columns[title]
    if "Private records added" in columns:  # six columns are read; the plain row is there anyway
        columns.pop("Against non-private", None)
    foot = []
    if majority is not None and not others:
        line = {"Method": text("majority class"), "Accuracy (%)": percent(majority)}
        foot = [Row([line.get(name, Entry(MISSING)) for name in columns], "spent")]
    ordered = sorted(
        cells,
        key=lambda c: (
            c.key[:2],
            c.private,
            c.key.accountant or "",
            c.key.epsilon or 0.0,
            -c.accuracy,
        ),
    )
    return build("overview", "What came out", ordered, columns, tone=tone, foot=foot, notes=notes)


def accuracy_entry(cell: Cell) -> Entry:
    """With its 95% interval over rows and seeds."""
    shown = percent(cell.accuracy)
    ends = cell.interval
    tail = f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]" if ends else ""
    return Entry(shown.text + tail, shown.value)


def standing_of(cell: Cell, contests: Sequence[Contest]) -> str:
    standings = (contest.standing(cell) for contest in contests if cell in contest.ranked)
    picked = "tuned" if cell.tuning == "picked" else "one class" if cell.one_class else ""
    return next((standing for standing in standings if standing), picked)


def against(cell: Cell, contests: Sequence[Contest], which: str) -> Entry:
    """The paired difference in points to the contest's `plain` or `floor`; without a test of
    methods, the difference alone."""
    pairs = ((c, getattr(c, which)) for c in contests if cell in c.ranked)
    contest, other = next(((c, o) for c, o in pairs if o is not None), (None, None))
    if contest is None or other is None or other is cell:
        return Entry(MISSING)
    pair = contest.pair(cell, other)
    gap = percent(cell.accuracy - other.accuracy, signed=True)
    few = min(len(cell.runs), len(other.runs)) < FEWEST_SEEDS
    if pair is None or few:
        return gap
    low, high = (f"{100 * end:+.1f}".replace("-", "−") for end in pair.simultaneous)
    return Entry(f"{gap.text} [{low}, {high}]", gap.value)


def audit_entry(cell: Cell) -> Entry:
    """The highest bound that an audit of these runs reached."""
    audited = [run for run in (*cell.runs, *cell.others) if run.row["audit_epsilon"] is not None]
    if not audited:
        return Entry(MISSING)
    run = max(audited, key=lambda run: run.row["audit_epsilon"])
    ceiling = run.record["audit"].get("ceiling")
    powerless = cell.key.epsilon is not None and (ceiling or 1e9) <= cell.key.epsilon
    mark = " refuted" if run.refuted else " ○" if powerless else ""
    bound = run.row["audit_epsilon"]
    return Entry(f"ε ≥ {bound:.2f}{mark}", bound, alarm=run.refuted)


def scores_table(cells: Sequence[Cell], contests: Sequence[Contest]) -> Table:
    """Accuracy with its interval, and the scores that show small classes and false confidence."""
    columns: dict[str, CellEntry] = {
        **WHO,
        "ε": epsilon_entry,
        "Runs": lambda c: number(len(c.runs), ",d"),
        "Accuracy (%)": lambda c: percent(c.accuracy, c.spread),
        "95% interval": lambda c: text(interval_text(c.interval)),
        "Standing": lambda c: text(
            f"tuned: best of {c.settings}"
            if (standing := standing_of(c, contests)) == "tuned" or (c.tuning and not standing)
            else standing
        ),
        "Majority class (%)": lambda c: percent(c.majority),
        "F1 (%)": lambda c: percent(c.average("f1")),
        "Matthews": lambda c: number(c.average("matthews"), ".3f"),
        "Calibration error (%)": lambda c: percent(c.average("calibration_error")),
        "Recall by class (%)": lambda c: text(recall_text(c)),
        "Epoch quoted": lambda c: text(c.first.metrics.get("rule")),
    }
    notes = [
        "Means over seeds. 95% interval: over dev rows and seeds; of a single run, of that model. "
        "F1: of the second class with two classes (as GLUE scores QQP and MRPC), else the mean "
        "over classes. Matthews: as GLUE scores CoLA. Calibration error: expected, 15 bins.",
        "Majority class: what always giving the most frequent answer scores. One class: every run "
        "answers one class, whatever the row; it is never a winner.",
        *marks_legend(cells),
    ]
    return build("scores", "What accuracy hides", cells, columns, tone=tone, notes=notes)


def recall_text(cell: Cell) -> str | None:
    """Mean recall of each class, by its label: private training fails on small classes first."""
    recalls = [run.metrics.get("recall") or [] for run in cell.runs]
    labels = cell.first.record["labels"]
    if any(len(recall) != len(labels) for recall in recalls):
        return None
    shown = []
    for at, label in enumerate(labels):
        values = [recall[at] for recall in recalls if recall[at] is not None]
        shown.append(f"{label}: {100 * mean(values):.1f}" if values else f"{label}: —")
    return ", ".join(shown) or None


def pairs_table(contests: Sequence[Contest]) -> Table:
    """Every pair of methods that was tested, with what the test calls it."""
    tested = [
        (contest, pair)
        for contest in contests
        if contest.statistics is not None
        for pair in contest.statistics.pairs
    ]

    def cell(row: tuple[Contest, Pair], name: str) -> Entry:
        cells = [*row[0].ranked, *row[0].beside]
        return text(next(c.title for c in cells if c.key.method == name))

    columns: dict[str, Callable[[tuple[Contest, Pair]], Entry]] = {
        "Task": lambda row: text(row[0].task),
        "Model": lambda row: text(row[0].model),
        "ε": lambda row: number(row[0].budget.epsilon if row[0].budget else None),
        "Method": lambda row: cell(row, row[1].first),
        "Against": lambda row: cell(row, row[1].second),
        "Difference (points)": lambda row: percent(row[1].difference, signed=True),
        "Interval, all pairs": lambda row: text(interval_text(row[1].simultaneous, signed=True)),
        "p (Holm)": lambda row: number(row[1].p_holm, ".3g"),
        "Call": lambda row: text(row[1].call),
        "Why": lambda row: text(row[1].reason),
    }
    notes = [
        "A paired test over dev rows and seeds; Holm over all pairs of one model and task, also "
        "at other ε. The intervals hold for all of these pairs together. docs/statistics.md has "
        "the model and what it assumes. These models only: one seed, so nothing is said about the "
        "methods."
    ]
    return build("pairs", "Every pair of methods", tested, columns, notes=notes)


def interval_text(interval: tuple[float, float] | None, signed: bool = False) -> str | None:
    if interval is None:
        return None
    low, high = (f"{100 * end:{'+' if signed else ''}.2f}".replace("-", "−") for end in interval)
    return f"{low} to {high}"


def cost_table(cells: Sequence[Cell]) -> Table:
    """Measured memory and time, beside the orders of growth of the paper's Table "cmp"."""

    def ratio(column: str) -> CellEntry:
        return lambda c: number(relative(c, plain_of(cells, c), column), ".2f")

    def speed(cell: Cell) -> Entry:
        base = plain_of(cells, cell)
        rates = base.rates if base else []
        return number(mean(cell.rates) / mean(rates) if cell.rates and rates else None, ".2f")

    def memory(cell: Cell) -> Entry:
        peak = cell.average("peak_memory_bytes")
        return number(None if peak is None else peak / 2**20, ",.0f")

    columns: dict[str, CellEntry] = {
        **WHO,
        "ε": epsilon_entry,
        "Peak memory (MiB)": memory,
        "Memory ÷ Non-DP": ratio("peak_memory_bytes"),
        "Memory, paper": lambda c: text(claims(c).get("memory")),
        "Before training": lambda c: duration(c.average("prepare_seconds")),
        "Training time": lambda c: duration(c.average("train_seconds")),
        "Time ÷ Non-DP": ratio("train_seconds"),
        "Examples/s": rate_entry,
        "Speed ÷ Non-DP": speed,
        "Compute, paper": lambda c: text(claims(c).get("compute")),
        "B": lambda c: number(c.average("batch_size"), ",.0f"),
        "E": lambda c: number(c.average("epochs"), "g"),
        "Device": lambda c: text(device_text(c.first)),
    }
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
    return build("cost", "Measured memory and time", cells, columns, tone=tone, notes=notes)


def noise_table(cells: Sequence[Cell]) -> Table:
    """How many coordinates get noise and how strong it is, beside the paper's claims."""

    def micro(cell: Cell) -> float | None:
        used = uses(cell.base_method, "micro_batches")
        return cell.average("micro_batches") if used else None

    def power(cell: Cell, times: float | None = 1.0) -> Entry:
        sigma = cell.average("sigma")
        return number(None if sigma is None or times is None else sigma**2 * times, ".3g")

    def claim(cell: Cell) -> Entry:
        count = micro(cell)
        plain = cell.key.method == cell.base_method and count
        return text(f"1/M = {1 / count:.3g}" if plain and count else None)

    columns: dict[str, CellEntry] = {
        **WHO,
        "ε": epsilon_entry,
        "Calibrated by": lambda c: text(accountant_name(c)),
        "Noise coordinates k": lambda c: number(c.average("noise_coordinates"), ",.0f"),
        "Coordinates, paper": lambda c: text(claims(c).get("coordinates")),
        "σ": lambda c: number(c.average("sigma"), ".4g"),
        "C": lambda c: number(c.average("clip"), "g"),
        "Noise power σ²": power,
        "Total power σ²k": lambda c: power(c, c.average("noise_coordinates")),
        "(σ/C)² ÷ DP-SGD’s": lambda c: number(noise_ratio(cells, c), ".3g"),
        "Paper’s claim": claim,
        "B": lambda c: number(c.average("batch_size"), ",.0f"),
        "M": lambda c: number(micro(c), ",.0f"),
    }
    notes = [
        "(σ/C)² ÷ DP-SGD’s: at the same ε, accountant and B, where both were run; the paper claims "
        "1/M, which holds for C/σ ≪ 1 only. d model size, k representation, w width.",
        *marks_legend(cells),
    ]
    private = [cell for cell in cells if cell.private]
    return build("noise", "Noise: coordinates and power", private, columns, tone=tone, notes=notes)


def accounting_table(cells: Sequence[Cell]) -> Table:
    """One ε by every accountant, with and without amplification, and with tuning paid for."""

    def column(name: str, form: str, marked: bool = False) -> CellEntry:
        return lambda c: number(c.first.row[name], form, c.mark if marked else "")

    def stated(part: str, name: str, marked: bool = True) -> CellEntry:
        """A number of the statement; JSON has an infinite ε as "inf"."""

        def entry(cell: Cell) -> Entry:
            value = cell.first.record["statement"].get(part, {}).get(name)
            return number(None if value is None else float(value), ".3f", cell.mark * marked)

        return entry

    columns: dict[str, CellEntry] = {
        **WHO,
        "ε budget": epsilon_entry,
        "Calibrated by": lambda c: text(accountant_name(c)),
        "δ": column("delta", ".3g"),
        **{
            f"ε by {shown}": column(f"epsilon_{name}", ".3f", marked=True)
            for name, shown in ACCOUNTANT_NAMES.items()
        },
        "ε without amplification": stated("amplification", "without_amplification"),
        "Proved ε": stated("proved", "epsilon", marked=False),
        "Settings tried": lambda c: number(c.settings, ",d"),
        "ε with tuning": stated("tuning", "epsilon"),
        "σ/C": column("noise_multiplier", ".4g"),
        "Steps": column("steps", ",d"),
        "Guarantee": lambda c: text(guarantee_text(c)),
    }
    notes = [
        "GDP + CLT is asymptotic and no upper bound; RDP and PLD are upper bounds, PLD is tight. "
        "All three count on amplification by sampling.",
        "Without amplification: if draws show. Proved: the smallest ε that is a theorem for the "
        "run, — if there is none. With tuning: choosing among settings on private data costs "
        "privacy too; — if that was not counted.",
        *marks_legend(cells),
    ]
    private = [cell for cell in cells if cell.private]
    title = "What each accountant says was spent"
    return build("accounting", title, private, columns, tone=tone, notes=notes)


def guarantee_text(cell: Cell) -> str:
    refutation = cell.refutation
    if refutation is None:
        return cell.guarantee
    bound = refutation.row["audit_epsilon"]
    return "refuted" if bound is None else f"refuted: audit says ε ≥ {bound:.2f}"


def tone(cell: Cell) -> str:
    return "refuted" if cell.guarantee == "refuted" else ""


def library_notes(cell: Cell) -> list[str]:
    """Whether the library that trained was as published, and the same one in all runs."""
    claims = [claim for run in cell.runs if (claim := run.record["privacy"].get("claim"))]
    versions = sorted({f"{claim['library']} {claim['version']}" for claim in claims})
    changed = sorted({file for claim in claims for file in claim["changed_files"]})
    notes = []
    if len(versions) > 1:
        notes.append(f"{cell.title}: runs by different versions: {', '.join(versions)}.")
    if changed:
        files = ", ".join(changed[:3]) + (" …" if len(changed) > 3 else "")
        notes.append(f"{cell.title}: {versions[0]} was not as published: {files}.")
    return notes


def marks_legend(cells: Sequence[Cell]) -> list[str]:
    """The words for those of the marks that these cells carry."""
    marks = "".join(cell.mark for cell in cells)
    return [legend for legend in MARKS if legend[0] in marks]


def claims(cell: Cell) -> Mapping[str, str]:
    """The paper's, for the methods it describes; not for variants of ours."""
    return paper.CLAIMS.get(cell.key.method, {})


def accountant_name(cell: Cell) -> str | None:
    return ACCOUNTANT_NAMES.get(cell.key.accountant or "", cell.key.accountant)


def plain_of(cells: Sequence[Cell], cell: Cell) -> Cell | None:
    """Training without privacy on the same model and task."""
    same = [c for c in cells if c.key[:2] == cell.key[:2] and c.plain]
    return next((c for c in same if c.key.method == c.base_method), None)


def noise_ratio(cells: Sequence[Cell], cell: Cell) -> float | None:
    """(σ/C)² against DP-SGD's at the same model, task, ε and expected batch."""
    for other in cells:
        same = other.key[:2] == cell.key[:2] and other.budget == cell.budget
        same = same and cell.average("batch_size") == other.average("batch_size")
        if same and other.key.method == paper.BASELINE and uses(cell.base_method, "micro_batches"):
            ratio = relative(cell, other, "noise_multiplier")
            return None if ratio is None else ratio**2
    return None


def rate_entry(cell: Cell) -> Entry:
    """Examples a second with their spread over seeds."""
    if not cell.rates:
        return Entry(MISSING)
    rate = number(mean(cell.rates), ",.0f")
    spread = f" ± {stdev(cell.rates):,.0f}" if len(cell.rates) > 1 else ""
    return Entry(rate.text + spread, rate.value)


def device_text(run: Run) -> str | None:
    where = run.record["environment"]
    if not where.get("device"):
        return None
    threads = where.get("threads")
    return f"{where['device']}, {threads} threads" if threads else str(where["device"])


RunEntry = Callable[[Run], Entry]
WHOSE: dict[str, RunEntry] = {
    "Model": lambda run: text(run.model),
    "Task": lambda run: text(run.task),
    "Method": lambda run: text(run.title),
}


def run_tone(run: Run) -> str:
    return "refuted" if run.refuted else ""


def audit_table(runs: Sequence[Run]) -> Table:
    """Lower bounds on ε that attacks reached; a bound above the stated ε refutes it."""

    def fact(name: str, form: str = "") -> RunEntry:
        def entry(run: Run) -> Entry:
            value: Any = run.record["audit"].get(name)
            return number(value, form) if form else text(value)

        return entry

    def stated(run: Run) -> Entry:
        value = run.record["audit"].get("stated_epsilon")
        return number(run.row["epsilon"] if value is None else value, ".3g", run.mark)

    columns: dict[str, RunEntry] = {
        **WHOSE,
        "Stated ε": stated,
        "Audit: ε at least": lambda run: number(run.row["audit_epsilon"], ".3f"),
        "Outcome": lambda run: text(run.outcome),
        "Most it could show": fact("ceiling", ".3f"),
        "Canaries": fact("canaries", ",.0f"),
        "Guesses": fact("guesses", ",.0f"),
        "Correct": fact("correct", ",.0f"),
        "Canary family": fact("family"),
        "Access": fact("access"),
        "Confidence": fact("confidence", ".0%"),
        "Run": lambda run: text(run.row["id"]),
    }
    audited = [run for run in runs if run.record["audit"]]
    notes = [
        "What right guesses prove about ε at the given confidence. Consistent proves nothing: this "
        "attack found no more, and it could not have shown more than the column says.",
        *MARKS[: 1 if audited else 0],
    ]
    return build("audit", "Audits", audited, columns, tone=run_tone, notes=notes)


def runs_table(runs: Sequence[Run], *, progress: bool = False) -> Table:
    """Every record, also of what failed, was refused or stopped; `progress`: how far each is."""

    def column(name: str, form: str = "") -> RunEntry:
        return lambda run: number(run.row[name], form) if form else text(run.row[name])

    def micro(run: Run) -> Entry:
        used = uses(run.row["method"], "micro_batches")
        return number(run.row["micro_batches"] if used else None, ",d")

    columns: dict[str, RunEntry] = {
        **WHOSE,
        "ε": lambda run: number(run.row["epsilon"], "g", run.mark),
        "Accuracy (%)": lambda run: percent(run.row["accuracy"]),
        "B": column("batch_size", ",d"),
        "M": micro,
        "C": lambda run: number(run.row["clip"] if run.private else None, "g"),
        "Learning rate": column("learning_rate", ".3g"),
        "E": column("epochs", "g"),
        "Training time": lambda run: duration(run.row["train_seconds"]),
        "Guarantee": lambda run: text("refuted" if run.refuted else run.row["guarantee"]),
        "Status": column("status"),
        "Sweep": column("sweep"),
        "Run": column("id"),
        "Error": column("error"),
    }
    if progress:  # what people who watch trials look for comes first
        now = time.time()
        columns |= {
            "Done": done_entry,
            "Time left": lambda run: left_entry(run, now),
            "ε spent": spent_entry,
        }
        first = ("Run", "Status", "Method", "ε", "Accuracy (%)", "Done", "Time left", "ε spent")
        columns = {name: columns[name] for name in dict.fromkeys((*first, *columns))}
    notes = [legend for legend in MARKS if legend[0] in {run.mark for run in runs}]

    def running(run: Run) -> str:
        return "running" if progress and run.row["status"] == "running" else run_tone(run)

    return build("runs", "Every run", runs, columns, tone=running, notes=notes)


def done_entry(run: Run) -> Entry:
    history, epochs = run.record["history"], run.row["epochs"]
    epoch = history[-1]["epoch"] if history else None
    return number(min(1.0, epoch / epochs) if epoch and epochs else None, ".0%")


def left_entry(run: Run, now: float) -> Entry:
    left = run.seconds_left(now)
    return duration(left) if left else Entry(MISSING)


def spent_entry(run: Run) -> Entry:
    spent = run.row.get(f"epsilon_{run.row['accountant']}") if run.private else None
    return number(spent, ".3f", run.mark)


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
