"""`ridge: auto` is chosen from the release alone, and is nearly the best that could be."""

from dataclasses import replace

import numpy as np
import pytest

from dpfp_ray.methods import moments
from dpfp_ray.methods.parts.one_release import (
    RIDGES,
    SHARE,
    ClassStatistics,
    choose_ridge,
    discriminant,
    two_views,
)
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.loop import solve
from dpfp_ray.training.prepare import Data


def flat(known: ClassStatistics) -> np.ndarray:
    upper = np.triu_indices(known.second.shape[0])
    return np.concatenate([known.counts, known.sums.ravel(), known.second[upper]])


def test_two_views_have_independent_noises_of_the_sizes_that_they_state() -> None:
    rng, sigma, width = np.random.default_rng(0), 2.0, 2
    truth = np.zeros(moments.coordinates(width, 2))
    first, second, stated = [], [], []
    for _ in range(2500):
        noisy = truth + sigma * rng.standard_normal(len(truth))
        known = moments.unflatten(noisy, width, 2, sigma)
        a, b = two_views(known, rng)
        first.append(flat(a))
        second.append(flat(b))
        stated = [(v.count_std, v.sum_var[0] ** 0.5, v.second_std) for v in (a, b)]
    one, other = np.array(first), np.array(second)
    for view, (count_std, sum_std, entry_std) in zip((one, other), stated, strict=True):
        sizes = view.std(0)
        expected = [count_std] * 2 + [sum_std] * 4 + [2**0.5 * entry_std, entry_std]
        np.testing.assert_allclose(sizes[:8], expected, rtol=0.1)  # seven standard errors
    mixed = np.corrcoef(one.T, other.T)[: one.shape[1], one.shape[1] :]
    assert np.abs(mixed).max() < 0.12  # six standard errors; without W it would be 1
    assert stated[0][0] ** 2 / stated[1][0] ** 2 == pytest.approx(SHARE**2)


def gaussians(records: int, width: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two classes whose spread is far from even, in rows of norm 1."""
    labels = np.arange(records) % 2
    spread = np.geomspace(3, 0.05, width)
    rows = rng.standard_normal((records, width)) * spread
    rows[:, -width // 2 :] += 0.06 * (2 * labels[:, None] - 1)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), labels


@pytest.mark.parametrize("sigma", [0.3, 1.0, 10.0])
def test_the_choice_is_nearly_as_good_as_the_best(sigma: float) -> None:
    rng = np.random.default_rng(1)
    rows, labels = gaussians(6000, 40, rng)
    train, test = slice(0, 3000), slice(3000, None)
    u, y = rows[train], labels[train]
    member = np.eye(2)[y]
    exact = moments.flatten(member.sum(0), member.T @ u, u.T @ u)
    chosen, fixed = [], []
    for _ in range(5):
        noisy = exact + sigma * rng.standard_normal(len(exact))
        known = moments.unflatten(noisy, 40, 2, sigma)

        def accuracy(ridge: float, known: ClassStatistics = known) -> float:
            head = discriminant(known, ridge, 0.01)
            answers = (rows[test] @ head.weight.T + head.bias).argmax(1)
            return float(np.mean(answers == labels[test]))

        fixed.append([accuracy(ridge) for ridge in RIDGES])
        chosen.append(accuracy(choose_ridge(known, 0.01, rng)))
    per_ridge = np.mean(fixed, axis=0)
    assert np.mean(chosen) > per_ridge.max() - 0.03
    assert np.mean(chosen) > per_ridge.min()


def test_the_head_follows_from_the_release_without_any_record() -> None:
    """Post-processing: no table of records is there to be read."""
    plan = Plan(method="dpfp", mode="moments", ridge="auto", records=100)
    rng = np.random.default_rng(2)
    noisy = 50 + rng.standard_normal(moments.coordinates(4, 2))
    known = moments.unflatten(noisy, 4, 2, 1.0)
    nothing = Data(None, {})  # type: ignore[arg-type]
    head, ridge = solve(plan, known, nothing, np.random.default_rng(3))
    again, same = solve(plan, known, nothing, np.random.default_rng(3))
    assert ridge == same
    assert ridge in RIDGES
    np.testing.assert_array_equal(head.weight, again.weight)
    by_hand, _ = solve(replace(plan, ridge=ridge), known, nothing, rng)
    np.testing.assert_array_equal(head.weight, by_hand.weight)


def test_auto_is_for_methods_that_have_a_ridge() -> None:
    assert make_plan({"method": "dpfp", "mode": "moments", "ridge": "auto"}).ridge == "auto"
    assert make_plan({"method": "dpfp", "mode": "moments", "ridge": "1"}).ridge == 1.0
    with pytest.raises(UserError, match="ridge is 'best'; give a number"):
        make_plan({"method": "dpfp", "mode": "moments", "ridge": "best"})
    with pytest.raises(UserError, match="ridge is auto, but dpsgd does not use it"):
        make_plan({"method": "dpsgd", "ridge": "auto"})
