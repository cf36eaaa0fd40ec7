"""Two methods on the same dev rows, each trained with several seeds: difference, p-value, interval.

The mean difference D varies for three reasons: which rows happened to be in the dev set (both
methods answer the same ones), and the seeds of either method. Their variances are estimated apart:

    rows        V_r = Σ d² / R²,  d = difference of the two methods' shares of right runs on a row
    seeds       V_s = s² / n,     s = standard deviation of a method's accuracy over its n runs

and D is taken for real at level α when  (|D| − g)² > t²·V_r + t²·V_s1 + t²·V_s2, where each t is
Student's quantile of its own degrees of freedom. If the parts are normal, this never exceeds α,
whatever their shares: P(N² > x) is convex in x, so the worst case over the shares is one part
alone, where the test is Student's own (Banerjee 1960). Disagreement between a method's seeds row
by row counts in V_r and again in V_s; that makes the test careful, never rash.

Sums of few row differences are not normal. Hence d² is not centred (as in McNemar's test), the
degrees of freedom of the rows are those of the rows that differ, and g is half the step between
neighbouring sums (Edwards' correction); with one run each the p-value is McNemar's exact one.

Arrays may have axes in front (many tables at once): `first` and `second` are (..., runs, rows).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]
Correct = NDArray[np.bool_]

SMALLEST_P = 1e-15
HALVINGS = 60  # of log p, from SMALLEST_P to 1: far finer than anything printed


@dataclass(frozen=True)
class Parts:
    """What the test needs of a pair; every field has the shape of the axes in front."""

    difference: Array
    step: Array  # g: half the distance between neighbouring values of the difference
    spread: Array  # centred mean square of the row differences
    rows: int
    rows_df: Array
    seed_variances: tuple[tuple[Array, int], ...]  # of each method's mean, degrees of freedom


def parts(first: Correct, second: Correct) -> Parts:
    """Difference and variance parts of two methods that answered the same rows.

    A method with one run has no seed part: what follows is then about that trained model only.
    """
    rows = first.shape[-1]
    by_row = first.mean(axis=-2) - second.mean(axis=-2)
    # Shares of runs are fractions of small numbers: what is left of rounding is no difference.
    by_row[np.abs(by_row) < 1e-9] = 0.0
    difference = by_row.mean(axis=-1)
    squares = by_row**2
    total = squares.sum(axis=-1)
    some = total > 0
    # How many rows differ, where those that differ by little count less: (Σd²)² / Σd⁴.
    effective = np.divide(total**2, (squares**2).sum(axis=-1), out=np.ones_like(total), where=some)
    sizes = np.where(by_row != 0, np.abs(by_row), np.inf).min(axis=-1)
    return Parts(
        difference=difference,
        step=np.where(some, sizes, 0.0) / rows,
        spread=np.maximum(total / rows - difference**2, 0.0),
        rows=rows,
        rows_df=np.maximum(effective - 1, 1.0),
        seed_variances=tuple(
            seed_variance(method) for method in (first, second) if method.shape[-2] > 1
        ),
    )


def seed_variance(correct: Correct) -> tuple[Array, int]:
    """Variance of a method's mean accuracy over its runs, and the degrees of freedom behind it."""
    runs = correct.shape[-2]
    return correct.mean(axis=-1).var(axis=-1, ddof=1) / runs, runs - 1


def p_value(pair: Parts) -> Array:
    """The level at which the pair's difference would just be called real."""
    distance = np.maximum(np.abs(pair.difference) - pair.step, 0.0)
    rows_variance = (pair.spread + pair.difference**2) / pair.rows
    low = np.full(distance.shape, np.log(SMALLEST_P))
    high = np.zeros(distance.shape)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        level = np.exp(middle)
        bound = student(level, pair.rows_df) ** 2 * rows_variance + seeds_bound(pair, level)
        real = distance**2 > bound
        high, low = np.where(real, middle, high), np.where(real, low, middle)
    return np.where(distance > 0, np.exp(high), 1.0)


def half_width(pair: Parts, level: float) -> Array:
    """Distance from the difference to the ends of its interval at 1 − level.

    The ends are the values that the test would just not reject: the interval leaves out 0 exactly
    when p < level. Under a supposed difference δ the rows' mean square is spread + (D − δ)², so the
    distance solves a quadratic equation. Rows that all agree say only that disagreement is rarer
    than 1 − level^(1/R), about 3/R.
    """
    share = student(level, pair.rows_df) ** 2 / pair.rows
    constant = pair.step**2 - share * pair.spread - seeds_bound(pair, level)
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(np.maximum(pair.step**2 - (1 - share) * constant, 0.0))
        width = np.where(share < 1, (pair.step + root) / (1 - share), np.inf)
    unseen = 1 - level ** (1 / pair.rows)
    same = (pair.spread == 0) & (pair.difference == 0)
    return np.where(same, np.maximum(width, unseen), width)


def seeds_bound(pair: Parts, level: float | Array) -> Array:
    """The seeds' share of the squared distance that a real difference exceeds."""
    bound = np.zeros(pair.difference.shape)
    for variance, df in pair.seed_variances:
        bound = bound + student(level, df) ** 2 * variance
    return bound


def student(level: float | Array, df: float | Array) -> Array:
    """Student's two-sided quantile: |t| is above it with probability `level`."""
    return -special.stdtrit(df, np.asarray(level) / 2)


def mcnemar(first: Correct, second: Correct) -> float:
    """McNemar's exact test of two models: are the rows that only one has right evenly split?

    Exact and not mid-p: mid-p exceeds its level by a little for some numbers of rows.
    """
    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())
    if only_first + only_second == 0:
        return 1.0
    return float(stats.binomtest(only_first, only_first + only_second).pvalue)


def accuracy_interval(correct: Correct, level: float) -> tuple[float, float]:
    """Interval of a method's accuracy over rows and seeds; of one run, Wilson's (rows only).

    Wilson's equation (a − p)² = z²·p(1 − p)/R with two changes: averaging over runs shrinks the
    rows' variance by the factor seen, and the seeds' part is added to the right-hand side.
    """
    runs, rows = correct.shape
    by_row = correct.mean(axis=0)
    accuracy = float(by_row.mean())
    binomial = accuracy * (1 - accuracy)
    shrink = float(by_row.var()) / binomial if binomial > 0 else 1.0
    share = float(stats.norm.isf(level / 2)) ** 2 * shrink / rows
    seeds = 0.0
    if runs > 1:
        variance, df = seed_variance(correct)
        seeds = float(student(level, df) ** 2 * variance)
    middle = (accuracy + share / 2) / (1 + share)
    root = np.sqrt(max(middle**2 - (accuracy**2 - seeds) / (1 + share), 0.0))
    return max(middle - root, 0.0), min(middle + root, 1.0)


def holm(p_values: Array) -> Array:
    """Holm's adjusted p-values along the last axis: one below α is real with all others in view."""
    count = p_values.shape[-1]
    order = np.argsort(p_values, axis=-1)
    ranked = np.take_along_axis(p_values, order, axis=-1) * np.arange(count, 0, -1)
    stepped = np.minimum(np.maximum.accumulate(ranked, axis=-1), 1.0)
    adjusted = np.empty_like(stepped)
    np.put_along_axis(adjusted, order, stepped, axis=-1)
    return adjusted
