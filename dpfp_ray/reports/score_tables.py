"""Tables of scores: the winners and their price, what accuracy hides, and every pair of methods."""

from collections.abc import Sequence
from statistics import mean

from dpfp_ray.reports.cost_tables import MARKS, columns_of, guarantee_text, marks_legend, tone, who
from dpfp_ray.reports.formats import Column, Entry, Row, Table, duration, number, percent, text
from dpfp_ray.reports.plots import cell_label
from dpfp_ray.reports.winners import OUTCOMES, Card, signed_text
from dpfp_ray.results.cells import Cell
from dpfp_ray.results.contests import Contest
from dpfp_ray.results.runs import ACCOUNTANT_NAMES
from dpfp_ray.results.statistics import Pair


def summary_table(found: Sequence[Contest]) -> Table:
    names = [
        *("Task", "Model", "ε", "Accountant", "Outcome", "Highest mean", "Accuracy (%)"),
        *("95% interval", "Difference to next (points)", "Its interval", "Next", "Against Non-DP"),
        *("Majority class (%)", "Runs each", "Training time", "Time ÷ Non-DP", "Guarantee"),
        *("Proved, highest mean", "Its accuracy (%)"),
    ]
    words = {"Task", "Model", "Accountant", "Outcome", "Highest mean", "Next", "Guarantee"}
    words |= {"Proved, highest mean", "95% interval", "Its interval", "Runs each"}
    columns = [Column(name, numeric=name not in words) for name in names]
    rows = []
    for contest in found:
        card, first = Card(contest), contest.ranked[0]
        rival = contest.ranked[1] if len(contest.ranked) > 1 else None
        pair, price = contest.pair(first, rival), contest.pair(first, contest.plain)
        proved = card.proved
        entries = [
            text(contest.task),
            text(contest.model),
            number(contest.budget.epsilon if contest.budget else None, "g", first.mark),
            text(
                ACCOUNTANT_NAMES.get(contest.budget.accountant, contest.budget.accountant)
                if contest.budget
                else None
            ),
            text(outcome_text(contest)),
            text(cell_label(first)),
            percent(first.accuracy, first.spread),
            text(interval_text(first.interval)),
            called(pair),
            text(interval_text(pair.simultaneous, signed=True) if pair else None),
            text(cell_label(rival) if rival else None),
            called(price),
            percent(first.majority),
            text(", ".join(str(len(cell.runs)) for cell in contest.ranked)),
            duration(first.average("train_seconds")),
            number(card.relative("train_seconds"), ".2f"),
            text(guarantee_text(first)),
            text(cell_label(proved) if proved else None),
            percent(proved.accuracy if proved else None, proved.spread if proved else None),
        ]
        rows.append(Row(entries, "refuted" if first.guarantee == "refuted" else ""))
    marks = "".join(cell.mark for one in found for cell in one.ranked)
    notes = [
        "Won: better than every other private method of the row, by a paired test over dev rows "
        "and seeds, Holm over all pairs of a model and task (5%). Tie: not told apart. One seed: "
        "the spread over seeds is unknown, so no winner. Intervals of differences hold for all "
        "pairs together. ±: standard deviation over seeds.",
    ]
    notes += [legend for legend in MARKS if legend[0] in marks]
    return Table("summary", "Which method wins, at what price", columns, rows, notes=notes)


def outcome_text(contest: Contest) -> str:
    if contest.outcome == "won":
        return f"{cell_label(contest.ranked[0])} is best"
    if contest.outcome == "alone":
        return "nothing to compare"
    return OUTCOMES[contest.outcome]


def interval_text(interval: tuple[float, float] | None, signed: bool = False) -> str | None:
    if interval is None:
        return None
    form = signed_text if signed else (lambda share: f"{100 * share:.2f}")
    return f"{form(interval[0])} to {form(interval[1])}"


def called(pair: Pair | None) -> Entry:
    """A difference in points, with what the test calls it where that is no clear answer."""
    if pair is None:
        return percent(None)
    shown = percent(pair.difference, signed=True)
    mark = {"tie": " (tie)", "these models only": " (one seed)"}.get(pair.call, "")
    return Entry(shown.text + mark, shown.value)


def scores_table(cells: Sequence[Cell], contests: Sequence[Contest]) -> Table:
    """Accuracy with its interval, and the scores that show small classes and false confidence."""
    names = [
        *("ε", "Runs", "Accuracy (%)", "95% interval", "Standing", "Majority class (%)"),
        *("F1 (%)", "Matthews", "Calibration error (%)", "Recall by class (%)", "Epoch quoted"),
    ]
    words = {"95% interval", "Standing", "Recall by class (%)", "Epoch quoted"}
    rows = []
    for cell in cells:
        standing = next((s for c in contests if cell in c.ranked and (s := c.standing(cell))), "")
        if standing == "tuned" or (cell.tuning and not standing):
            standing = f"tuned: best of {cell.settings}"
        entries = [
            *who(cell),
            number(cell.key.epsilon, "g", cell.mark),
            number(len(cell.runs), ",d"),
            percent(cell.accuracy, cell.spread),
            text(interval_text(cell.interval)),
            text(standing or ("one class" if cell.one_class else None)),
            percent(cell.majority),
            percent(cell.average("f1")),
            number(cell.average("matthews"), ".3f"),
            percent(cell.average("calibration_error")),
            text(recall_text(cell)),
            text(cell.first.metrics.get("rule")),
        ]
        rows.append(Row(entries, tone(cell)))
    notes = [
        "Means over seeds. 95% interval: over dev rows and seeds; of a single run, of that model. "
        "F1: of the second class with two classes (as GLUE scores QQP and MRPC), else the mean "
        "over classes. Matthews: as GLUE scores CoLA. Calibration error: expected, 15 bins.",
        "Majority class: what always giving the most frequent answer scores. One class: every run "
        "answers one class, whatever the row; it is never a winner.",
        *marks_legend(cells),
    ]
    return Table("scores", "What accuracy hides", columns_of(names, words), rows, notes=notes)


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
    names = (
        "Task",
        "Model",
        "ε",
        "Method",
        "Against",
        "Difference (points)",
        "Interval, all pairs",
    )
    columns = [
        *(Column(name, numeric=name in ("ε", "Difference (points)")) for name in names),
        *(Column("p (Holm)"), Column("Call", numeric=False), Column("Why", numeric=False)),
    ]
    rows = []
    for contest in contests:
        if contest.statistics is None:
            continue
        known = {cell.key.method: cell for cell in (*contest.ranked, contest.plain) if cell}
        for pair in contest.statistics.pairs:
            entries: list[Entry] = [
                text(contest.task),
                text(contest.model),
                number(contest.budget.epsilon if contest.budget else None),
                text(cell_label(known[pair.first])),
                text(cell_label(known[pair.second])),
                called(pair),
                text(interval_text(pair.simultaneous, signed=True)),
                number(pair.p_holm, ".3g"),
                text(pair.call),
                text(pair.reason),
            ]
            rows.append(Row(entries))
    notes = [
        "A paired test over dev rows and seeds; Holm over all pairs of one model and task, also "
        "at other ε. The intervals hold for all of these pairs together. docs/statistics.md has "
        "the model and what it assumes. These models only: one seed, so nothing is said about the "
        "methods."
    ]
    return Table("pairs", "Every pair of methods", columns, rows, notes=notes)
