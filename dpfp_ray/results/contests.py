"""What is compared with what, and how it ends.

A contest is the private methods on one model, task (with its number of records and dev rows) and
budget; beside them stand training without privacy, and what is reached without any private record.
All contests of one model and task stand in one table, so Holm's correction is over the pairs of all
of them. Settings that were tuned are compared with settings that were tuned in the same way only;
the best of a sweep, picked by the very scores that would be compared, with nothing at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from dpfp_ray.results.cells import Cell, Tuning, budgets_of
from dpfp_ray.results.runs import Budget, correct_answers
from dpfp_ray.results.statistics import Comparison, MethodScore, Pair, compare_predictions
from dpfp_ray.system.errors import UserError

Outcome = Literal["won", "tie", "few seeds", "one class", "alone", "tuned", "untested"]
# How a table calls the outcome for one method.
Standing = Literal["best", "tie", "behind", "few seeds", "one class", "tuned", ""]
FEWEST_SEEDS = 3  # two tell next to nothing of a spread: their intervals are ±100 points
NO_ANSWERS = "records without dev predictions: nothing is tested"
PICKED = "the best of several settings, picked by these scores: nothing is tested"


@dataclass(frozen=True)
class Contest:
    """`ranked` are the methods, best mean first; `plain` is training without privacy, `floor` what
    is reached without private records."""

    task: str
    model: str
    budget: Budget | None
    tuning: Tuning
    ranked: Sequence[Cell]
    plain: Cell | None
    statistics: Comparison | None = None
    why_not: str = ""  # why there are no statistics
    floor: Cell | None = None

    @property
    def beside(self) -> list[Cell]:
        return [cell for cell in (self.plain, self.floor) if cell is not None]

    def pair(self, first: Cell, second: Cell | None) -> Pair | None:
        """`first` against `second`, in that order."""
        if self.statistics is None or second is None:
            return None
        names = (first.key.method, second.key.method)
        for pair in self.statistics.pairs:
            if (pair.first, pair.second) == names:
                return pair
            if (pair.second, pair.first) == names:
                return turned(pair)
        return None

    def score(self, cell: Cell) -> MethodScore | None:
        methods = self.statistics.methods if self.statistics else ()
        return next((one for one in methods if one.name == cell.key.method), None)

    @cached_property
    def winner(self) -> Cell | None:
        """The method that is better than each other one, of those with a budget."""
        for cell in self.ranked:
            calls = {
                pair.call if (pair := self.pair(cell, other)) else None
                for other in self.ranked
                if other is not cell
            }
            if calls == {"better"}:
                return cell
        return None

    @cached_property
    def leaders(self) -> list[Cell]:
        """Those that nobody is better than."""
        return [cell for cell in self.ranked if not self._beaten(cell)]

    @cached_property
    def outcome(self) -> Outcome:
        if len(self.ranked) < 2:
            return "alone"
        if self.tuning == "picked":
            return "tuned"
        if self.statistics is None or any(self.score(cell) is None for cell in self.ranked):
            return "untested"
        if self.winner is not None:
            return "won"
        if any(len(cell.runs) < FEWEST_SEEDS for cell in self.ranked):
            return "few seeds"
        return "one class" if all(cell.one_class for cell in self.ranked) else "tie"

    def standing(self, cell: Cell) -> Standing:
        """What the table says of one method at its budget."""
        if cell.tuning == "picked":
            return "tuned"
        if cell.one_class:
            return "one class"
        if cell not in self.ranked or len(self.ranked) < 2 or self.score(cell) is None:
            return ""
        if cell is self.winner:
            return "best"
        if self._beaten(cell):
            return "behind"
        return "few seeds" if self.outcome == "few seeds" else "tie"

    def pairs_of(self, cell: Cell) -> list[Pair]:
        others = [*self.ranked, *self.beside]
        pairs = [self.pair(cell, other) for other in others if other is not cell]
        return [pair for pair in pairs if pair is not None]

    def as_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "model": self.model,
            "accountant": self.budget.accountant if self.budget else None,
            "epsilon": self.budget.epsilon if self.budget else None,
            "tuned": self.tuning or None,
            "outcome": self.outcome,
            "winner": self.winner.key.method if self.winner else None,
            "leaders": [cell.key.method for cell in self.leaders],
            "not_tested": self.why_not or None,
            "statistics": self.statistics.as_json() if self.statistics else None,
        }

    def _beaten(self, cell: Cell) -> bool:
        pairs = [self.pair(cell, other) for other in self.ranked if other is not cell]
        return any(pair is not None and pair.call == "worse" for pair in pairs)


def turned(pair: Pair) -> Pair:
    """The same pair seen from its second method."""
    calls: dict[str, Any] = {"better": "worse", "worse": "better"}
    return replace(
        pair,
        first=pair.second,
        second=pair.first,
        difference=-pair.difference,
        interval=(-pair.interval[1], -pair.interval[0]),
        simultaneous=(-pair.simultaneous[1], -pair.simultaneous[0]),
        call=calls.get(pair.call, pair.call),
    )


def contests_of(cells: Sequence[Cell]) -> list[Contest]:
    """Every contest among the cells, tested; those with two methods or more come first."""
    groups: dict[tuple[str, str, Tuning], dict[Budget | None, list[Cell]]] = {}
    for cell in cells:
        if cell.floor:
            continue
        place = (cell.key.model, cell.key.task, cell.tuning)
        groups.setdefault(place, {}).setdefault(cell.budget, []).append(cell)
    found = []
    for (model, task, tuning), members in groups.items():
        plain = _plain(cells, model, task, tuning)
        floors = [c for c in cells if c.floor and c.key[:2] == (model, task)]
        floor = max(floors, key=lambda cell: cell.accuracy, default=None)
        table = []
        for budget, methods in members.items():
            private = [cell for cell in methods if cell.private]
            # Several ways of training without privacy are compared among themselves.
            ranked = private if budget is not None else methods
            if not ranked or (budget is None and len(ranked) < 2):
                continue
            ranked = sorted(ranked, key=lambda cell: (-cell.accuracy, cell.key.method))
            contest = Contest(task, model, budget, tuning, ranked, None)
            table.append(replace(contest, plain=plain, floor=floor) if private else contest)
        found += tested(table)
    rank = {budget: at for at, budget in enumerate(budgets_of(cells))}
    return sorted(
        found,
        key=lambda c: (
            len(c.ranked) < 2,
            c.model,
            c.task,
            rank[c.budget] if c.budget else -1,
            c.tuning,
        ),
    )


def tested(table: Sequence[Contest]) -> list[Contest]:
    """The contests of one table with their statistics; Holm over the pairs of all of them."""
    alone = [_test(contest) for contest in table]
    p_values = [
        [pair.p for pair in contest.statistics.pairs] if contest.statistics else []
        for contest in alone
    ]
    return [
        _test(contest, [p for other, ps in enumerate(p_values) if other != at for p in ps])
        for at, contest in enumerate(alone)
    ]


def _test(contest: Contest, others: Sequence[float] = ()) -> Contest:
    if contest.tuning == "picked":
        return replace(contest, why_not=PICKED)
    here = [*contest.ranked]
    for cell in contest.beside:
        # The words of the floor were chosen by nobody's scores, so it stands beside every tuning.
        if cell not in here and (cell.floor or cell.tuning == contest.tuning):
            here.append(cell)
    doubts = [cell.untested for cell in here if cell.untested]
    if doubts:
        return replace(contest, why_not=doubts[0])
    answered = [cell for cell in here if correct_answers(cell.runs) is not None]
    if len(answered) < 2:
        return replace(contest, why_not=NO_ANSWERS if len(answered) < len(here) else "")
    runs = {
        cell.key.method: [run.answers for run in cell.runs if run.answers is not None]
        for cell in answered
    }
    try:
        return replace(contest, statistics=compare_predictions(runs, others=others))
    except UserError as error:  # answers to different dev rows
        return replace(contest, why_not=str(error))


def _plain(cells: Sequence[Cell], model: str, task: str, tuning: Tuning) -> Cell | None:
    """Training without privacy on the same model and data: the whole model's, tuned alike."""
    same = [c for c in cells if c.key[:2] == (model, task) and c.plain]
    order = sorted(same, key=lambda c: (c.tuning != tuning, c.key.method != c.base_method))
    return next(iter(order), None)
