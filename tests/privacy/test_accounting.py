"""The three accountants, against golden numbers, slow twins and each other."""

import logging
import math
import warnings

import numpy as np
import pytest
from dp_accounting import rdp
from scipy import integrate, stats

from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.accounting import (
    Mechanism,
    epsilon,
    epsilons,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
    gdp_mu_of_budget,
    joint_delta,
    joint_epsilon,
    joint_mu,
    mechanism,
)
from dpfp_ray.privacy.calibration import noise_multiplier

# DESIGN.md section 7: D, B, M, σ/C, ε by gdp, rdp and pld; E = 3, δ = 1/(2D).
GOLDEN = [
    (67_349, 32, 32, 0.3461, 1.73, 7.575, 5.900),
    (67_349, 32, 1, 0.4523, 1.73, 6.023, 4.728),
    (67_349, 1024, 1, 0.7824, 1.73, 3.464, 2.806),
    (104_374, 32, 32, 0.3333, 2.00, 8.424, 6.617),
    (240_942, 32, 32, 0.3135, 2.52, 9.873, 7.890),
    (384_348, 32, 32, 0.3072, 2.52, 10.254, 8.248),
    (67_349, 32, 32, 0.3167, 4.33, 10.788, 8.545),
]


def sst2(batch: int, micro: int, sigma: float, adjacency: str = "zero_out") -> Mechanism:
    plan = Plan(batch_size=batch, micro_batches=micro, adjacency=adjacency, records=67_349)
    return mechanism(plan, sigma)


@pytest.mark.parametrize(("records", "batch", "micro", "sigma", "gdp", "rdp", "pld"), GOLDEN)
def test_golden_epsilons(
    records: int, batch: int, micro: int, sigma: float, gdp: float, rdp: float, pld: float
) -> None:
    plan = Plan(batch_size=batch, micro_batches=micro, epochs=3, records=records)
    found = epsilons(mechanism(plan, sigma), 1 / (2 * records))
    # σ is given to four digits, and by gdp ε moves by 5 to 10 times σ's relative error.
    assert found["gdp"] == pytest.approx(gdp, abs=0.01)
    assert found["rdp"] == pytest.approx(rdp, rel=0.005)
    assert found["pld"] == pytest.approx(pld, rel=0.005)


# Mechanism


def test_a_plan_releases_m_draws_a_step() -> None:
    plan = Plan(batch_size=64, micro_batches=8, records=1000)
    assert mechanism(plan, 0.5, steps=10) == Mechanism(64 / 8000, 80, 0.5, "zero_out")
    assert mechanism(plan, 0.5).n == plan.draws


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_epsilon_grows_with_steps(accountant: str) -> None:
    plan = Plan(batch_size=32, records=1000)
    spent = [epsilon(mechanism(plan, 0.6, steps), 1e-5, accountant) for steps in (1, 10, 50, 93)]
    assert spent == sorted(spent, key=lambda value: value or 0.0)
    assert len(set(spent)) == len(spent)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_epsilon_falls_with_noise(accountant: str) -> None:
    spent = [epsilon(sst2(1024, 1, sigma), 1e-5, accountant) for sigma in (0.5, 0.7, 1.0, 3.0)]
    assert spent == sorted(spent, key=lambda value: -(value or 0.0))
    assert len(set(spent)) == len(spent)


def test_epsilon_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    mech = sst2(32, 32, 0.71)
    first = epsilon(mech, 1e-5, "pld")
    monkeypatch.setattr(accounting.pld, "epsilon_at", None)
    assert epsilon(mech, 1e-5, "pld") == first


# Gaussian differential privacy


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 2.0])
def test_gdp_delta_is_the_papers_formula(mu: float, share: float) -> None:
    eps = share * (mu + mu * mu / 2)
    plain = stats.norm.cdf(-eps / mu + mu / 2) - math.exp(eps) * stats.norm.cdf(-eps / mu - mu / 2)
    assert gdp_delta(eps, mu) == pytest.approx(plain, rel=1e-9, abs=1e-14)


def test_gdp_delta_is_the_hockey_stick_of_two_gaussians() -> None:
    eps, mu = 1.3, 0.9

    def excess(x: float) -> float:
        return max(0.0, stats.norm.pdf(x, mu) - math.exp(eps) * stats.norm.pdf(x))

    assert gdp_delta(eps, mu) == pytest.approx(integrate.quad(excess, -10, 12, limit=500)[0])


