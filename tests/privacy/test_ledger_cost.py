"""Sums over uses: against dp-accounting, slow twins, the theorems written out, golden numbers."""

import itertools
import math
from collections import Counter
from dataclasses import asdict

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution

from dpfp_ray.privacy import pld
from dpfp_ray.privacy.accounting import gdp_delta, gdp_epsilon, joint_epsilon, renyi_epsilon
from dpfp_ray.privacy.ledger_cost import (
    Counts,
    Filters,
    Gaussian,
    Part,
    Pure,
    RdpCurve,
    _mu,
    composed_epsilon,
    count_parts,
    filter_epsilon,
    filters_from,
    filters_of,
    part_from_json,
    randomised_response_renyi,
    renyi_curve,
    total_of,
    what_fits,
    would_fit,
)

D = 67_349
DELTA = 1 / (2 * D)
TRIAL, TRIAL_STEPS = Gaussian(1024 / D, 0.959), 10 * D // 1024  # DESIGN section 7: ε = 3 by rdp
PAPER, PAPER_DRAWS = Gaussian(1 / D, 0.4), 202_016
PLAIN = Gaussian(1.0, 3.7306)  # one release of ε = 1 at δ = 1e-5


def event(part: Gaussian, count: int) -> dp_accounting.DpEvent:
    gaussian = dp_accounting.GaussianDpEvent(part.noise_multiplier)
    one = gaussian if part.p == 1 else dp_accounting.PoissonSampledDpEvent(part.p, gaussian)
    return dp_accounting.SelfComposedDpEvent(one, count)


def theirs(counts: Counts, delta: float, interval: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=interval)
    for part, count in counts.items():
        assert isinstance(part, Gaussian)
        accountant.compose(event(part, count))
    return float(accountant.get_epsilon(delta))


