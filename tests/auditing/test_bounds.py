"""Audit bounds against exact sums, a linear programme, simulated mechanisms, golden numbers."""

import functools
import math

import mpmath
import numpy as np
import pytest
from scipy import optimize, stats

from dpfp_ray.auditing import outcome as audit_bounds
from dpfp_ray.auditing.outcome import (
    one_run_epsilon,
    one_run_gdp,
    refutes_curve,
)

DELTA = 7.4e-6


def exact_p_value(m: int, r: int, v: int, delta: float, epsilon: float) -> mpmath.mpf:
    """The formula as printed, in 50 digits."""
    with mpmath.workdps(50):
        q = mpmath.e ** mpmath.mpf(epsilon) / (1 + mpmath.e ** mpmath.mpf(epsilon))
        pmf = [mpmath.binomial(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
        beta = sum(pmf[v:])
        alpha = max(sum(pmf[v - i : v]) / i for i in range(1, v + 1))
        return min(mpmath.mpf(1), beta + 2 * m * mpmath.mpf(delta) * alpha)


def gaussian_inverse(mu: float, y: float) -> float:
    return float(stats.norm.cdf(stats.norm.ppf(y) - mu))


# --- (epsilon, delta) ---------------------------------------------------------------------------


@pytest.mark.parametrize(("r", "ceiling"), [(100, 3.49), (500, 5.10), (1000, 5.79)])
def test_golden_ceilings(r: int, ceiling: float) -> None:
    assert one_run_epsilon(r, r, r, DELTA) == pytest.approx(ceiling, abs=0.005)


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.7, 5.0])
@pytest.mark.parametrize(("m", "r", "v"), [(50, 1, 1), (60, 60, 45), (90, 40, 40), (200, 70, 30)])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_p_value_equals_the_printed_formula(
    m: int, r: int, v: int, delta: float, epsilon: float
) -> None:
    ours = audit_bounds._p_value(m, r, v, delta, epsilon)
    assert ours == pytest.approx(float(exact_p_value(m, r, v, delta, epsilon)), rel=1e-9)


def test_p_value_keeps_its_precision_in_the_far_tail() -> None:
    ours = audit_bounds._p_value(400, 400, 390, 0.0, 0.1)
    exact = float(exact_p_value(400, 400, 390, 0.0, 0.1))
    assert ours == pytest.approx(exact, rel=1e-9, abs=0.0)
    assert ours < 1e-80


@pytest.mark.slow
@pytest.mark.parametrize(("m", "r", "v"), [(60, 60, 45), (90, 40, 40), (100, 30, 22)])
def test_bound_is_the_last_refuted_point_of_a_fine_grid(m: int, r: int, v: int) -> None:
    grid = np.arange(0.0, 4.0, 0.04)
    refuted = [e for e in grid if exact_p_value(m, r, v, 1e-4, e) < 0.05]
    assert refuted[-1] <= one_run_epsilon(m, r, v, 1e-4) < refuted[-1] + 0.04


def test_without_delta_it_is_clopper_pearson() -> None:
    low = stats.binomtest(430, 500, alternative="greater").proportion_ci(0.95).low
    bound = one_run_epsilon(1000, 500, 430, 0.0)
    assert bound == pytest.approx(math.log(low / (1 - low)), abs=2e-6)


@pytest.mark.parametrize("v", [0, 40, 50, 58])
def test_no_better_than_chance_gives_zero(v: int) -> None:
    assert one_run_epsilon(100, 100, v, 1e-5) == 0.0


# --- f-DP ---------------------------------------------------------------------------------------