@pytest.mark.parametrize("mu", [1e-6, 0.02, 0.5, 2.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_gdp_epsilon_inverts_gdp_delta(mu: float, delta: float) -> None:
    eps = gdp_epsilon(mu, delta)
    if eps == 0:
        assert gdp_delta(0, mu) <= delta
    else:
        assert gdp_delta(eps, mu) == pytest.approx(delta, rel=1e-5)


@pytest.mark.parametrize("eps", [1e-9, 0.01, 1.73, 100.0, 1e6])
@pytest.mark.parametrize("delta", [1e-300, 1e-15, 7.4e-6, 0.5, 0.999])
def test_gdp_mu_of_budget_meets_the_budget(eps: float, delta: float) -> None:
    mu = gdp_mu_of_budget(eps, delta)
    assert 0 < mu < math.inf
    assert gdp_delta(eps, mu) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("mu", [1e-300, 1e-12, 1e-3, 1.0, 1e3, 1e8, 1e99])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0, 700.0, 1e6, 1e300])
def test_gdp_delta_never_overflows(mu: float, eps: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0.0 <= gdp_delta(eps, mu) <= 1.0


@pytest.mark.parametrize("mu", [0.0, 1e-300, 1e-5, 1.0, 1e6, 1e150, math.inf])
@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.5])
def test_gdp_epsilon_never_fails(mu: float, delta: float) -> None:
    eps = gdp_epsilon(mu, delta)
    assert eps >= 0
    assert not math.isnan(eps)


@pytest.mark.parametrize("sigma", [1e-3, 0.03])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_too_little_noise_is_infinite_not_an_overflow(sigma: float, adjacency: str) -> None:
    assert epsilon(sst2(32, 32, sigma, adjacency), 1e-5, "gdp") == math.inf


def test_gdp_mu_is_the_papers_formula() -> None:
    mech = Mechanism(0.01, 500, 0.8, "zero_out")
    assert gdp_mu(mech) == pytest.approx(0.01 * math.sqrt(500 * (math.exp(1 / 0.8**2) - 1)))


def clt_mu(mech: Mechanism) -> float:
    """μ of the limit, from the per-release log-likelihood ratio by numerical integration.

    To first order in p the log ratio of P and Q at x is p (P₁ − Q₁)(x) / N(0)(x), P₁ and Q₁ being
    the distributions with the record, and the limit is its standard deviation times √n.
    """
    sigma = mech.noise_multiplier
    other = -1.0 if mech.adjacency == "replace_one" else 0.0

    def square(x: float) -> float:
        ratio = math.exp((x - 0.5) / sigma**2) - math.exp(other * (x - other / 2) / sigma**2)
        return mech.p**2 * ratio**2 * stats.norm.pdf(x, 0, sigma)

    variance = integrate.quad(square, -15 * sigma - 3, 15 * sigma + 3, limit=500, epsabs=0)[0]
    return math.sqrt(mech.n * variance)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("sigma", [0.6, 1.0, 5.0])
def test_the_limit_is_the_deviation_of_the_log_ratio(sigma: float, adjacency: str) -> None:
    mech = Mechanism(1e-3, 1000, sigma, adjacency)
    assert gdp_mu(mech) == pytest.approx(clt_mu(mech), rel=1e-6)


def test_replacing_costs_twice_as_much_as_removing_with_much_noise() -> None:
    removed, replaced = (
        gdp_mu(Mechanism(0.01, 100, 50.0, adjacency)) for adjacency in ("zero_out", "replace_one")
    )
    assert replaced == pytest.approx(2 * removed, rel=1e-3)


def test_gdp_agrees_with_pld_where_its_limit_holds() -> None:
    mech = Mechanism(0.01, 100_000, 10.0, "zero_out")
    assert epsilon(mech, 1e-5, "gdp") == pytest.approx(epsilon(mech, 1e-5, "pld"), rel=0.01)


def test_gdp_understates_at_the_papers_defaults() -> None:
    """Section 2.1 of the design: 1.73 is really 5.9."""
    found = epsilons(sst2(32, 32, 0.3461), 1 / (2 * 67_349))
    assert (found["pld"] or 0) > 3 * (found["gdp"] or 0)


# Without sampling


@pytest.mark.parametrize(("adjacency", "sensitivity"), [("zero_out", 1.0), ("replace_one", 2.0)])
def test_without_sampling_gdp_and_pld_are_exact(adjacency: str, sensitivity: float) -> None:
    mech = Mechanism(1.0, 9, 2.0, adjacency)
    exact = gdp_epsilon(sensitivity * 3 / 2, 1e-5)
    assert epsilon(mech, 1e-5, "gdp") == epsilon(mech, 1e-5, "pld") == exact


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_without_sampling_rdp_is_a_little_above(adjacency: str) -> None:
    found = epsilons(Mechanism(1.0, 9, 4.0, adjacency), 1e-5)
    assert 1.0 < (found["rdp"] or 0) / (found["pld"] or 1) < 1.15