MIXED = {
    "two rates": {Gaussian(0.01, 0.9): 300, Gaussian(0.05, 1.5): 100},
    "sampled and plain": {Gaussian(0.02, 1.0): 200, Gaussian(1.0, 2.0): 3},
    "weak noise beside strong": {Gaussian(0.001, 0.4): 1000, Gaussian(0.2, 6.0): 50},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_composition_is_what_dp_accounting_says_of_the_same_events(name: str) -> None:
    found = composed_epsilon(MIXED[name], 1e-5)
    assert found == pytest.approx(theirs(MIXED[name], 1e-5, 1e-4), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_composition_is_never_below_dp_accountings_lower_bound(name: str) -> None:
    low = None
    for part, count in MIXED[name].items():
        one = privacy_loss_distribution.from_gaussian_mechanism(
            part.noise_multiplier,
            sampling_prob=part.p,
            pessimistic_estimate=False,
            value_discretization_interval=2e-4,
        ).self_compose(count)
        low = one if low is None else low.compose(one)
    assert low is not None
    assert composed_epsilon(MIXED[name], 1e-5) >= low.get_epsilon_for_delta(1e-5)


@pytest.mark.parametrize(
    ("part", "count", "epsilon"),
    [(TRIAL, 30 * TRIAL_STEPS, 16.99), (Gaussian(1 / D, 0.3461), PAPER_DRAWS, 5.900)],
    ids=["thirty trials", "the paper's run"],
)
def test_golden_costs_of_fixed_lists(part: Part, count: int, epsilon: float) -> None:
    assert composed_epsilon({part: count}, DELTA) == pytest.approx(epsilon, rel=2e-3)


def test_golden_thirty_trials_cost_18_21_by_renyi_and_a_filter_never_says_less() -> None:
    orders = np.arange(1.1, 11, 0.1)
    curve = renyi_curve({TRIAL: 30 * TRIAL_STEPS}, orders)
    best = min(renyi_epsilon(a, v, DELTA) for a, v in zip(orders, curve, strict=True))
    assert best == pytest.approx(18.21, rel=2e-3)
    filters = filters_from([TRIAL])
    assert best <= filter_epsilon({TRIAL: 30 * TRIAL_STEPS}, DELTA, filters)[0] <= 1.1 * best


def test_plain_gaussians_compose_exactly() -> None:
    counts = {Gaussian(1.0, 2.0): 1, Gaussian(1.0, 3.0): 2}
    exact = gdp_epsilon(math.sqrt(1 / 4 + 2 / 9), 1e-5)
    assert composed_epsilon(counts, 1e-5) == exact


def test_a_release_with_randomised_labels_costs_their_exact_joint_epsilon() -> None:
    exact = joint_epsilon(1 / 1.41, 1.0, DELTA)
    found = composed_epsilon({Gaussian(1.0, 1.41): 1, Pure(1.0): 1}, DELTA)
    assert exact <= found <= 1.001 * exact


def test_pure_parts_cost_at_most_their_sum_and_at_least_the_binomial_mixture() -> None:
    eps, n, delta = 0.5, 12, 1e-4
    q = 1 / (1 + math.exp(-eps))

    def slow_delta(total: float) -> float:
        losses = [
            (math.comb(n, k) * q**k * (1 - q) ** (n - k), eps * (2 * k - n)) for k in range(n + 1)
        ]
        return sum(p * -math.expm1(total - loss) for p, loss in losses if loss > total)

    found = composed_epsilon({Pure(eps): n}, delta)
    assert slow_delta(found) <= delta
    assert slow_delta(found * 0.998) > delta
    assert found <= n * eps


def test_the_product_of_spectra_is_plain_convolution() -> None:
    interval, delta = 0.02, 1e-3
    parts = [
        (pld.release(pld.Release(0.1, 1.0, "add_remove")), 4),
        (pld.release(pld.PlainGaussian(3.0)), 2),
        (pld.pure(0.3), 3),
    ]
    found = []
    for direction in (0, 1):
        masses, first, kept = np.ones(1), 0, 1.0
        for on_grid, count in parts:
            losses = on_grid(1e-12, interval)[direction]
            for _ in range(count):
                masses, first = np.convolve(masses, losses.masses), first + losses.first
                kept *= 1 - losses.infinite
        values = interval * (first + np.arange(len(masses)))

        def slow(eps: float, values=values, masses=masses, kept=kept) -> float:  # type: ignore[no-untyped-def]
            above = values > eps
            return float(masses[above] @ -np.expm1(eps - values[above])) + 1 - kept

        low, high = 0.0, 20.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if slow(middle) > delta else (low, middle)
        found.append(high)
    assert pld.joint_epsilon_at(parts, delta, interval) == pytest.approx(max(found), rel=1e-5)


def test_one_mechanism_composes_as_in_pld() -> None:
    alone = pld.epsilon_at(0.01, 500, 0.8, 1e-5, 1e-3)
    parts = [(pld.release(pld.Release(0.01, 0.8, "add_remove")), 500)]
    assert pld.joint_epsilon_at(parts, 1e-5, 1e-3) == pytest.approx(alone, rel=1e-6)


def test_more_uses_never_cost_less() -> None:
    pool = [(TRIAL, 100), (Gaussian(1.0, 3.0), 1), (Pure(0.2), 2), (PAPER, 1000)]
    for chosen in itertools.combinations(pool, 3):
        whole, part = dict(chosen), dict(chosen[:2])
        assert composed_epsilon(whole, DELTA) >= composed_epsilon(part, DELTA) * (1 - 1e-3)
        for filters in (filters_from([TRIAL]), filters_from([PLAIN])):
            after, before = (filter_epsilon(c, DELTA, filters)[0] for c in (whole, part))
            assert after >= before


# --- Rényi curves and filters -------------------------------------------------------------------


def test_renyi_curves_are_dp_accountings() -> None:
    counts = {TRIAL: 650, Gaussian(1.0, 2.0): 3}
    for order, value in zip((2.0, 3.5, 8.0), renyi_curve(counts, (2.0, 3.5, 8.0)), strict=True):
        accountant = rdp.RdpAccountant([order])
        for part, count in counts.items():
            accountant.compose(event(part, count))
        assert renyi_epsilon(order, value, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize("alpha", [1.25, 2.0, 17.0])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 30.0])
def test_renyi_divergence_of_randomised_response(alpha: float, epsilon: float) -> None:
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    r = 1 / (1 + math.exp(epsilon))
    slow = math.log(q**alpha * r ** (1 - alpha) + r**alpha * q ** (1 - alpha)) / (alpha - 1)
    assert randomised_response_renyi(epsilon, alpha) == pytest.approx(slow, rel=1e-6)


def test_a_known_curve_bounds_orders_below_its_own_and_none_above() -> None:
    curve = {RdpCurve((2.0, 4.0), (0.1, 0.3)): 2}
    assert renyi_curve(curve, (1.5, 2.0, 3.0, 5.0)) == [0.2, 0.2, 0.6, math.inf]


def test_a_curve_composes_with_other_mechanisms_by_renyi() -> None:
    orders = tuple(1 + 10 ** (k / 12) for k in range(-14, 37))
    as_curve = RdpCurve(orders, tuple(a / (2 * 4.0) for a in orders))
    found = composed_epsilon({as_curve: 1, TRIAL: 100}, DELTA)
    assert found >= composed_epsilon({Gaussian(1.0, 2.0): 1, TRIAL: 100}, DELTA)


def test_a_filter_is_the_theorem_written_out() -> None:
    total = total_of(3.0, 1e-5)
    share = 1e-5 / 2 / len(total.orders)
    curve = [100 * value for value in renyi_curve({TRIAL: 1}, total.orders)]
    by_hand = min(
        value + math.log((a - 1) / a) - (math.log(share) + math.log(a)) / (a - 1)
        for a, value in zip(total.orders, curve, strict=True)
    )
    assert filter_epsilon({TRIAL: 100}, 1e-5, filters_of(total))[0] == pytest.approx(by_hand)


@pytest.mark.parametrize(
    "filters", [filters_from([TRIAL]), filters_from([PLAIN]), filters_of(total_of(3.0, 1e-5))]
)
def test_the_shares_of_delta_are_one_together(filters: Filters) -> None:
    assert filters.gdp_share + sum(filters.renyi_shares.values()) == pytest.approx(1)


def test_three_plain_releases_of_epsilon_1_cost_1_84_however_they_were_chosen() -> None:
    epsilon, how = filter_epsilon({PLAIN: 3}, 1e-5, filters_from([PLAIN]))
    assert how == "GDP filter"
    assert 1.835 < epsilon < 1.84
    assert gdp_delta(epsilon, math.sqrt(3) / PLAIN.noise_multiplier) == pytest.approx(0.97e-5)


@pytest.mark.parametrize("pure", [0.1, 1.0, 4.0])
def test_a_pure_mechanism_is_dominated_by_the_gaussian_that_the_gdp_filter_counts(
    pure: float,
) -> None:
    mu = _mu({Pure(pure): 1})
    q = 1 / (1 + math.exp(-pure))  # randomised response: the most that ε-DP allows
    for epsilon in np.linspace(0, 1.2 * pure, 13):
        response = max(0.0, q - math.exp(epsilon) * (1 - q))
        assert gdp_delta(float(epsilon), mu) >= response - 1e-12


def test_a_sampled_gaussian_counts_in_the_gdp_filter_as_if_it_were_not_sampled() -> None:
    assert _mu({Gaussian(0.01, 2.0): 4}) == _mu({Gaussian(1.0, 2.0): 4}) == 1.0


def test_no_curve_has_a_place_in_the_gdp_filter() -> None:
    assert _mu({RdpCurve((2.0,), (0.1,)): 1}) == math.inf


def test_whoever_chooses_each_noise_by_the_last_result_stays_within_the_gdp_filter() -> None:
    """Monte Carlo: an adversary spends large μ while its privacy loss is high, little else."""
    rng, runs, epsilon = np.random.default_rng(5), 400_000, 1.0
    left, loss = np.full(runs, 1.0), np.zeros(runs)  # of Σ μ² ≤ 1
    for _ in range(12):
        squared = np.minimum(left, np.where(loss > epsilon - 0.5, 0.3, 0.02))
        squared = np.where(loss > 2 * epsilon, 0.0, squared)  # stops where it has won
        left -= squared
        loss += squared / 2 + np.sqrt(squared) * rng.standard_normal(runs)
    estimate = np.maximum(0, -np.expm1(epsilon - loss))
    error = 4 * estimate.std() / math.sqrt(runs)
    assert estimate.mean() <= gdp_delta(epsilon, 1.0) + error


@pytest.mark.parametrize("part", [TRIAL, PAPER, Gaussian(1.0, 20.0), Pure(0.3)])
def test_a_filter_is_never_below_composition(part: Part) -> None:
    families = [filters_from([TRIAL]), filters_from([PLAIN])]
    families += [filters_of(total_of(epsilon, DELTA)) for epsilon in (1.0, 8.0)]
    for count in (1, 50, 2000):
        low = composed_epsilon({part: count}, DELTA)
        for filters in families:
            assert filter_epsilon({part: count}, DELTA, filters)[0] >= low * (1 - 1e-3)


@pytest.mark.parametrize("first", [TRIAL, PLAIN])
def test_a_filter_of_a_mixed_list_is_never_below_what_dp_accounting_composes(
    first: Gaussian,
) -> None:
    counts = {TRIAL: 300, PLAIN: 3}
    epsilon, _ = filter_epsilon(counts, DELTA, filters_from([first]))
    assert epsilon >= theirs(counts, DELTA, 1e-3)


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 8.0, 20.0])
def test_the_orders_of_a_total_lose_little_to_the_best_order(epsilon: float) -> None:
    """The best order of all is known only afterwards; three fixed ones admit most of it."""
    orders = np.concatenate([np.arange(1.05, 12, 0.05), np.arange(12, 200)])
    one = np.array(renyi_curve({TRIAL: 1}, orders))
    total = total_of(epsilon, DELTA)
    budget = epsilon - np.log1p(-1 / orders) + np.log(DELTA * orders) / (orders - 1)
    most = int(np.max(budget / one))
    assert would_fit({TRIAL: int(0.55 * most)}, {}, total)
    assert not would_fit({TRIAL: most + 1}, {}, total)


