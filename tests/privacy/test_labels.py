import numpy as np
import pytest

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.accounting import gdp_delta, gdp_epsilon, joint_delta, joint_epsilon, joint_mu
from dpfp_ray.privacy.calibration import noise_multiplier


def naive_delta(eps: float, mu: float, label_epsilon: float, classes: int) -> float:
    """∫ max(0, p − e^ε q) over the label said and a fine grid of the noisy coordinate."""
    x = np.linspace(-12, 12 + mu, 200_001)
    p = np.exp(-((x - mu) ** 2) / 2) / np.sqrt(2 * np.pi)
    q = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    r = 1 / (np.exp(label_epsilon) + classes - 1)
    mine, theirs = np.full(classes, r), np.full(classes, r)
    mine[0] = theirs[1] = 1 - (classes - 1) * r
    parts = [np.maximum(0, a * p - np.exp(eps) * b * q) for a, b in zip(mine, theirs, strict=True)]
    return float(np.trapezoid(np.sum(parts, axis=0), x))


@pytest.mark.parametrize(
    ("eps", "mu", "share"), [(1.0, 0.7, 0.3), (3.0, 1.0, 1.5), (0.5, 2.0, 2.0)]
)
def test_the_joint_curve_is_exact_for_two_classes_and_a_bound_for_more(
    eps: float, mu: float, share: float
) -> None:
    found = joint_delta(eps, mu, share)
    assert found == pytest.approx(naive_delta(eps, mu, share, 2), rel=1e-6)
    for classes in (3, 10):
        assert naive_delta(eps, mu, share, classes) <= found


def test_together_costs_less_than_the_sum_and_more_than_either() -> None:
    mu, share, delta = 1.0, 1.0, 1e-5
    text = gdp_epsilon(mu, delta)
    assert max(text, share) < joint_epsilon(mu, share, delta) < text + share
    assert joint_delta(joint_epsilon(mu, share, delta), mu, share) == pytest.approx(delta, rel=1e-6)


def test_without_label_noise_to_pay_for_it_is_the_gaussian() -> None:
    assert joint_delta(1.0, 0.8, 1e-12) == pytest.approx(gdp_delta(1.0, 0.8), rel=1e-6)


def test_calibration_spends_the_whole_budget_and_no_more() -> None:
    for share in (0.1, 1.0, 2.9):
        plan = Plan(mode="release_once", epsilon=3.0, label_epsilon=share).bind(records=5000)
        sigma = noise_multiplier(plan)
        assert plan.delta is not None
        spent = accounting.epsilons(accounting.mechanism(plan, sigma), plan.delta)
        assert spent["pld"] is not None
        assert 2.99 < spent["pld"] <= 3.0
        assert spent["rdp"] is None
        assert sigma == pytest.approx(1 / joint_mu(3.0, share, plan.delta), rel=1e-6)
    with pytest.raises(ValueError, match="leaves nothing"):
        joint_mu(1.0, 1.0, 1e-5)