# Rényi


def over_all_orders(mech: Mechanism, delta: float) -> float:
    """The slow twin: dp-accounting's own minimum."""
    accountant = rdp.RdpAccountant()
    with accounting.unconverged_orders_left_out():
        accountant.compose(accounting.dp_event(mech))
        return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("delta", [1e-12, 7.4e-6, 0.01])
@pytest.mark.parametrize(
    "mech",
    [
        sst2(32, 32, 0.4),
        sst2(1024, 1, 0.8),
        Mechanism(1.0, 5, 3.0, "zero_out"),
        Mechanism(0.6233707327396185, 46_641, 28.7, "zero_out"),  # orders between are inexact here
        Mechanism(1e-6, 10, 50.0, "zero_out"),  # δ alone covers it
        Mechanism(1e-5, 10, 0.05, "zero_out"),  # the smallest orders
        Mechanism(1e-3, 1, 20.0, "zero_out"),  # the largest
    ],
)
def test_rdp_is_the_smallest_over_all_orders(mech: Mechanism, delta: float) -> None:
    assert accounting.rdp_epsilon(mech, delta) == over_all_orders(mech, delta)


def test_rdp_asks_for_few_of_the_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    plain = rdp.RdpAccountant
    monkeypatch.setattr(rdp, "RdpAccountant", lambda orders: asked.extend(orders) or plain(orders))
    accounting.rdp_epsilon(sst2(32, 32, 0.4), 7.4e-6)
    assert 0 < len(asked) < len(rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS) / 3


def test_rdp_has_no_bound_for_replacement_under_sampling() -> None:
    assert epsilon(sst2(32, 32, 0.5, "replace_one"), 1e-5, "rdp") is None


@pytest.mark.parametrize(
    "mech", [sst2(32, 32, 0.4), sst2(1024, 1, 0.8), Mechanism(0.2, 50, 2.0, "zero_out")]
)
def test_rdp_is_never_below_pld(mech: Mechanism) -> None:
    assert (epsilon(mech, 1e-5, "rdp") or 0) >= (epsilon(mech, 1e-5, "pld") or 0)


@pytest.mark.parametrize(
    "mech",
    [
        Mechanism(1024 / 67_349, 197, 0.8, "add_remove"),
        Mechanism(0.1, 50, 1.5, "add_remove"),
        Mechanism(0.01, 2000, 1.0, "add_remove"),
    ],
)
def test_rdp_agrees_with_opacus(mech: Mechanism) -> None:
    from opacus.accountants import RDPAccountant

    opacus = RDPAccountant()
    opacus.history = [(mech.noise_multiplier, mech.p, mech.n)]
    assert epsilon(mech, 1e-5, "rdp") == pytest.approx(opacus.get_epsilon(1e-5), rel=0.01)


@pytest.mark.parametrize(
    "mech",
    [
        Mechanism(1024 / 67_349, 197, 0.8, "add_remove"),
        Mechanism(0.1, 50, 1.5, "add_remove"),
        Mechanism(0.01, 500, 0.7, "add_remove"),
    ],
)
def test_pld_agrees_with_opacus_prv(mech: Mechanism) -> None:
    from opacus.accountants import PRVAccountant

    opacus = PRVAccountant()
    opacus.history = [(mech.noise_multiplier, mech.p, mech.n)]
    # PRV's answer is an upper bound, `eps_error` above its own estimate.
    prv = opacus.get_epsilon(1e-5, eps_error=0.01, delta_error=1e-8)
    assert epsilon(mech, 1e-5, "pld") == pytest.approx(prv, rel=0.01)


def test_orders_left_out_are_not_the_users_business(caplog: pytest.LogCaptureFixture) -> None:
    absl = logging.getLogger("absl")
    level = absl.level
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        assert (epsilon(Mechanism(0.9, 10, 100.0, "zero_out"), 1e-5, "rdp") or 0) > 0
        assert (epsilon(Mechanism(1e-5, 10, 0.01, "zero_out"), 1e-5, "rdp") or 0) > 0
    assert not caplog.records
    assert absl.level == level


# Extremes


@pytest.mark.parametrize(("p", "n"), [(1e-8, 1000), (1e-3, 1), (0.5, 1000), (0.999, 1)])
@pytest.mark.parametrize("sigma", [0.05, 1.0, 100.0])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_no_accountant_gives_nonsense(p: float, n: int, sigma: float, adjacency: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = epsilons(Mechanism(p, n, sigma, adjacency), 1e-6)
    values = np.array([value for value in found.values() if value is not None])
    assert not np.isnan(values).any()
    assert (values >= 0).all()


# Randomised labels beside a release


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
