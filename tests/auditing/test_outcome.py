"""Guesses from scores: the extremes, ties without regard to coins, every look paid for."""

import functools
import math
import re
from dataclasses import replace
from pathlib import Path

import mpmath
import numpy as np
import pytest
from scipy import optimize, stats

from dpfp_ray.auditing import outcome as audit_bounds
from dpfp_ray.auditing.audit import Settings, power_warning
from dpfp_ray.auditing.canaries import flip_coins
from dpfp_ray.auditing.outcome import (
    AUDIT,
    SampledGaussian,
    audit_outcome,
    claim_of,
    could_refute,
    count_correct,
    guess_grid,
    keep,
    least_probability,
    one_run_epsilon,
    one_run_gdp,
    read_begun,
    refutes_curve,
    warning_of,
)
from dpfp_ray.auditing.scores import by_canary, centred
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.accounting import gdp_epsilon
from dpfp_ray.system.errors import UserError


def outcome(plan: Plan, scores: np.ndarray, members: np.ndarray, seed: int = 0) -> dict:
    return audit_outcome(plan, scores, members, confidence=0.95, rng=np.random.default_rng(seed))


@pytest.fixture
def nominal() -> Plan:
    """States (ε, δ) and no more."""
    return Plan(records=20_000)


@pytest.fixture
def gaussian() -> Plan:
    return Plan(mode="release_once", records=20_000)


def test_guesses_are_the_extremes_and_the_middle_is_left_alone() -> None:
    rng = np.random.default_rng(6)
    scores = rng.permutation(400).astype(float)
    members = rng.random(400) < 0.5
    order = np.argsort(scores)
    for guesses, correct in count_correct(scores, members, rng, in_only=False):
        low, high = order[: guesses // 2], order[400 - guesses // 2 :]
        assert correct == sum(not members[i] for i in low) + sum(members[i] for i in high)


def test_ties_are_split_without_regard_to_membership() -> None:
    """Members stand first here: whoever broke ties by place would guess them all."""
    members = np.arange(200) < 100
    for in_only in (False, True):
        shares = []
        for seed in range(50):
            rng = np.random.default_rng(seed)
            guesses, correct = count_correct(np.zeros(200), members, rng, in_only)[-1]
            shares.append(correct / guesses)
        assert np.mean(shares) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("m", [2, 7, 20, 1000, 10_001])
def test_as_many_are_guessed_as_there_are_canaries_at_most(m: int) -> None:
    assert all(1 <= guesses <= m for guesses in guess_grid(m))


def test_scores_are_less_what_a_class_has_in_common_and_a_persons_are_their_mean() -> None:
    labels = np.array([0, 0, 0, 1, 1, 1])
    found = centred(np.array([1.0, 2.0, 4.0, 11.0, 13.0, 12.0]), labels)
    assert found.tolist() == [-1.0, 0.0, 2.0, -1.0, 1.0, 0.0]
    rows = RepresentationTable(np.zeros((6, 1), np.float32), labels, "rows")
    assert by_canary(found, rows) is found
    persons = replace(rows, persons=np.array([0, 1, 1, 2, 2, 2]))
    assert by_canary(found, persons).tolist() == [-1.0, 1.0, 0.0]


def test_nan_scores_are_refused(nominal: Plan) -> None:
    with pytest.raises(ValueError, match="NaN"):
        outcome(nominal, np.array([np.nan, 1.0]), np.array([True, False]))


@pytest.mark.slow
def test_scores_that_know_nothing_rarely_give_a_bound(nominal: Plan) -> None:
    positive = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        members, scores = rng.random(200) < 0.5, rng.normal(size=200)
        positive += outcome(nominal, scores, members)["epsilon"] > 0.0
    assert positive <= stats.binom.ppf(0.999, 200, 0.05)


def test_perfect_scores_reach_the_ceiling_with_every_look_paid_for(nominal: Plan) -> None:
    members = np.arange(1000) < 500
    found = outcome(nominal, members.astype(float), members)
    looks = len(guess_grid(1000))
    assert nominal.delta is not None
    paid = one_run_epsilon(1000, 1000, 1000, nominal.delta, 1 - 0.05 / looks)
    assert found["epsilon"] == found["ceiling"] == paid
    assert paid < one_run_epsilon(1000, 1000, 1000, nominal.delta)
    assert (found["guesses"], found["correct"], found["looks"]) == (1000, 1000, looks)


def test_a_gaussian_claim_is_bounded_by_its_whole_curve(gaussian: Plan) -> None:
    """A mechanism of mu = 2: the best look's bound, and above mu = 1."""
    members = flip_coins(4000, 8)
    scores = 2.0 * members + np.random.default_rng(8).normal(size=4000)
    found = outcome(gaussian, scores, members)
    assert gaussian.delta is not None
    each = 1 - 0.05 / found["looks"]
    counts = count_correct(scores, members, np.random.default_rng(0), in_only=False)
    bounds = [one_run_gdp(4000, r, v, gaussian.delta, each) for r, v in counts]
    assert found["epsilon"] == max(bound.epsilon for bound in bounds)
    assert max(bound.mu for bound in bounds) > 1.0


def test_a_large_delta_leaves_no_power_and_the_named_one_does() -> None:
    plan = Plan(records=700, epsilon=3.0)  # δ = 1/1400
    said = warning_of(plan, 350, 0.95, in_only=False)
    assert said is not None
    assert said.startswith("this audit cannot refute ε = 3: with 350 canaries at δ = 0.000714")
    named = re.search(r"--delta (\S+) would do", said)
    assert named is not None
    better = replace(plan, delta=float(named[1]))
    assert warning_of(better, 350, 0.95, in_only=False) is None
    assert not could_refute(claim_of(replace(plan, delta=2.5 * float(named[1]))), 350, 0.95, False)


def test_too_few_canaries_are_told_how_many_would_do() -> None:
    plan = Plan(records=20_000, epsilon=5.0, delta=1e-7)
    said = warning_of(plan, 100, 0.95, in_only=False)
    assert said is not None
    assert said.endswith("; --canaries 800 would do")


@pytest.mark.slow
def test_nothing_helps_against_a_huge_epsilon() -> None:
    said = warning_of(Plan(records=2_000, epsilon=50.0), 500, 0.95, in_only=False)
    assert said is not None
    assert said.endswith("but a smaller ε would")


@pytest.mark.parametrize("plan", [Plan(records=20_000), Plan(method="non_private", records=2_000)])
def test_nothing_is_said_of_an_audit_with_power_or_without_a_claim(plan: Plan) -> None:
    assert power_warning(replace(plan, delta=plan.delta and 1e-6), Settings()) is None


FACTS = {"seed": 2**70, "membership_seed": 3, "plan_hash": "x", "settings": {"canaries": 9}}


def test_no_wrong_byte_is_believed(tmp_path: Path) -> None:
    keep(tmp_path, FACTS)
    whole = (tmp_path / AUDIT).read_bytes()
    known = read_begun(tmp_path)
    for place in range(len(whole)):
        (tmp_path / AUDIT).write_bytes(
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        )
        try:
            assert read_begun(tmp_path) == known  # white space
        except UserError:
            continue


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"seed": "x"}', "null"])
def test_what_holds_no_seeds_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / AUDIT).write_text(content)
    with pytest.raises(UserError, match=r"restore it"):
        read_begun(tmp_path)


