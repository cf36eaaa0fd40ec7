"""The table of winners: one row for each model, task and ε, at what price, and who is proved."""

from collections.abc import Sequence

from dpfp_ray.report.cost_tables import MARKS, guarantee_text
from dpfp_ray.report.plots import cell_label
from dpfp_ray.report.table import Column, Entry, Row, Table, duration, number, percent, text
from dpfp_ray.report.winners import OUTCOMES, Card, signed_text
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
