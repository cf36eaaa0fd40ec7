"""Several tasks: average ranks, the critical-difference figure, wins, ties and losses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfp_ray.report.formats import Column, Row, Table, number, text
from dpfp_ray.report.plots import Drawing, canvas, clean, finish, method_label
from dpfp_ray.results.contests import Contest
from dpfp_ray.results.ranks import Ranking, Record, rank_methods, wins_ties_losses
from dpfp_ray.results.runs import NOMINAL, REFUTED, Budget


@dataclass(frozen=True)
class Ranks:
    """Methods over the tasks of one model and budget."""

    model: str
    budget: Budget
    ranking: Ranking
    records: tuple[Record, ...]
    marks: Mapping[str, str]  # †, ‡ of a method that has it on any of the tasks

    def label(self, method: str) -> str:
        return method_label(method) + self.marks.get(method, "")


def ranks_of(contests: Sequence[Contest]) -> list[Ranks]:
    """For each model and budget with two tasks or more that have two methods in common.

    What was tuned by the very scores that would be ranked is left out.
    """
    groups: dict[tuple[str, Budget], list[Contest]] = {}
    for contest in contests:
        if contest.budget is not None and contest.tuning == "":
            groups.setdefault((contest.model, contest.budget), []).append(contest)
    found = []
    for (model, budget), members in groups.items():
        scores = {c.task: {cell.key.method: cell.accuracy for cell in c.ranked} for c in members}
        common = set.intersection(*(set(one) for one in scores.values()))
        if len(scores) < 2 or len(common) < 2:
            continue
        tested = {c.task: c.statistics for c in members if c.statistics is not None}
        names = list(dict.fromkeys(s.name for one in tested.values() for s in one.methods))
        records = wins_ties_losses(tested, names)
        marks = {cell.key.method: cell.mark for c in members for cell in c.ranked if cell.mark}
        found.append(Ranks(model, budget, rank_methods(scores), records, marks))
    return found


def rank_tables(contests: Sequence[Contest]) -> list[Table]:
    found = ranks_of(contests)
    names = ("Model", "ε", "Method", "Average rank", "Tasks", "Told apart from the next")
    columns = [Column(n, numeric=n in ("Average rank", "Tasks")) for n in names]
    rows = []
    for one in found:
        ranking = one.ranking
        for at, method in enumerate(ranking.methods):
            following = ranking.methods[at + 1] if at + 1 < len(ranking.methods) else None
            same = any({method, following} <= set(group) for group in ranking.groups)
            apart = None if following is None else "no" if same else "yes"
            entries = [
                *(text(one.model), text(one.budget), text(one.label(method))),
                number(ranking.average_ranks[at], ".2f"),
                number(len(ranking.tasks), ",d"),
                text(apart),
            ]
            rows.append(Row(entries))
    notes = [
        "Rank 1 is best on a task. Told apart: Friedman's test sees a difference and the average "
        "ranks are further apart than Nemenyi's critical difference; few tasks tell little apart."
    ]
    ranks = Table("ranks", "Average ranks over tasks", columns, rows, notes=notes)
    heads = ("Model", "ε", "Method", "Against", "Wins", "Ties", "Losses", "One seed")
    columns = [Column(n, numeric=n in heads[4:]) for n in heads]
    rows = [
        Row(
            [
                *(text(one.model), text(one.budget)),
                *(text(one.label(r.method)), text(one.label(r.baseline))),
                *(number(n, ",d") for n in (r.wins, r.ties, r.losses, r.undecided)),
            ]
        )
        for one in found
        for r in one.records
    ]
    notes = ["Counted over tasks, by each task's own paired tests."]
    return [ranks, Table("record", "Wins, ties and losses over tasks", columns, rows, notes=notes)]


def rank_figures(contests: Sequence[Contest], command: str) -> Iterator[Drawing]:
    for number_, one in enumerate(ranks_of(contests), start=1):
        ranking = one.ranking
        with canvas(height=1.6 + 0.42 * len(ranking.methods)) as (figure, axes):
            _draw(axes, one)
            title = f"Average ranks at {one.budget}: {len(ranking.tasks)} tasks, {one.model}"
            said = "bars join" if ranking.groups else "no bar: all are told apart;"
            caption = (
                f"Left is better; {said} methods that are not told apart "
                f"(Friedman p = {ranking.friedman_p:.3f}, Nemenyi). "
                f"Tasks: {', '.join(ranking.tasks)}."
            )
            if one.marks:
                caption += f" {NOMINAL} nominal ε, no guarantee; {REFUTED} refuted by an audit."
            yield finish(figure, f"ranks-{number_}", title, caption, command)


def _draw(axes: Any, one: Ranks) -> None:
    ranking = one.ranking
    count = len(ranking.methods)
    for at, (method, rank) in enumerate(zip(ranking.methods, ranking.average_ranks, strict=True)):
        axes.plot([rank, rank], [0, at + 1], color="#888888", linewidth=0.8)
        axes.plot([rank], [at + 1], marker="o", color="#222222")
        axes.annotate(
            clean(f"{one.label(method)}  {rank:.2f}", 50),
            (rank, at + 1),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    for at, group in enumerate(ranking.groups):
        ranks = [ranking.average_ranks[ranking.methods.index(name)] for name in group]
        height = 0.3 + 0.25 * at
        axes.plot([min(ranks), max(ranks)], [height, height], color="#222222", linewidth=4)
    axes.plot([1, 1 + ranking.critical_difference], [-0.45, -0.45], color="#0072B2", linewidth=2)
    axes.annotate(
        f"critical difference {ranking.critical_difference:.2f}",
        (1, -0.45),
        xytext=(0, -10),
        textcoords="offset points",
        fontsize=8,
        color="#0072B2",
        va="top",
    )
    axes.set_ylim(count + 0.7, -1.1)
    axes.set_xlim(0.8, max(count + 1.2, 1.4 + ranking.critical_difference))
    axes.set_xticks(range(1, count + 1))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.set_xlabel("average rank over tasks")