def test_what_fits_fits_and_hardly_more_does() -> None:
    total, spent = total_of(5.0, DELTA), {TRIAL: TRIAL_STEPS}
    most = what_fits(spent, {PAPER: PAPER_DRAWS}, total, DELTA)
    assert 0.5 < most < 5
    sigmas = np.exp(np.linspace(math.log(0.3), math.log(30), 2000))
    fitting = next(
        s for s in sigmas if would_fit(spent, {Gaussian(1 / D, float(s)): PAPER_DRAWS}, total)
    )
    slow = composed_epsilon({Gaussian(1 / D, float(fitting)): PAPER_DRAWS}, DELTA)
    assert most == pytest.approx(slow, rel=0.05)


@pytest.mark.parametrize(
    ("spent", "new", "epsilon"),
    [({TRIAL: 10**6}, {TRIAL: 1}, 1.0), ({}, {Pure(3.0): 1, Gaussian(1.0, 1.0): 1}, 2.0)],
    ids=["a spent total", "pure parts alone"],
)
def test_where_nothing_fits_it_is_0(spent: Counts, new: Counts, epsilon: float) -> None:
    assert what_fits(spent, new, total_of(epsilon, DELTA), DELTA) == 0.0


# --- parts as data ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part", [TRIAL, Gaussian(0.5, 2.0, 32), Pure(1.0), RdpCurve((2.0,), (0.1,))]
)
def test_parts_survive_json(part: Gaussian | Pure | RdpCurve) -> None:
    assert part_from_json(asdict(part)) == part


def test_an_unknown_mechanism_raises_instead_of_costing_nothing() -> None:
    with pytest.raises(ValueError, match="laplace"):
        part_from_json({"kind": "laplace", "scale": 1.0})


def test_steps_multiply_draws_but_not_one_time_parts() -> None:
    counts = count_parts([Gaussian(0.5, 2.0, 32), Pure(1.0)], 10)
    assert counts == Counter({Gaussian(0.5, 2.0): 320, Pure(1.0): 1})
    assert not count_parts([Gaussian(0.5, 2.0), Pure(1.0)], 0)


@pytest.mark.parametrize(
    ("p", "sigma"), [(0.0, 1.0), (1.1, 1.0), (0.5, 0.0), (0.5, math.nan), (0.5, math.inf)]
)
def test_mechanisms_that_do_not_exist_are_refused(p: float, sigma: float) -> None:
    with pytest.raises(ValueError, match="no Gaussian"):
        Gaussian(p, sigma)
