"""The smallest noise that meets the budget: golden numbers, and the same promise everywhere."""

import math
from typing import Any

import pytest

from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.privacy import accounting, calibration, pld
from dpfp_ray.privacy.accounting import Mechanism, epsilon
from dpfp_ray.privacy.calibration import Spending, noise_multiplier, smallest_noise
from dpfp_ray.system.errors import UserError

SST2 = 67_349


def sst2(batch: int, micro: int, **changes: Any) -> Plan:
    return Plan(batch_size=batch, micro_batches=micro, records=SST2, **changes)


# Golden numbers


@pytest.mark.parametrize(
    ("records", "batch", "micro", "eps", "sigma"),
    [
        (67_349, 32, 32, 1.73, 0.3461),
        (67_349, 32, 1, 1.73, 0.4523),
        (67_349, 1024, 1, 1.73, 0.7824),
        (104_374, 32, 32, 2.00, 0.3333),
        (240_942, 32, 32, 2.52, 0.3135),
        (384_348, 32, 32, 2.52, 0.3072),
        (67_349, 32, 32, 4.33, 0.3167),
    ],
)
def test_golden_noise_by_gdp(
    records: int, batch: int, micro: int, eps: float, sigma: float
) -> None:
    plan = Plan(
        batch_size=batch, micro_batches=micro, epsilon=eps, accountant="gdp", records=records
    )
    assert noise_multiplier(plan) == pytest.approx(sigma, abs=0.001)


@pytest.mark.parametrize(
    ("batch", "micro", "sigma", "design"),
    [(32, 32, 0.3989, 0.400), (32, 1, 0.5065, 0.511), (1024, 1, 0.7645, 0.765)],
)
def test_golden_noise_by_pld(batch: int, micro: int, sigma: float, design: float) -> None:
    """`sigma` is where dp-accounting's own PLD gives 3.000 at an interval of 1e-4.

    The design's rounder numbers are on budget too, and up to 1% larger than need be.
    """
    plan = sst2(batch, micro, epsilon=3)
    found = noise_multiplier(plan)
    assert found == pytest.approx(sigma, abs=0.001)
    assert found <= design * 1.001
    assert design <= found * 1.01


@pytest.mark.parametrize(("eps", "sigma"), [(1, 3.80), (3, 1.41), (8, 0.61)])
@pytest.mark.parametrize("accountant", ["gdp", "pld"])
def test_golden_noise_of_one_exact_release(eps: float, sigma: float, accountant: str) -> None:
    found = smallest_noise(1.0, 1, "zero_out", eps, 1 / (2 * SST2), accountant)
    assert found == pytest.approx(sigma, abs=0.005)


# The promise


