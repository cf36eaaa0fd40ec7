"""A table of methods on one dev set: who is better, who is tied, and what cannot be said.

    comparison = compare_methods({"dpsgd": runs_by_rows, "dpfp": ...}, labels, classes=2)
    comparison.pairs[0].call      # "better", "worse", "tie" or "these models only"

A method's score is its mean over all runs given, never the best of them; the runs of a method must
differ in the seed only. Any winner is claimed with all pairs of the table in view (Holm): if all
methods are equal, at most one table in twenty names any. The test is that of `paired`, its model
and its limits are in docs/statistics.md. A method with one run has an unknown spread over seeds, so
its pairs speak of the trained models only; a method whose every run answers one class never wins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from dpfp_ray.results import paired
from dpfp_ray.results.paired import Correct
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.dev_scores import DevPredictions, majority_class, one_class_runs, stack

LEVEL = 0.05

Call = Literal["better", "worse", "tie", "these models only"]
Scope = Literal["methods", "these models"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class MethodScore:
    """A method's mean accuracy over its runs; of one run, the interval is of that model only."""

    name: str
    runs: int
    accuracy: float
    interval: Interval
    seed_sd: float | None  # of the runs' accuracies; one run has none
    one_class_runs: int
    one_class: bool  # every run answers one class, whatever the row
    above_majority: bool | None  # Holm over the methods of the table; of one run, unknown


@dataclass(frozen=True)
class Pair:
    """`first` against `second`: difference = accuracy of the first − accuracy of the second.

    `interval` holds for this pair alone, `simultaneous` for all pairs of the table together
    (Bonferroni): figures with several pairs draw the latter.
    """

    first: str
    second: str
    difference: float
    interval: Interval
    simultaneous: Interval
    p: float
    p_holm: float
    call: Call  # of the first
    scope: Scope
    reason: str  # why the call is no more than it is; empty when the test alone decides


@dataclass(frozen=True)
class Comparison:
    """All methods and all pairs of one table, on one dev set."""

    rows: int
    classes: int
    level: float
    majority_class: int
    majority_accuracy: float
    methods: tuple[MethodScore, ...]
    pairs: tuple[Pair, ...]
    winner: str | None  # the method that is better than each other one

    def call(self, first: str, second: str) -> Call:
        """What the table says of `first` against `second`, in either order."""
        for pair in self.pairs:
            if (pair.first, pair.second) == (first, second):
                return pair.call
            if (pair.first, pair.second) == (second, first):
                return _mirrored(pair.call)
        raise KeyError((first, second))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_predictions(
    runs: Mapping[str, Sequence[DevPredictions]],
    level: float = LEVEL,
    others: Sequence[float] = (),
) -> Comparison:
    """Every pair of methods, from what their records keep; refuses runs on different dev rows."""
    every = [run for method in runs.values() for run in method]
    stack(every)
    return compare_methods(
        {name: stack(method) for name, method in runs.items()},
        every[0].truth(),
        classes=every[0].classes,
        level=level,
        others=others,
    )


