"""An audit that can refute nothing is known before it trains, and so is what would help."""

import re
from dataclasses import replace

import pytest

from dpfp_ray.audit.audited_run import Settings, power_warning
from dpfp_ray.audit.claims import claim_of
from dpfp_ray.audit.power import could_refute, warning_of
from dpfp_ray.plan.plan import Plan


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


def test_nothing_helps_against_a_huge_epsilon() -> None:
    said = warning_of(Plan(records=2_000, epsilon=50.0), 500, 0.95, in_only=False)
    assert said is not None
    assert said.endswith("but a smaller ε would")


@pytest.mark.parametrize("plan", [Plan(records=20_000), Plan(method="non_private", records=2_000)])
def test_nothing_is_said_of_an_audit_with_power_or_without_a_claim(plan: Plan) -> None:
    assert power_warning(replace(plan, delta=plan.delta and 1e-6), Settings()) is None