CASES: list[tuple[float, int, str, float, float, str]] = [
    (1 / SST2, 202_016, "zero_out", 3.0, 7.4e-6, "gdp"),
    (1 / SST2, 202_016, "zero_out", 3.0, 7.4e-6, "rdp"),
    (1 / SST2, 202_016, "zero_out", 3.0, 7.4e-6, "pld"),
    (1 / SST2, 202_016, "replace_one", 3.0, 7.4e-6, "gdp"),
    (1 / SST2, 202_016, "replace_one", 3.0, 7.4e-6, "pld"),
    (1 / SST2, 202_016, "zero_out", 0.01, 7.4e-6, "pld"),
    (1 / SST2, 202_016, "zero_out", 100.0, 7.4e-6, "pld"),
    (1 / SST2, 202_016, "zero_out", 3.0, 1e-12, "pld"),
    (1024 / SST2, 197, "add_remove", 1.0, 1e-5, "rdp"),
    (1024 / SST2, 65_770, "add_remove", 3.0, 7.4e-6, "pld"),  # 1000 epochs
    (0.2, 15, "add_remove", 3.0, 0.01, "pld"),  # D = 50, B = 10
    (0.02, 15_000, "replace_one", 1.0, 0.01, "pld"),
    (1e-3, 1, "zero_out", 0.5, 1e-6, "pld"),
    (1e-6, 10_000_000, "zero_out", 2.0, 1e-8, "pld"),
    (0.5, 1000, "add_remove", 20.0, 1e-6, "rdp"),
    (1.0, 5, "zero_out", 2.0, 1e-5, "pld"),
    (1.0, 5, "replace_one", 2.0, 1e-5, "rdp"),
    (1.0, 5, "replace_one", 2.0, 1e-5, "gdp"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_noise_is_on_budget_and_hardly_more(
    case: tuple[float, int, str, float, float, str],
) -> None:
    p, n, adjacency, budget, delta, accountant = case
    sigma = smallest_noise(*case)

    def spent(noise: float) -> float:
        found = epsilon(Mechanism(p, n, noise, adjacency), delta, accountant)
        assert found is not None
        return found

    assert spent(sigma) <= budget
    assert spent(sigma * (1 - 2e-3)) > budget


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["gdp", "rdp", "pld"])
def test_a_larger_budget_needs_less_noise(accountant: str) -> None:
    found = [noise_multiplier(sst2(1024, 1, epsilon=e, accountant=accountant)) for e in (1, 2, 8)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 3


def test_replacing_needs_more_noise_than_zeroing_out() -> None:
    assert noise_multiplier(sst2(1024, 1, adjacency="replace_one")) > noise_multiplier(
        sst2(1024, 1)
    )


def test_accountants_need_noise_in_the_order_of_their_tightness() -> None:
    gdp, rdp, pld_ = (
        noise_multiplier(sst2(32, 32, accountant=name)) for name in ("gdp", "rdp", "pld")
    )
    assert gdp < pld_ < rdp


# Plans


def test_a_method_without_noise_gets_none() -> None:
    assert noise_multiplier(Plan(method="non_private", records=100)) == 0.0


def test_an_unbound_plan_has_no_noise_yet() -> None:
    with pytest.raises(ValueError, match="not bound"):
        noise_multiplier(Plan())


def test_noise_is_relative_to_the_clip() -> None:
    assert noise_multiplier(sst2(1024, 1, clip=7.0)) == noise_multiplier(sst2(1024, 1))


# The paper's claim


def squared_ratio(eps: float) -> float:
    """σ² with M = 32 against M = 1, by the paper's own accountant."""
    many, one = (noise_multiplier(sst2(32, m, epsilon=eps, accountant="gdp")) for m in (32, 1))
    return (many / one) ** 2


def test_micro_batches_save_less_than_the_paper_says_at_its_own_budget() -> None:
    assert squared_ratio(1.73) == pytest.approx(0.59, abs=0.005)


def test_the_saving_tends_to_one_over_m_as_epsilon_tends_to_zero() -> None:
    ratios = [squared_ratio(eps) for eps in (1.73, 0.1, 0.01, 1e-4)]
    assert ratios == sorted(ratios, reverse=True)
    # In the limit of δ → 0 as well, by the formula itself: σ² = 1 / log(1 + (μ/p)²/n).
    mu = accounting.gdp_mu_of_budget(1e-6, 1e-15)
    many, one = (
        1 / math.log1p((mu / p) ** 2 / n) for p, n in ((1 / SST2, 202_016), (32 / SST2, 6313))
    )
    assert many / one == pytest.approx(1 / 32, rel=0.01)


# Bad and impossible budgets


def test_rdp_cannot_calibrate_replacement() -> None:
    with pytest.raises(UserError, match="rdp has no bound for adjacency replace_one; use pld"):
        noise_multiplier(sst2(32, 32, adjacency="replace_one", accountant="rdp"))


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_an_impossible_budget_is_refused(accountant: str) -> None:
    with pytest.raises(UserError, match="no noise up to σ/C = 1e\\+06 meets epsilon = 1e-09"):
        smallest_noise(0.5, 10_000, "zero_out", 1e-9, 1e-15, accountant)


def test_a_budget_that_any_noise_meets_gets_the_smallest() -> None:
    assert smallest_noise(1e-9, 1, "zero_out", 1.0, 0.5, "pld") == pytest.approx(
        calibration.SMALLEST
    )


# Speed


def test_calibration_is_remembered(fresh_cache: object, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    evaluate = pld.epsilon_at

    def counted(*args: Any, **named: Any) -> float:
        nonlocal calls
        calls += 1
        return evaluate(*args, **named)

    monkeypatch.setattr(pld, "epsilon_at", counted)
    first = noise_multiplier(sst2(1024, 1))
    assert 0 < calls <= 40
    calls = 0
    assert noise_multiplier(sst2(1024, 1)) == first
    assert calls == 0


# The search by itself


class Curve:
    """ε(σ) = σ^−power, and how often it was asked for."""

    def __init__(self, power: float) -> None:
        self.power = power
        self.calls = 0

    def __call__(self, sigma: float) -> float:
        self.calls += 1
        return sigma**-self.power


@pytest.mark.parametrize("power", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("start", [1e-9, 0.3, 0.99, 1.0, 1.01, 4.0, 1e9])
def test_the_search_finds_the_smallest(power: float, start: float) -> None:
    curve = Curve(power)
    found = calibration._smallest(curve, 1.0, start, step=0.1, tolerance=1e-3)
    assert 1.0 <= found <= 1.0 + 1e-3
    assert curve.calls <= 20


@pytest.mark.parametrize("edge", [0.1, 1.0, 17.0])
def test_the_search_ends_at_a_cliff(edge: float) -> None:
    found = calibration._smallest(
        lambda sigma: math.inf if sigma < edge else 0.0, 1.0, 1.0, step=0.1, tolerance=1e-3
    )
    assert edge <= found <= edge * (1 + 1e-3)


def test_the_search_ends_on_a_staircase() -> None:
    """rdp's ε is nearly constant for long stretches at small budgets."""
    found = calibration._smallest(
        lambda sigma: 2.0 ** -math.floor(math.log(sigma) * 3), 1.0, 40.0, step=0.1, tolerance=1e-3
    )
    assert found == pytest.approx(1.0, rel=1e-3)


# What a run has spent: from nothing to its budget, never less than before, never above


def make_plan(**changes: object) -> Plan:
    settings = {"batch_size": 32, "micro_batches": 8, "epochs": 2, "records": 2000}
    return Plan(method="dpfp", **{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


@pytest.fixture(scope="module")
def spending(plan: Plan) -> Spending:
    return Spending(plan, noise_multiplier(plan))


def test_nothing_is_spent_before_the_first_step(spending: Spending) -> None:
    assert spending.spent(0) == {"gdp": 0.0, "rdp": 0.0, "pld": 0.0}
    assert spending.at_most(0) == 0.0


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_the_last_step_spends_the_budget_and_no_more(accountant: str) -> None:
    plan = make_plan(accountant=accountant)
    spent = Spending(plan, noise_multiplier(plan)).spent(plan.steps)[accountant]
    assert spent is not None
    assert 3 * (1 - 0.01) < spent <= 3 * (1 + 1e-9)


def test_spent_is_the_accounting_of_the_steps_done(plan: Plan, spending: Spending) -> None:
    mechanism = accounting.Mechanism(32 / (8 * 2000), 7 * 8, spending.noise_multiplier, "zero_out")
    assert spending.spent(7) == accounting.epsilons(mechanism, 1 / 4000)


def test_what_is_shown_live_is_never_less_than_spent(plan: Plan, spending: Spending) -> None:
    for steps in (1, 12, 13, 62, 63, plan.steps - 1, plan.steps):
        shown, spent = spending.at_most(steps), spending.spent(steps)["pld"]
        assert shown is not None
        assert spent is not None
        assert shown >= spent


def test_what_is_shown_live_takes_ten_values(plan: Plan, spending: Spending) -> None:
    shown = {spending.at_most(steps) for steps in range(1, plan.steps + 1)}
    assert len(shown) == 10
    assert max(s for s in shown if s is not None) == spending.spent(plan.steps)["pld"]


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_short_runs_are_shown_to_the_step(steps: int) -> None:
    plan = make_plan(batch_size=2000, micro_batches=1, epochs=steps)
    spending = Spending(plan, 2.0)
    assert [spending.at_most(t) for t in range(1, steps + 1)] == [
        spending.spent(t)["pld"] for t in range(1, steps + 1)
    ]


def test_a_method_without_a_budget_spends_nothing_to_speak_of() -> None:
    spending = Spending(Plan(method="non_private", records=2000), 0.0)
    assert spending.spent(10) == {}
    assert spending.at_most(10) is None


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_spending_grows_with_the_steps(plan: Plan, spending: Spending, accountant: str) -> None:
    stops = [1, 2, 10, plan.steps // 2, plan.steps - 1, plan.steps]
    spent = [spending.spent(stop)[accountant] or 0.0 for stop in stops]
    assert spent[0] > 0
    assert spent == sorted(spent)
    assert spent[-1] > 1.5 * spent[0]


def test_two_accounts_of_one_plan_agree(plan: Plan, spending: Spending) -> None:
    """There is no running total that a resumed run could lose."""
    assert Spending(plan, spending.noise_multiplier).spent(50) == spending.spent(50)
