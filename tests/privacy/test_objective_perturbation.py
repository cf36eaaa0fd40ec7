"""Objective perturbation's accounting against integrals and draws that follow its definitions."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from dpfp_ray.privacy.accounting import gdp_delta, gdp_mu_of_budget
from dpfp_ray.privacy.objective_perturbation import (
    OUTPUT_SHARE,
    ObjectivePerturbation,
    calibrate,
    least_sigma,
    log_tail_of_lead,
    profile,
)

D = 67_349
DELTA = 1 / (2 * D)


@pytest.mark.parametrize(
    ("epsilon", "ridge", "sigma"), [(1, 1.8627, 4.5566), (3, 0.6752, 1.6934), (8, 0.3373, 0.7287)]
)
def test_golden_numbers_of_the_design(epsilon: float, ridge: float, sigma: float) -> None:
    found = calibrate(epsilon, DELTA)
    assert found.ridge == pytest.approx(ridge, abs=5.1e-5)
    assert found.sigma == pytest.approx(sigma, abs=5.1e-5)


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 2.0, 15.0, 30.0])
@pytest.mark.parametrize("delta", [1 / 600, 1e-5, 1e-8])
def test_other_budgets_agree_with_the_rule_solved_slowly(epsilon: float, delta: float) -> None:
    """The rule of DESIGN 3.7, solved for λ in the published closed form."""
    sigma = 1.2 / gdp_mu_of_budget(epsilon, delta)
    ridge = brentq(lambda r: published_delta(epsilon, r, sigma) - delta, 0.25 * (1 + 1e-9), 1e6)
    found = calibrate(epsilon, delta)
    assert found.sigma == pytest.approx(sigma, rel=1e-9)
    assert found.ridge == pytest.approx(ridge, rel=1e-3)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("delta", [DELTA, 1 / 128])
def test_the_whole_release_is_on_budget_and_uses_it_up(
    epsilon: float, delta: float, classes: int
) -> None:
    found = calibrate(epsilon, delta, classes)
    assert 0.999999 * delta < found.delta(epsilon) <= delta
    assert 0.99999 * epsilon < found.epsilon(delta) <= epsilon


@pytest.mark.parametrize("classes", [2, 4])
def test_a_smaller_ridge_or_sigma_or_output_noise_is_over_budget(classes: int) -> None:
    found = calibrate(3.0, DELTA, classes)
    for worse in (
        ObjectivePerturbation(0.99 * found.ridge, found.sigma, classes, found.output_mu),
        ObjectivePerturbation(found.ridge, 0.99 * found.sigma, classes, found.output_mu),
        ObjectivePerturbation(found.ridge, found.sigma, classes, 20 * found.output_mu),
    ):
        assert worse.delta(3.0) > 1.0001 * DELTA


def test_the_last_step_costs_a_millionth() -> None:
    found = calibrate(3.0, DELTA)
    alone = ObjectivePerturbation(found.ridge, found.sigma)
    assert found.output_mu == OUTPUT_SHARE / found.sigma
    assert alone.delta(3.0) < found.delta(3.0) < 1.0001 * alone.delta(3.0)


def test_the_output_noise_follows_from_its_sensitivity() -> None:
    found = calibrate(3.0, DELTA)
    sensitivity = 2 * found.tau / found.ridge
    assert sensitivity / found.output_sigma == pytest.approx(found.output_mu)


def by_definition(rest: float, sigma: float, output_mu: float) -> float:
    """E (1 − e^{−excess})₊ over two independent Gaussians, on a fine grid of both."""
    s = 1 / sigma
    z = (np.arange(4000) + 0.5) / 4000 * 10
    w = np.linspace(-8, 8, 401) if output_mu else np.zeros(1)
    weights = norm.pdf(w) / norm.pdf(w).sum()
    loss = s**2 / 2 + s * z[:, None] + output_mu**2 / 2 + output_mu * w
    inner = np.maximum(-np.expm1(rest - loss), 0) @ weights
    return float(2 * norm.pdf(z) @ inner * 10 / 4000)


@pytest.mark.parametrize("rest", [-0.5, 0.02, 0.3, 2.0])
@pytest.mark.parametrize("sigma", [0.7, 2.0, 5.0])
@pytest.mark.parametrize("output_mu", [0.0, 0.001, 0.5])
def test_the_profile_is_the_mean_over_all_that_is_random(
    rest: float, sigma: float, output_mu: float
) -> None:
    slow = by_definition(rest, sigma, output_mu)
    assert profile(rest, sigma, output_mu, 2) == pytest.approx(slow, rel=1e-4, abs=1e-13)


def published_delta(epsilon: float, ridge: float, sigma: float) -> float:
    """δ(ε) for two classes and an exact minimum, in closed form (Redberg et al. 2023)."""
    mech = ObjectivePerturbation(ridge, sigma)
    s = 1 / sigma
    rest = epsilon - mech.determinant_cost
    h = rest - s**2 / 2
    if h >= 0:
        return 2 * gdp_delta(rest, s)
    return -math.expm1(h) + 2 * math.exp(h) * gdp_delta(s**2 / 2, s)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("ridge", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("sigma", [0.4, 1.5, 6.0])
def test_without_a_last_step_it_is_the_published_closed_form(
    epsilon: float, ridge: float, sigma: float
) -> None:
    found = ObjectivePerturbation(ridge, sigma).delta(epsilon)
    assert found == pytest.approx(published_delta(epsilon, ridge, sigma), rel=1e-9, abs=1e-300)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [3, 8])
def test_the_softmax_profile_is_the_mean_over_draws(classes: int) -> None:
    rng = np.random.default_rng(7)
    sigma, m, rest = 1.2, 0.3, 2.5
    z = rng.standard_normal((2_000_000, classes))
    lead = np.maximum(z[:, 1:].max(1) - z[:, 0], 0)
    loss = 1 / sigma**2 + lead / sigma + m**2 / 2 + m * rng.standard_normal(len(z))
    drawn = np.maximum(-np.expm1(rest - loss), 0)
    error = drawn.std() / np.sqrt(len(z))
    assert abs(profile(rest, sigma, m, classes) - drawn.mean()) < 5 * error


@pytest.mark.parametrize("m", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("classes", [3, 10])
def test_the_tail_of_the_lead_is_its_integral(m: float, classes: int) -> None:
    def integrand(z: float) -> float:
        return float(norm.pdf(z) * -np.expm1((classes - 1) * norm.logcdf(z + m)))

    slow = quad(integrand, -40, 12, points=[-m, -m / 2], epsabs=0, limit=200)[0]
    assert np.exp(log_tail_of_lead(np.array([m]), classes))[0] == pytest.approx(slow, rel=1e-7)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("order", [1.5, 2.0, 4.0])
def test_renyi_divergence_is_the_moment_of_drawn_losses(classes: int, order: float) -> None:
    rng = np.random.default_rng(11)
    mech = ObjectivePerturbation(1.0, 3.0, classes, output_mu=0.2)
    z = rng.standard_normal((1_000_000, classes))
    v = np.abs(z[:, 0]) if classes == 2 else np.maximum(z[:, 1:].max(1) - z[:, 0], 0)
    last = 0.2**2 / 2 + 0.2 * rng.standard_normal(len(z))
    loss = mech.determinant_cost + mech.lipschitz**2 / 18 + v / 3 + last
    moments = np.exp((order - 1) * loss)
    drawn = np.log(moments.mean()) / (order - 1)
    error = moments.std() / moments.mean() / np.sqrt(len(z)) / (order - 1)
    assert abs(mech.rdp(order) - drawn) < 5 * error


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
def test_epsilon_by_renyi_is_above_the_profile_but_not_by_much(classes: int) -> None:
    for epsilon in (0.5, 3.0, 8.0):
        bound = calibrate(epsilon, DELTA, classes).rdp_epsilon(DELTA)
        assert epsilon < bound < 1.2 * epsilon


@pytest.mark.parametrize("classes", [2, 3, 30])
def test_the_line_that_composes_is_above_all_renyi_divergences(classes: int) -> None:
    mech = calibrate(3.0, DELTA, classes)
    xi, rho = mech.zcdp()
    above = [xi + rho * order - mech.rdp(order) for order in (1.001, 1.5, 3.0, 10.0, 50.0)]
    assert min(above) >= -1e-9
    assert above[0] < 1e-3  # touched at α → 1


def test_more_classes_need_little_more_noise() -> None:
    """One-against-the-rest would need √K times as much."""
    two_hundred, three = (least_sigma(3.0, DELTA, classes) for classes in (200, 3))
    assert 1 < two_hundred / three < 1.25
