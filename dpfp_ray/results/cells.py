"""Cells: what one number of a table stands for, runs that may be averaged.

A cell is (model, task, method, ε, accountant). Its seeds of one setting are averaged. Where several
settings were tried (a sweep), the best one stands for the cell, marked as tuned: `settings` says of
how many, and `contests` compares it with nothing that was not chosen alike. The table of `dpfp
compare`, the report and the service all show these cells.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, stdev
from typing import Any, Literal

from dpfp_ray.results.runs import (
    REFUTED,
    Budget,
    Key,
    Run,
    correct_answers,
    finite,
    method_label,
    order,
)
from dpfp_ray.training import LEAST_SECONDS

Tuning = Literal["", "retrained", "picked"]


@dataclass(frozen=True)
class Cell:
    """The runs behind one number of the main table: one setting, any number of seeds."""

    key: Key
    runs: Sequence[Run]
    settings: int = 1
    others: Sequence[Run] = field(default=())  # other settings, failed, stopped, audited
    # "picked": the best of several settings by these very scores. "retrained": the setting was
    # chosen by other runs, these are new ones.
    tuning: Tuning = ""
    untested: str = ""  # why no test may be made of these runs; empty: it may

    @cached_property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def base_method(self) -> str:
        return str(self.first.row["method"])

    @property
    def private(self) -> bool:
        return self.first.private

    @property
    def plain(self) -> bool:
        """Was it trained on the private records without privacy?"""
        return not self.private and not self.floor

    @property
    def floor(self) -> bool:
        """Was it made without any private record?"""
        return not self.first.reads_records

    @property
    def accuracy(self) -> float:
        return mean(run.row["accuracy"] for run in self.runs)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return _deviation([run.row["accuracy"] for run in self.runs])

    @property
    def rates(self) -> list[float]:
        """Examples a second of the runs that trained long enough."""
        return [rate for run in self.runs if (rate := run.rate) is not None]

    @property
    def one_class(self) -> bool:
        """Every run answers one class, whatever the row."""
        return all(run.one_class for run in self.runs)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the accuracy over rows and seeds; None without kept answers."""
        from dpfp_ray.results.paired import accuracy_interval
        from dpfp_ray.results.statistics import LEVEL

        correct = correct_answers(self.runs)
        return None if correct is None else accuracy_interval(correct, LEVEL)

    @property
    def majority(self) -> float | None:
        """Accuracy of always answering the most frequent class of the dev rows."""
        return self.average("majority_accuracy")

    def split(self, name: str) -> tuple[float, float | None] | None:
        """Mean and deviation on one dev set."""
        scores = [run.splits[name] for run in self.runs if name in run.splits]
        return (mean(scores), _deviation(scores)) if scores else None

    def average(self, name: str) -> float | None:
        """Mean of a numeric column over the seeds that have it."""
        values = [run.row[name] for run in self.runs if finite(run.row.get(name))]
        return mean(values) if values else None

    @cached_property
    def refutation(self) -> Run | None:
        """The audited run with the highest bound, if an audit refuted this cell's ε."""
        refuted = [run for run in (*self.runs, *self.others) if run.refuted]
        return max(refuted, key=lambda run: run.row["audit_epsilon"] or 0.0, default=None)

    @property
    def guarantee(self) -> str:
        """none | proved | nominal | refuted | unknown"""
        if self.refutation is not None:
            return "refuted"
        return str(self.first.row["guarantee"] or "unknown")

    @property
    def mark(self) -> str:
        return self.first.mark + (REFUTED if self.guarantee == "refuted" else "")

    @property
    def title(self) -> str:
        """The method for people, with the marks of a nominal and of a refuted ε."""
        return method_label(self.key.method) + self.mark

    @property
    def budget(self) -> Budget | None:
        if self.key.epsilon is None:
            return None
        return Budget(self.key.accountant or "unknown", self.key.epsilon)


def relative(cell: Cell, base: Cell | None, column: str) -> float | None:
    """A measured `column` over that of `base`; None if one of them has none.

    Times of a fraction of a second are not compared: they are mostly the first step's start-up.
    """
    if base is None:
        return None
    mine, other = cell.average(column), base.average(column)
    if mine is None or not other:
        return None
    if column == "train_seconds" and min(mine, other) < LEAST_SECONDS:
        return None
    return mine / other


def _deviation(scores: Sequence[float]) -> float | None:
    return stdev(scores) if len(scores) > 1 else None


def by_key(runs: Iterable[Run]) -> dict[Key, list[Run]]:
    """All runs of each cell, also those that failed."""
    grouped: dict[Key, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.key, []).append(run)
    return grouped


def cells_of(runs: Iterable[Run]) -> list[Cell]:
    """One cell for each key that has at least one finished run."""
    cells = []
    for key, members in by_key(runs).items():
        scored = [run for run in members if run.scored]
        # Candidates of a tuning, and runs with an audit's canaries in their data, only stand in.
        compared = [run for run in scored if not run.tuning]
        clean = [run for run in compared if not run.record["audit"]]
        settings: dict[str, list[Run]] = {}
        for run in clean or compared or scored:
            settings.setdefault(run.setting, []).append(run)
        if not settings:
            continue
        best = max(settings.values(), key=lambda same: mean(run.row["accuracy"] for run in same))
        top = {id(run) for run in best}
        tried = len({run.setting for run in scored if id(run) in top or not run.record["audit"]})
        picked = len(settings) > 1 or all(run.tuning for run in best)
        tuning: Tuning = "" if tried == 1 else "picked" if picked else "retrained"
        best = once_each(best)
        chosen = {id(run) for run in best}
        others = [run for run in members if id(run) not in chosen]
        cells.append(Cell(key, best, tried, others, tuning))
    return sorted(cells, key=lambda cell: order(cell.key))


def once_each(runs: Sequence[Run]) -> list[Run]:
    """Without copies: a seed that was run again with the same outcome says nothing new."""
    distinct: dict[Any, Run] = {}
    for run in runs:
        seed, history = run.row["seed_index"], run.record["history"]
        scores = repr([(epoch["train_loss"], epoch["dev"]) for epoch in history])
        distinct.setdefault((seed, scores) if seed is not None and history else id(run), run)
    return list(distinct.values())


def budgets_of(cells: Iterable[Cell]) -> list[Budget]:
    """The accountant by which most was run comes first, then ε ascending."""
    budgets = [cell.budget for cell in cells if cell.budget is not None]
    uses = Counter(budget.accountant for budget in budgets)
    return sorted(set(budgets), key=lambda b: (-uses[b.accountant], b.accountant, b.epsilon))