def compare_methods(
    answers: Mapping[str, ArrayLike],
    labels: ArrayLike,
    *,
    classes: int,
    level: float = LEVEL,
    others: Sequence[float] = (),
) -> Comparison:
    """Every pair of methods on the same dev rows.

    `answers` has, for each method, the class indices of its runs, shape (runs, rows). `others` are
    the p-values of further pairs that stand in the same table (at other ε): Holm counts them too.
    """
    truth = np.asarray(labels)
    given = {name: np.atleast_2d(np.asarray(runs)) for name, runs in answers.items()}
    _check(given, truth)
    correct = {name: runs == truth for name, runs in given.items()}
    constant = {name: one_class_runs(runs) for name, runs in given.items()}
    never_wins = {name for name, runs in given.items() if constant[name] == len(runs)}

    tests = {
        (first, second): paired.parts(correct[first], correct[second])
        for first, second in combinations(given, 2)
    }
    p_values = np.array(
        [_p_value(correct[first], correct[second]) for first, second in tests], dtype=float
    )
    adjusted = paired.holm(np.append(p_values, others))[: len(p_values)]
    pairs = []
    for (names, test), p, p_holm in zip(tests.items(), p_values, adjusted, strict=True):
        single = [name for name in names if len(given[name]) == 1]
        call, reason = _call(names, float(test.difference), p_holm <= level, single, never_wins)
        pairs.append(
            Pair(
                *names,
                difference=float(test.difference),
                interval=_interval(test, level),
                simultaneous=_interval(test, level / (len(tests) + len(others))),
                p=float(p),
                p_holm=float(p_holm),
                call=call,
                scope="these models" if single else "methods",
                reason=reason,
            )
        )

    majority = majority_class(truth)
    above = _above_majority(correct, truth == majority, level)
    scores = tuple(
        MethodScore(
            name=name,
            runs=len(runs),
            accuracy=float(runs.mean()),
            interval=paired.accuracy_interval(runs, level),
            seed_sd=float(runs.mean(axis=1).std(ddof=1)) if len(runs) > 1 else None,
            one_class_runs=constant[name],
            one_class=name in never_wins,
            above_majority=above[name],
        )
        for name, runs in correct.items()
    )
    return Comparison(
        rows=len(truth),
        classes=classes,
        level=level,
        majority_class=majority,
        majority_accuracy=float((truth == majority).mean()),
        methods=scores,
        pairs=tuple(pairs),
        winner=_winner(list(given), pairs),
    )


def _p_value(first: Correct, second: Correct) -> float:
    if len(first) == len(second) == 1:
        return paired.mcnemar(first[0], second[0])
    return float(paired.p_value(paired.parts(first, second)))


def _interval(test: paired.Parts, level: float) -> Interval:
    middle, width = float(test.difference), float(paired.half_width(test, level))
    return max(middle - width, -1.0), min(middle + width, 1.0)


def _call(
    names: tuple[str, str], difference: float, real: bool, single: list[str], never_wins: set[str]
) -> tuple[Call, str]:
    if single:
        return "these models only", f"one run of {' and of '.join(single)}: seed spread unknown"
    if not real:
        return "tie", ""
    ahead = names[0] if difference > 0 else names[1]
    if ahead in never_wins:
        return "tie", f"{ahead} answers one class and cannot win"
    return ("better" if ahead == names[0] else "worse"), ""


def _mirrored(call: Call) -> Call:
    return {"better": "worse", "worse": "better"}.get(call, call)  # type: ignore[return-value]


def _above_majority(
    correct: Mapping[str, Correct], majority: Correct, level: float
) -> dict[str, bool | None]:
    """Which methods beat the constant answer; it has no seeds, so only the method's own count."""
    several = [name for name, runs in correct.items() if len(runs) > 1]
    above: dict[str, bool | None] = dict.fromkeys(correct)
    if several:
        tests = [paired.parts(correct[name], majority[None]) for name in several]
        adjusted = paired.holm(np.array([float(paired.p_value(test)) for test in tests]))
        for name, test, p in zip(several, tests, adjusted, strict=True):
            above[name] = bool(p <= level and test.difference > 0)
    return above


def _winner(names: list[str], pairs: list[Pair]) -> str | None:
    for name in names:
        calls = [pair.call for pair in pairs if pair.first == name]
        calls += [_mirrored(pair.call) for pair in pairs if pair.second == name]
        if calls and set(calls) == {"better"}:
            return name
    return None


def _check(given: Mapping[str, Any], truth: Any) -> None:
    if truth.ndim != 1 or len(truth) < 2:
        raise UserError(f"{truth.size} dev rows cannot be compared on; give at least two")
    for name, runs in given.items():
        if runs.ndim != 2 or runs.shape[0] < 1 or runs.shape[1] != len(truth):
            raise UserError(
                f"{name}: predictions of shape {runs.shape} for {len(truth)} dev rows; "
                "compare only runs with the same dev rows"
            )
