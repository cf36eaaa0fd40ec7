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
    lipschitz,
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
    loss = mech.determinant_cost + lipschitz(mech.classes) ** 2 / 18 + v / 3 + last
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


# --- persons, from first principles ---------------------------------------------------------------
#
# θ* is where ∇J = 0, so that b = −∇(J without b), and θ* has the density
# φ_σ(∇(J without b)) |det ∇²J|. With it, δ(ε) is an integral over a grid of θ: none of the
# inequalities of the proof is used. `push` is what all other records add to the gradient, as many
# records with short x do; it can make the person's own gradient as long as it gets.

Rows = tuple[np.ndarray, np.ndarray]  # x of shape (rows, d), and the labels


def person_terms(theta: np.ndarray, rows: Rows, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian of a person's mean loss, at each θ."""
    x, y = rows
    if classes == 2:
        sign = 2.0 * y - 1
        p = 1 / (1 + np.exp(theta @ x.T * sign))
        gradient = -(p * sign) @ x / len(x)
        return gradient, np.einsum("nk,ka,kb->nab", p * (1 - p), x, x) / len(x)
    scores = np.einsum("ncd,kd->nkc", theta.reshape(len(theta), classes, -1), x)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    gradient = np.einsum("nkc,kd->ncd", p - np.eye(classes)[y], x)
    spread = np.einsum("nkc,ce->nkce", p, np.eye(classes)) - np.einsum("nkc,nke->nkce", p, p)
    hessian = np.einsum("nkce,ka,kb->ncaeb", spread, x, x)
    size = theta.shape[1]
    return gradient.reshape(-1, size) / len(x), hessian.reshape(-1, size, size) / len(x)


def exact_delta(
    mech: ObjectivePerturbation, rows: Rows, push: np.ndarray, epsilon: float, points: int
) -> float:
    """The larger δ(ε) of the two directions, the person added and removed, with τ = 0."""
    size, sigma = len(push), mech.sigma
    axis = np.linspace(-1, 1, points) * (8 * sigma + 1.5) / mech.ridge
    theta = np.stack(np.meshgrid(*[axis] * size, indexing="ij"), -1).reshape(-1, size)
    theta = theta - push / mech.ridge
    gradient, hessian = person_terms(theta, rows, mech.classes)

    def density(share: float) -> np.ndarray:
        whole = mech.ridge * theta + push + share * gradient
        volume = np.linalg.slogdet(mech.ridge * np.eye(size) + share * hessian)[1]
        logs = volume - (whole**2).sum(1) / (2 * sigma**2)
        masses: np.ndarray = np.exp(logs) * ((axis[1] - axis[0]) / (sigma * math.tau**0.5)) ** size
        assert masses.sum() == pytest.approx(1, abs=1e-6)
        return masses

    p, q = density(1.0), density(0.0)
    return max(
        float(np.maximum(one - math.exp(epsilon) * other, 0).sum())
        for one, other in ((p, q), (q, p))
    )


def fan(count: int, angle: float) -> np.ndarray:
    """Unit vectors in the plane."""
    angles = np.linspace(0, angle, count)
    return np.stack([np.cos(angles), np.sin(angles)], 1)


@pytest.mark.parametrize("records", [1, 2, 3, 5])
@pytest.mark.parametrize(("ridge", "sigma"), [(1.0, 1.2), (0.6, 0.8), (0.3, 2.0)])
def test_the_delta_of_a_person_is_above_the_exact_one_for_two_classes(
    ridge: float, sigma: float, records: int
) -> None:
    mech = ObjectivePerturbation(ridge, sigma, persons=True)
    for angle, mixed in ((0.5, False), (3.0, False), (1.0, True)):
        rows = fan(records, angle), (np.arange(records) % 2 if mixed else np.ones(records, int))
        for push in (np.zeros(2), 3 * rows[0].mean(0)):
            for epsilon in (0.5, 2.0):
                assert exact_delta(mech, rows, push, epsilon, 201) < mech.delta(epsilon)


@pytest.mark.parametrize("records", [1, 2, 3, 5])
def test_the_delta_of_a_person_is_above_the_exact_one_for_three_classes(records: int) -> None:
    mech = ObjectivePerturbation(0.6, 0.8, 3, persons=True)
    x = np.ones((records, 1))
    for y in (np.zeros(records, int), np.arange(records) % 3):
        for push in (np.zeros(3), np.array([4.0, -4.0, 0.0])):
            assert exact_delta(mech, (x, y), push, 2.0, 51) < mech.delta(2.0)


@pytest.mark.parametrize("records", [1, 2, 3, 5])
@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0])
def test_the_delta_of_a_person_is_close_to_that_of_the_worst_one(
    epsilon: float, records: int
) -> None:
    """In ε, less than the determinant's a and the mean of V that the proof may give away."""
    mech = ObjectivePerturbation(0.6, 0.8, persons=True)
    rows = np.ones((records, 1)), np.ones(records, int)
    worst = max(
        exact_delta(mech, rows, np.array([push]), epsilon, 4001) for push in (0.0, 1.0, 2.0, 4.0)
    )
    given_away = mech.determinant_cost + 1 / math.sqrt(2 * math.pi) / mech.sigma
    assert epsilon < mech.epsilon(worst) < epsilon + 1.1 * given_away


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_the_determinant_of_a_person_with_many_rows_is_paid_for(classes: int) -> None:
    """Rows at right angles move it by more than one row can."""
    ridge, size = 0.4, 8
    mech = ObjectivePerturbation(ridge, 1.0, classes, persons=True)
    theta = np.zeros((1, size if classes == 2 else classes * size))
    _, hessian = person_terms(theta, (np.eye(size), np.zeros(size, int)), classes)
    change = np.linalg.slogdet(np.eye(theta.shape[1]) + hessian[0] / ridge)[1]
    assert change <= mech.determinant_cost
    assert classes == 2 or change > ObjectivePerturbation(ridge, 1.0, classes).determinant_cost


@pytest.mark.parametrize("classes", [2, 3, 6])
@pytest.mark.parametrize("rest", [0.3, 2.0, 5.0])
def test_the_profile_of_a_person_is_the_integral_of_its_tail_bound(
    rest: float, classes: int
) -> None:
    """V is at most its mean and a Gaussian of deviation L/σ, with probability 1 below that mean."""
    sigma, m = 0.9, 0.2
    reach = 1.0 if classes == 2 else math.sqrt(2)
    z = np.random.default_rng(3).standard_normal((400_000, classes))
    lead = z[:, 0] if classes == 2 else z[:, 1:].max(1) - z[:, 0]
    mean = np.maximum(lead, 0).mean() / sigma
    e = rest - (reach / sigma) ** 2 / 2

    def integrand(u: float) -> float:
        tail = 1.0 if u < mean else norm.cdf((mean - u) * sigma / reach)
        return float(tail * math.exp(e - u) * norm.cdf((u - e) / m - m / 2))

    slow = gdp_delta(e, m) + quad(integrand, 0, 60, points=[mean, max(e, 0)], limit=400)[0]
    assert profile(rest, sigma, m, classes, persons=True) == pytest.approx(slow, rel=1e-2)
