"""Method `objpert` from plan to head."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dpfp_ray.methods import objpert
from dpfp_ray.methods.parts.one_release import Seen, bounded
from dpfp_ray.methods.parts.perturbed_minimum import Objective, with_bias
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.statement import statement
from dpfp_ray.system.errors import UserError
from tests.support.one_release import make_table


def make_plan(records: int, classes: int = 2, **changes: Any) -> Plan:
    plan = Plan(method="objpert", representation="mean", **changes)
    return plan.bind(records=records, classes=classes)


def test_a_plan_is_on_budget_by_its_own_profile_and_above_it_by_renyi() -> None:
    plan = make_plan(67_349, epsilon=3.0)
    spent = accounting.epsilons(accounting.mechanism(plan, noise_multiplier(plan)), plan.delta or 0)
    assert spent["pld"] is not None
    assert spent["rdp"] is not None
    assert 2.9999 < spent["pld"] <= 3.0 < spent["rdp"] < 3.3
    assert spent["gdp"] is None


def test_half_of_the_noise_is_stated_as_more_than_the_budget() -> None:
    plan = make_plan(1000, epsilon=3.0)
    half = accounting.mechanism(plan, noise_multiplier(plan) / 2)
    spent = accounting.epsilon(half, plan.delta or 0, "pld")
    assert spent is not None
    assert spent > 5


def test_accountants_that_cannot_calibrate_it_are_refused() -> None:
    with pytest.raises(UserError, match="use pld"):
        Plan(method="objpert", accountant="rdp")


def test_the_statement_says_what_epsilon_rests_on() -> None:
    plan = make_plan(1000)
    facts = statement(plan, noise_multiplier(plan))
    assert facts["guarantee"] == "proved"
    assert "own profile" in facts["accountants"]["pld"]["rests_on"]
    assert not any("labels" in text for text in facts["not_protected"])


@pytest.mark.parametrize("classes", [2, 3])
def test_it_learns_what_can_be_learnt(classes: int) -> None:
    train, dev = make_table(6000, classes=classes), make_table(1000, classes=classes, seed=1)
    plan = make_plan(6000, classes)
    theta = objpert.release(plan, noise_multiplier(plan), train, classes, seed=1)
    head = objpert.head(theta)
    guessed = np.argmax(bounded(dev.h, plan) @ head.weight.T + head.bias, axis=1)
    assert theta.size == objpert.coordinates(train.width, classes)
    assert np.mean(guessed == dev.labels) > (0.85 if classes == 2 else 0.75)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
def test_releases_carry_the_sigma_and_lambda_that_are_accounted_for(classes: int) -> None:
    """Halve either between plan and release, and b, recovered from releases, has another size."""
    table = make_table(12, width=3, classes=classes)
    plan = make_plan(12, classes, epsilon=2.0, delta=1e-4)
    sigma = noise_multiplier(plan)
    ridge = accounting.own_profile(plan).ridge
    zero = np.zeros((4, 1 if classes == 2 else classes))
    plain = Objective(with_bias(bounded(table.h, plan)), table.labels, classes, ridge, zero)
    thetas = [objpert.release(plan, sigma, table, classes, seed) for seed in range(300)]
    b = np.array([-plain.gradient(theta)[0] for theta in thetas])
    assert abs(b.var() / sigma**2 - 1) < 5 * np.sqrt(2 / b.size)


def test_the_same_release_again_is_the_same_and_any_other_has_other_noise() -> None:
    table = make_table(50, width=3)
    plan = make_plan(50)
    sigma = noise_multiplier(plan)

    def noise(plan: Plan, table: RepresentationTable, sigma: float, seed: int = 1) -> Any:
        theta = objpert.release(plan, sigma, table, 2, seed)
        own = objpert.accounted(plan, sigma)
        x = with_bias(bounded(table.h, plan))
        b = -Objective(x, table.labels, 2, own.ridge, np.zeros((4, 1))).gradient(theta)[0]
        return b / sigma

    first = noise(plan, table, sigma)
    objpert._releases.known.clear()
    np.testing.assert_array_equal(noise(plan, table, sigma), first)
    less = dataclasses.replace(table, labels=1 - table.labels)
    others = [
        noise(plan, less, sigma),
        noise(plan, table, 2 * sigma),
        noise(plan, table, sigma, seed=2),
        noise(make_plan(50, scaling="clip", clip=2.0), table, sigma),
        noise(make_plan(50, epsilon=2.9), table, sigma),
    ]
    for other in others:
        assert np.abs(other - first).min() > 1e-3


def test_noise_for_other_classes_is_refused() -> None:
    plan = make_plan(50, classes=2)
    with pytest.raises(ValueError, match="calibrated for 2 classes, not for 3"):
        objpert.release(plan, noise_multiplier(plan), make_table(50, classes=3), 3, seed=1)


@pytest.mark.parametrize("start", ["zero", "words"])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_audit_score_finds_canaries_when_there_is_little_noise(
    classes: int, start: str
) -> None:
    rng = np.random.default_rng(0)
    others, canaries = make_table(40, 20, classes), make_table(16, 20, classes, seed=3)
    # Wrongly labelled, as audits' canaries are: one that is fitted well has hardly a gradient.
    canaries = dataclasses.replace(canaries, labels=(canaries.labels + 1) % classes)
    members = rng.random(16) < 0.5
    table = RepresentationTable(
        np.concatenate([others.h, canaries.h[members]]),
        np.concatenate([others.labels, canaries.labels[members]]),
        "audited",
        words=make_table(12, 20, classes, seed=5),
    )
    plan = make_plan(56, classes, epsilon=300.0, start=start)
    sigma = noise_multiplier(plan)
    places = np.arange(40, 40 + members.sum())
    released = objpert.release(plan, sigma, table, classes, 1)
    seen = Seen(plan, sigma, classes, released, table, places, canaries, None, others)
    scores = objpert.released_gradient(seen)
    assert np.mean(scores[members][:, None] > scores[~members]) > 0.9
