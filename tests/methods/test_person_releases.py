"""Methods of one release where the unit is a person: how far one person can move what is released,
and that it has the noise for it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpfp_ray.methods import moments, objpert, release_once
from dpfp_ray.methods.parts.one_release import bounded, release_id
from dpfp_ray.methods.parts.perturbed_minimum import Objective, with_bias
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.accounting import keep_probability
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.objective_perturbation import (
    ObjectivePerturbation,
    calibrate,
    mean_of_v,
    profile,
)
from tests.support.one_release import make_table, measured_epsilon

SIZES = (1, 2, 50, 7, 1, 13)
Floats = NDArray[np.float64]


def plan_for(mode: str, persons: int, **changes: Any) -> Plan:
    method = "objpert" if mode == "objpert" else "dpfp"
    mode = "paper" if mode == "objpert" else mode
    changes = {"user_column": "author", "representation": "mean", **changes}
    return Plan(method=method, mode=mode, **changes).bind(records=persons, classes=2)


def person_table(seed: int = 0, adversarial: bool = False, classes: int = 2) -> RepresentationTable:
    persons = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    table = make_table(len(persons), classes=classes, seed=seed)
    h, labels = table.h, table.labels
    if adversarial:  # all rows of a person are one row, under one label: nothing cancels
        h, labels = h[persons], labels[persons]
    return replace(table, h=h, labels=labels, key=f"persons {seed} {adversarial}", persons=persons)


def less(table: RepresentationTable, person: int) -> RepresentationTable:
    rows = np.flatnonzero(table.persons != person)
    assert table.persons is not None
    return RepresentationTable(
        table.h[rows], table.labels[rows], f"{table.key} less {person}", persons=table.persons[rows]
    )


# --- moments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["unit", "clip"])
@pytest.mark.parametrize("adversarial", [False, True])
def test_no_person_moves_the_moments_by_more_than_1(adversarial: bool, scaling: str) -> None:
    plan = plan_for("moments", len(SIZES), scaling=scaling)
    moved = []
    for seed in range(5):
        table = person_table(seed, adversarial)
        whole = moments.flatten(*moments.sums_of(plan, table, 2))
        for person in range(len(SIZES)):
            rest = moments.flatten(*moments.sums_of(plan, less(table, person), 2))
            moved.append(np.linalg.norm(whole - rest))
    assert max(moved) <= 1 + 1e-9
    assert max(moved) > 0.999  # attained: nothing is given away


def test_a_person_counts_at_least_as_much_as_the_mean_of_their_rows() -> None:
    table = person_table()
    assert table.persons is not None
    weights = moments.person_weights(plan_for("moments", len(SIZES)), table)
    assert weights is not None
    sizes = np.bincount(table.persons)[table.persons]
    assert (weights >= 1 / sizes - 1e-12).all()
    assert (weights[sizes == 1] == 1).all()
    assert weights[sizes == 50].min() > 1.5 / 50


@pytest.mark.parametrize("mode", ["moments", "release_once"])
def test_persons_of_one_row_are_records(mode: str) -> None:
    table = make_table(40)
    plan = plan_for(mode, 40)
    release = {"moments": moments, "release_once": release_once}[mode].release
    as_persons = release(plan, 0.0, replace(table, persons=np.arange(40)), 2, 1)
    as_records = release(plan, 0.0, table, 2, 1)
    np.testing.assert_allclose(as_persons.sums, as_records.sums, rtol=1e-5)
    np.testing.assert_allclose(as_persons.second, as_records.second, atol=1e-5)


def test_other_groups_are_another_release() -> None:
    table, plan = person_table(), plan_for("moments", len(SIZES))
    assert table.persons is not None
    other = replace(table, persons=table.persons[::-1].copy())
    assert release_id(plan, 1.0, table, 5) != release_id(plan, 1.0, other, 5)
    assert release_id(plan, 1.0, replace(table, persons=None), 5) != release_id(plan, 1.0, table, 5)


def losses_of(mode: str, sigma: float, runs: int) -> tuple[Floats, Floats]:
    """Scores of releases with and without a person of 50 equal rows, the best linear test."""
    table = person_table(adversarial=True)
    plan = plan_for(mode, len(SIZES))
    assert table.persons is not None
    mine = table.persons == 2
    if mode == "moments":
        worlds = [table, less(table, 2)]
        sums = [moments.flatten(*moments.sums_of(plan, one, 2)) for one in worlds]
        towards = sums[0] - sums[1]
        rng = np.random.default_rng(4)
        found = [
            np.array([(s + sigma * rng.standard_normal(len(s))) @ towards for _ in range(runs)])
            for s in sums
        ]
        return found[0], found[1]
    absent = replace(table, h=np.where(mine[:, None], 0, table.h), key="absent")
    u = bounded(table.h, plan)[mine]
    found = []
    for one in (table, absent):
        scores = []
        for seed in range(runs):
            z = np.concatenate([z for z, _ in release_once.noisy_rows(plan, sigma, one, 2, seed)])
            scores.append(np.sum(z[mine] * u))
        found.append(np.array(scores))
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["moments", "release_once"])
def test_half_of_the_noise_would_show(mode: str) -> None:
    """Measured ε of one person with 50 records: within the budget, and beyond it at σ/2."""
    plan = plan_for(mode, len(SIZES), epsilon=1.0, delta=0.01)
    sigma = noise_multiplier(plan)
    runs = 6000 if mode == "moments" else 1000
    p, q = losses_of(mode, sigma, runs)
    assert measured_epsilon(p, q, 0.01) <= 1.0
    p, q = losses_of(mode, sigma / 2, runs)
    assert measured_epsilon(p, q, 0.01) > 1.0


def test_rows_of_a_person_have_the_noise_of_one_release() -> None:
    """Each of m rows: √m σ. So all of them together move by at most 1/σ in units of their noise."""
    plan, sigma = plan_for("release_once", len(SIZES)), 3.0
    table = person_table()
    assert table.persons is not None
    wide = replace(table, h=np.tile(table.h, (1, 200)), key="wide")
    u = bounded(wide.h, plan)
    z = np.concatenate([z for z, _ in release_once.noisy_rows(plan, sigma, wide, 2, 7)])
    for person, size in enumerate(SIZES):
        own = table.persons == person
        assert np.std((z - u)[own]) == pytest.approx(sigma * np.sqrt(size), rel=0.1)
        moved = np.sqrt(np.sum(np.sum(u[own] ** 2, axis=1) / (size * sigma**2)))
        assert moved <= 1 / sigma * (1 + 1e-6)


def test_statistics_of_released_rows_are_unbiased_for_weighted_rows() -> None:
    table, plan, sigma = person_table(), plan_for("release_once", len(SIZES)), 0.5
    assert table.persons is not None
    exact = release_once.release(plan, 0.0, table, 2, 0)
    many = [release_once.release(plan, sigma, table, 2, seed) for seed in range(1, 400)]
    sums = np.array([one.sums for one in many])
    second = np.array([one.second for one in many])
    error = np.sqrt(many[0].sum_var / len(many))[:, None]
    assert (np.abs(sums.mean(0) - exact.sums) < 6 * error).all()
    assert np.abs(second.mean(0) - exact.second).max() < 6 * many[0].second_std / np.sqrt(200)
    np.testing.assert_allclose(sums.var(0).mean(1), many[0].sum_var, rtol=0.2)


def label_table(size: int, copies: int, label: int, length: float) -> RepresentationTable:
    """`copies` persons with `size` rows each, all alike: so many looks at one person."""
    rows = size * copies
    h = np.zeros((rows, 2), np.float32)
    h[:, 0] = length
    labels = np.full(rows, label)
    persons = np.repeat(np.arange(copies), size)
    return RepresentationTable(h, labels, f"{label} {length}", persons=persons)


@pytest.mark.parametrize(("factor", "caught"), [(1.0, False), (0.5, True)])
@pytest.mark.parametrize("size", [1, 2, 50])
def test_all_texts_and_labels_of_a_person_together_stay_below_epsilon(
    size: int, factor: float, caught: bool
) -> None:
    """All texts vanish and all labels flip: the score is the likelihood ratio of all m rows."""
    epsilon, delta, share, copies = 1.5, 1e-2, 0.5, 40_000 // size
    plan = plan_for("release_once", copies, epsilon=epsilon, delta=delta, label_epsilon=share)
    sigma = factor * noise_multiplier(plan)

    def scores(table: RepresentationTable) -> Floats:
        found = []
        for z, said in release_once.noisy_rows(plan, sigma, table, 2, seed=11):
            text = z[:, 0] / (size * sigma**2)
            found.append(text + np.where(said == 1, share, -share) / size)
        return np.concatenate(found).reshape(copies, size).sum(1)

    here, there = label_table(size, copies, 1, 1.0), label_table(size, copies, 0, 0.0)
    found = measured_epsilon(scores(here), scores(there), delta)
    if size < 50:  # 800 looks at 50 rows bound little from below; they must still not pass ε
        assert (found > epsilon) == caught, found
    elif not caught:
        assert found <= epsilon


@pytest.mark.parametrize("size", [2, 7, 50])
def test_the_labels_of_a_person_together_are_worth_no_more_than_one(size: int) -> None:
    """Exactly, without draws: δ(ε) of m responses with ε_L/m, summed over how many were kept."""
    share = 2.0
    keep = float(keep_probability(share / size, 2))
    kept = np.arange(size + 1)
    mine = stats.binom.pmf(kept, size, keep)
    theirs = stats.binom.pmf(kept, size, 1 - keep)
    for eps in np.linspace(0, 3, 13):
        together = np.maximum(mine - np.exp(eps) * theirs, 0).sum()
        one = max(keep_probability(share, 2) - np.exp(eps) * (1 - keep_probability(share, 2)), 0)
        assert together <= one + 1e-12


def test_statistics_with_randomised_labels_of_persons_are_unbiased() -> None:
    table, sigma = person_table(classes=3), 0.2
    plan = plan_for("release_once", len(SIZES), label_epsilon=2.5, epsilon=8.0)
    exact = release_once.release(replace(plan, label_epsilon=None), 0.0, table, 3, 0)
    known = [release_once.release(plan, sigma, table, 3, seed) for seed in range(1500)]
    for name in ("counts", "sums", "second"):
        values = np.stack([getattr(one, name) for one in known])
        error = values.std(0) / np.sqrt(len(known))
        assert np.all(np.abs(values.mean(0) - getattr(exact, name)) < 5 * error + 1e-3), name
    counts = np.stack([one.counts for one in known])
    stated = np.mean([one.count_std for one in known])
    assert counts.std(0).max() == pytest.approx(stated, rel=0.1)
    assert stated > 1  # 50 labels with 2.5/50 each say next to nothing, and that is known


# --- objective perturbation ----------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_no_persons_loss_has_a_longer_gradient_than_one_records(classes: int) -> None:
    rng = np.random.default_rng(1)
    limit = 1.0 if classes == 2 else np.sqrt(2)
    for seed in range(10):
        table = person_table(seed, adversarial=seed % 2 == 0, classes=classes)
        plan = plan_for("objpert", len(SIZES))
        assert table.persons is not None
        for person in range(len(SIZES)):
            rows = np.flatnonzero(table.persons == person)
            own = replace(
                table, h=table.h[rows], labels=table.labels[rows], persons=table.persons[rows]
            )
            theta = 20 * rng.standard_normal((table.width + 1, 1 if classes == 2 else classes))
            x = with_bias(bounded(own.h, plan))
            shares = objpert.shares(own)
            assert shares is not None
            part = Objective(x, own.labels, classes, 0.0, np.zeros_like(theta), shares)
            assert np.linalg.norm(part.gradient(theta)[0]) <= limit
            assert np.sum(x.T**2 @ shares) <= 1 + 1e-6  # so tr ∇²ℓ is at most β, or 1 − 1/K


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("rows", [1, 2, 20])
@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_the_tail_that_is_accounted_for_is_above_every_persons(
    rows: int, classes: int, alike: float
) -> None:
    """W σ = mean over rows of what b says along x: drawn, for rows that are alike or not."""
    rng = np.random.default_rng(8)
    x = alike * rng.standard_normal(30) / 4 + rng.standard_normal((rows, 30))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    b = rng.standard_normal((10_000, 30, 1 if classes == 2 else classes))
    along = np.einsum("ndc,rd->nrc", b, x)
    if classes == 2:
        w = np.maximum(along[:, :, 0], 0).mean(1)
    else:
        w = np.maximum(along[:, :, 1:].max(2) - along[:, :, 0], 0).mean(1)
    from dpfp_ray.privacy.objective_perturbation import _tail_of_mean

    for u in np.linspace(0, 4, 17):
        bound = float(_tail_of_mean(np.array([u]), 1.0, classes)[0])
        assert (w > u).mean() <= bound + 5 * np.sqrt(bound / len(w))
    assert w.mean() <= mean_of_v(classes) * 1.02


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
def test_persons_cost_a_little_more_noise_and_the_budget_is_met(
    epsilon: float, classes: int
) -> None:
    delta = 1e-5
    records, persons = (calibrate(epsilon, delta, classes, flag) for flag in (False, True))
    assert persons.delta(epsilon) <= delta
    assert profile(epsilon, persons.sigma / 2, 0.0, classes, True) > delta
    assert persons.rdp_epsilon(delta) < 1.5 * epsilon
    weaker = ObjectivePerturbation(
        records.ridge, records.sigma, classes, records.output_mu, persons=True
    )
    assert weaker.epsilon(delta) >= records.epsilon(delta) * (1 - 1e-6)
    assert weaker.epsilon(delta) < 1.5 * epsilon


def test_a_release_for_persons_needs_their_calibration() -> None:
    table = person_table()
    plan = plan_for("objpert", len(SIZES))
    theta = objpert.release(plan, noise_multiplier(plan), table, 2, 1)
    assert theta.shape == (table.width + 1, 1)
    with pytest.raises(ValueError, match="either for records or for persons"):
        objpert.release(plan, noise_multiplier(plan), replace(table, persons=None), 2, 1)
