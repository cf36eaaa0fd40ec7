"""Several tasks: average ranks, Friedman's test, Nemenyi's critical difference, wins and losses.

Methods are ranked on each task (1 is best, equal scores share their ranks). If Friedman's test sees
any difference, methods whose average ranks are further apart than the critical difference are told
apart (Demšar 2006); else none are. Wins, ties and losses come from each task's own paired tests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from dpfp_ray.plan.errors import UserError
from dpfp_ray.results.statistics import LEVEL, Comparison


@dataclass(frozen=True)
class Record:
    """One method against one baseline over the tasks that have both.

    `undecided` counts the tasks with one seed, whose models alone were compared.
    """

    method: str
    baseline: str
    wins: int
    ties: int
    losses: int
    undecided: int


@dataclass(frozen=True)
class Ranking:
    """Methods over tasks, best average rank first."""

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    average_ranks: tuple[float, ...]
    friedman_p: float
    critical_difference: float
    groups: tuple[tuple[str, ...], ...]  # methods that are not told apart: bars of the figure


def rank_methods(scores: Mapping[str, Mapping[str, float]], level: float = LEVEL) -> Ranking:
    """Ranking of methods by `scores[task][method]`, where larger is better."""
    tasks = tuple(scores)
    every = list(dict.fromkeys(name for task in tasks for name in scores[task]))
    common = [name for name in every if all(name in scores[task] for task in tasks)]
    if len(tasks) < 2 or len(common) < 2:
        raise UserError(
            f"ranks over {len(tasks)} tasks of {len(common)} methods with a score on each; "
            "run at least two methods on two tasks"
        )
    table = np.array([[scores[task][name] for name in common] for task in tasks], dtype=float)
    ranks = stats.rankdata(-table, axis=1)
    averages = ranks.mean(axis=0)
    p = friedman(ranks)
    critical = critical_difference(len(common), len(tasks), level)
    order = np.argsort(averages, kind="stable")
    names = [common[index] for index in order]
    sorted_averages = averages[order]
    apart = critical if p <= level else math.inf
    return Ranking(
        tasks=tasks,
        methods=tuple(names),
        average_ranks=tuple(float(rank) for rank in sorted_averages),
        friedman_p=p,
        critical_difference=critical,
        groups=_groups(names, sorted_averages, apart),
    )


def friedman(ranks: np.ndarray[Any, Any]) -> float:
    """Friedman's p-value of (tasks, methods); for two methods, the exact sign test it becomes."""
    if ranks.shape[1] == 2:
        wins, losses = (
            int((ranks[:, 0] < ranks[:, 1]).sum()),
            int((ranks[:, 0] > ranks[:, 1]).sum()),
        )
        return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    if (ranks == ranks[:, :1]).all():
        return 1.0  # all equal on all tasks: scipy's correction for ties divides by zero
    return float(stats.friedmanchisquare(*ranks.T).pvalue)


def critical_difference(methods: int, tasks: int, level: float = LEVEL) -> float:
    """Nemenyi's: q/√2 · √(k(k + 1)/6N), q of the studentized range of k methods."""
    q = float(stats.studentized_range.ppf(1 - level, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * tasks))


def wins_ties_losses(
    comparisons: Mapping[str, Comparison], baselines: Sequence[str]
) -> tuple[Record, ...]:
    """Each method against each baseline, counted over the tasks' comparisons."""
    names = list(
        dict.fromkeys(score.name for table in comparisons.values() for score in table.methods)
    )
    records = []
    for baseline in baselines:
        for method in (name for name in names if name != baseline):
            calls = [
                table.call(method, baseline)
                for table in comparisons.values()
                if {method, baseline} <= {score.name for score in table.methods}
            ]
            if calls:
                records.append(
                    Record(
                        method,
                        baseline,
                        wins=calls.count("better"),
                        ties=calls.count("tie"),
                        losses=calls.count("worse"),
                        undecided=calls.count("these models only"),
                    )
                )
    return tuple(records)


def _groups(
    names: Sequence[str], averages: np.ndarray[Any, Any], apart: float
) -> tuple[tuple[str, ...], ...]:
    """Longest runs of neighbouring methods no two of which are apart; single ones are left out."""
    groups: list[tuple[int, int]] = []
    for start in range(len(names)):
        end = int((averages - averages[start] <= apart).nonzero()[0].max())
        if end > start and (not groups or end > groups[-1][1]):
            groups.append((start, end))
    return tuple(tuple(names[start : end + 1]) for start, end in groups)
