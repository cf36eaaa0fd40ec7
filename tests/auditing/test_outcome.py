"""Guesses from scores: the extremes, ties without regard to coins, every look paid for."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dpfp_ray.auditing.audit import Settings, power_warning
from dpfp_ray.auditing.canaries import flip_coins
from dpfp_ray.auditing.outcome import (
    AUDIT,
    audit_outcome,
    claim_of,
    could_refute,
    count_correct,
    guess_grid,
    keep,
    one_run_epsilon,
    one_run_gdp,
    read_begun,
    warning_of,
)
from dpfp_ray.plan.plan import Plan
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


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_begun(tmp_path) == {}
    keep(tmp_path, FACTS)
    assert FACTS.items() <= read_begun(tmp_path).items()


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