# Audit bounds against exact sums, a linear programme, simulated mechanisms, golden numbers.


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


def test_the_bound_itself_is_refuted_and_a_little_more_is_not() -> None:
    bound = one_run_epsilon(100_000, 100_000, 61_000, DELTA)
    assert audit_bounds._p_value(100_000, 100_000, 61_000, DELTA, bound) < 0.05
    assert audit_bounds._p_value(100_000, 100_000, 61_000, DELTA, bound + 1e-5) >= 0.05


def test_bounds_rise_with_right_guesses_and_fall_with_delta_and_confidence() -> None:
    right = [one_run_epsilon(500, 200, v, 1e-5) for v in range(201)]
    assert right == sorted(right)
    assert right[-1] > right[150] > 0.0
    deltas = [one_run_epsilon(500, 200, 170, d) for d in (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.1)]
    assert deltas == sorted(deltas, reverse=True)
    assert deltas[0] > deltas[-1] == 0.0
    assert one_run_epsilon(500, 200, 170, 1e-5, 0.99) < one_run_epsilon(500, 200, 170, 1e-5, 0.95)
    mus = [one_run_gdp(300, 100, v, 1e-5).mu for v in range(101)]
    assert mus == sorted(mus)
    assert mus[50] == 0.0 < mus[-1]


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


@pytest.mark.parametrize(("m", "r", "v"), [(1000, 1000, 690), (1000, 100, 91), (2000, 500, 490)])
def test_gdp_epsilon_is_that_of_mu_and_above_the_general_one(m: int, r: int, v: int) -> None:
    bound = one_run_gdp(m, r, v, 1e-5)
    assert bound.epsilon == gdp_epsilon(bound.mu, 1e-5) > 1.2 * one_run_epsilon(m, r, v, 1e-5)


def test_a_curve_of_one_point_is_what_its_epsilon_and_delta_allow() -> None:
    points = ((1.0, 0.1),)
    assert least_probability(points, 0.05) == 0.0
    assert least_probability(points, 0.6) == pytest.approx(0.5 * np.exp(-1))
    assert least_probability(points, 0.99) == pytest.approx(0.9 - np.e * 0.01)


def test_pure_dp_curve_gives_nearly_the_binomial_bound() -> None:
    """For pure DP the recursion has the binomial's ratios; it loses only above v."""
    epsilon = one_run_epsilon(200, 200, 200, 0.0)

    def refuted(e: float) -> bool:
        def inverse(y: float) -> float:
            return max(math.exp(-e) * y, 1.0 - math.exp(e) * (1.0 - y))

        return refutes_curve(inverse, 200, 200, 200)

    assert refuted(epsilon - 0.01)
    assert not refuted(epsilon + 0.01)


@pytest.mark.parametrize("method", ["dpsgd", "opacus"])
def test_a_sampled_gaussian_is_tested_by_its_whole_curve_whoever_runs_it(method: str) -> None:
    plan = Plan(method=method, batch_size=100, epochs=2).bind(records=1000, representation="mean")
    assert isinstance(claim_of(plan), SampledGaussian)
