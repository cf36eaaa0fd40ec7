"""What a run has spent: from nothing to its budget, never less than before, never above."""

import pytest

from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import Spending, noise_multiplier


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


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_spending_grows_with_the_steps(plan: Plan, spending: Spending, accountant: str) -> None:
    stops = [1, 2, 10, plan.steps // 2, plan.steps - 1, plan.steps]
    spent = [spending.spent(stop)[accountant] or 0.0 for stop in stops]
    assert spent[0] > 0
    assert spent == sorted(spent)
    assert spent[-1] > 1.5 * spent[0]


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


def test_two_accounts_of_one_plan_agree(plan: Plan, spending: Spending) -> None:
    """There is no running total that a resumed run could lose."""
    assert Spending(plan, spending.noise_multiplier).spent(50) == spending.spent(50)


def test_a_method_without_a_budget_spends_nothing_to_speak_of() -> None:
    spending = Spending(Plan(method="non_private", records=2000), 0.0)
    assert spending.spent(10) == {}
    assert spending.at_most(10) is None