def largest_tail(mu: float, m: int, r: int, v: int) -> float:
    """max P[at least v right] over all distributions that the theorem's inequalities allow.

    A linear programme: the convex inverse blow-up g is replaced by many of its tangents,
    wrong_{j-1} >= g(y) + g'(y) (right_j - y). It knows nothing of the recursion.
    """
    counts = np.arange(r + 1)
    points = np.concatenate([np.geomspace(1e-6, 0.5, 600), np.linspace(0.5, 0.999, 100)])
    quantiles = stats.norm.ppf(points)
    value = stats.norm.cdf(quantiles - mu)
    slope = stats.norm.pdf(quantiles - mu) / stats.norm.pdf(quantiles)
    rows, limits = [], []
    for j in range(1, r + 1):
        right = np.where(counts >= j, counts / m, 0.0)
        wrong = np.where(counts >= j - 1, (r - counts) / m, 0.0)
        rows.append(slope[:, None] * right - wrong)
        limits.append(slope * points - value)
    solution = optimize.linprog(
        -(counts >= v).astype(float),
        A_ub=np.concatenate(rows),
        b_ub=np.concatenate(limits),
        A_eq=np.ones((1, r + 1)),
        b_eq=[1.0],
    )
    assert solution.success
    return float(-solution.fun)


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("m", "r", "v"), [(6, 6, 5), (12, 12, 12), (40, 10, 8)])
def test_recursion_finds_the_optimum_of_the_linear_programme(
    mu: float, m: int, r: int, v: int
) -> None:
    tail = largest_tail(mu, m, r, v)
    inverse = functools.partial(gaussian_inverse, mu)
    assert not refutes_curve(inverse, m, r, v, confidence=1.0 - tail * 0.995)
    assert tail > 0.99 or refutes_curve(inverse, m, r, v, confidence=1.0 - tail * 1.005)


def plain_recursion(mu: float, m: int, r: int, v: int, tau: float) -> float:
    """right_0 + wrong_0 with both sequences written out in full."""
    right, wrong = [0.0] * (v + 1), [0.0] * (v + 1)
    right[v], wrong[v] = tau * v / m, tau * (r - v) / m
    for i in reversed(range(v)):
        wrong[i] = max(wrong[i + 1], gaussian_inverse(mu, min(right[i + 1], 1.0)))
        right[i] = right[i + 1] + i / (r - i) * (wrong[i] - wrong[i + 1])
    return right[0] + wrong[0]


@pytest.mark.parametrize(("m", "r", "v"), [(100, 100, 80), (200, 60, 60), (300, 50, 44)])
def test_mu_is_where_the_plain_recursion_crosses(m: int, r: int, v: int) -> None:
    mu = one_run_gdp(m, r, v, 1e-5).mu
    assert plain_recursion(mu - 1e-4, m, r, v, 0.05) > r / m
    assert plain_recursion(mu + 1e-4, m, r, v, 0.05) <= r / m


@pytest.mark.parametrize(("mu", "r"), [(0.5, 300), (1.0, 60), (2.0, 100)])
def test_a_true_gaussian_mechanism_is_seldom_refuted(mu: float, r: int) -> None:
    rng, m, runs = np.random.default_rng(7), 300, 400
    bound = functools.cache(lambda v: one_run_gdp(m, r, v, 1e-5).mu)
    refuted = 0
    for _ in range(runs):
        coins = rng.random(m) < 0.5
        order = np.argsort(mu * coins + rng.normal(size=m))
        v = int(np.sum(~coins[order[: r // 2]]) + np.sum(coins[order[m - r // 2 :]]))
        refuted += bound(v) > mu
    assert refuted <= stats.binom.ppf(0.999, runs, 0.05)


def test_pure_dp_curve_gives_nearly_the_binomial_bound() -> None:
    """For pure DP the recursion has the binomial's ratios; it loses only above v."""
    epsilon = one_run_epsilon(200, 200, 200, 0.0)

    def refuted(e: float) -> bool:
        def inverse(y: float) -> float:
            return max(math.exp(-e) * y, 1.0 - math.exp(e) * (1.0 - y))

        return refutes_curve(inverse, 200, 200, 200)

    assert refuted(epsilon - 0.01)
    assert not refuted(epsilon + 0.01)
