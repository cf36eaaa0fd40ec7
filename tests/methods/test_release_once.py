import numpy as np
import pytest

from dpfp_ray.methods import release_once
from dpfp_ray.methods.parts.one_release import bounded_rows, discriminant, release_id
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.privacy.accounting import keep_probability, randomise
from dpfp_ray.privacy.calibration import noise_multiplier
from tests.support.one_release import Floats, make_plan, make_table, measured_epsilon


def bounded(h: Floats, scaling: str, clip: float) -> Floats:
    plan = make_plan("release_once", len(h), scaling=scaling, clip=clip)
    table = RepresentationTable(np.asarray(h, np.float32), np.zeros(len(h), np.int64), "")
    return np.concatenate([u for u, _ in bounded_rows(table, plan)])


@pytest.mark.parametrize(("scaling", "clip"), [("unit", 1.0), ("clip", 1.0), ("clip", 7.5)])
def test_replacing_a_record_moves_its_row_alone_and_by_at_most_the_sensitivity(
    scaling: str, clip: float
) -> None:
    rng = np.random.default_rng(1)
    zero_out, replace = 0.0, 0.0
    for _ in range(200):
        rows, width = rng.integers(1, 8), rng.integers(1, 9)
        h = rng.standard_normal((rows, width)) * 10 ** rng.uniform(-3, 3, (rows, 1))
        place = rng.integers(rows)
        nothing, other = h.copy(), h.copy()
        nothing[place] = 0
        other[place] = -h[place] if rng.random() < 0.5 else rng.standard_normal(width) * 100
        u = bounded(h, scaling, clip)
        for neighbour, limit in ((nothing, 1.0), (other, 2.0)):
            moved = u - bounded(neighbour, scaling, clip)
            assert not moved[np.arange(rows) != place].any()
            assert np.linalg.norm(moved) <= limit + 1e-9
        zero_out = max(zero_out, float(np.linalg.norm(u - bounded(nothing, scaling, clip))))
        replace = max(replace, float(np.linalg.norm(u - bounded(other, scaling, clip))))
    assert zero_out >= 1 - 1e-6  # both bounds are attained
    assert replace >= 2 - 1e-6


RUNS = 40_000


def many(row: list[float], label: int, key: str) -> RepresentationTable:
    """Every record is noised on its own, so many records are as many runs of the mechanism."""
    return RepresentationTable(np.tile(np.float32(row), (RUNS, 1)), np.full(RUNS, label), key)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize(("factor", "caught"), [(1.0, False), (0.5, True)])
def test_measured_privacy_loss_stays_below_epsilon(
    adjacency: str, factor: float, caught: bool
) -> None:
    epsilon, delta = 1.0, 1e-3
    here = many([1.0, 0.0], 0, "here")
    there = many([0.0, 0.0] if adjacency == "zero_out" else [-1.0, 0.0], 0, "there")
    plan = make_plan("release_once", RUNS, epsilon=epsilon, delta=delta, adjacency=adjacency)
    sigma = factor * noise_multiplier(plan)

    def scores(table: RepresentationTable) -> Floats:
        rows = release_once.noisy_rows(plan, sigma, table, 2, seed=11)
        return np.concatenate([z[:, 0] for z, _ in rows])

    found = measured_epsilon(scores(here), scores(there), delta)
    assert (found > epsilon) == caught, found


@pytest.mark.parametrize(("factor", "caught"), [(1.0, False), (0.5, True)])
def test_text_and_label_together_stay_below_epsilon(factor: float, caught: bool) -> None:
    """The record's text vanishes and its label flips: the score is the joint likelihood ratio."""
    epsilon, delta, share = 1.5, 1e-3, 0.7
    here, there = many([1.0, 0.0], 1, "here"), many([0.0, 0.0], 0, "there")
    plan = make_plan("release_once", RUNS, epsilon=epsilon, delta=delta, label_epsilon=share)
    sigma = factor * noise_multiplier(plan)

    def scores(table: RepresentationTable) -> Floats:
        rows = release_once.noisy_rows(plan, sigma, table, 2, seed=11)
        return np.concatenate(
            [z[:, 0] / sigma**2 + np.where(said == 1, share, -share) for z, said in rows]
        )

    found = measured_epsilon(scores(here), scores(there), delta)
    assert (found > epsilon) == caught, found


@pytest.mark.slow
def test_statistics_are_unbiased() -> None:
    table = make_table(300, width=4, classes=3)
    for label_epsilon in (None, 1.0):
        plan = make_plan("release_once", 300, label_epsilon=label_epsilon)
        exact = release_once.summarise(bounded_rows(table, plan), 0.0, None, 4, 3)
        known = [release_once.release(plan, 0.8, table, 3, seed) for seed in range(1500)]
        for name in ("counts", "sums", "second"):
            values = np.stack([getattr(one, name) for one in known])
            error = values.std(0) / np.sqrt(len(known))
            assert np.all(np.abs(values.mean(0) - getattr(exact, name)) < 5 * error + 1e-3), name
        sums = np.stack([one.sums for one in known])
        assert sums.var(0).mean(1) == pytest.approx(known[0].sum_var, rel=0.25)
        off_diagonal = np.stack([one.second[0, 1] for one in known])
        assert off_diagonal.std() == pytest.approx(known[0].second_std, rel=0.2)


@pytest.mark.parametrize("classes", [2, 5])
def test_randomised_response_keeps_and_spreads_as_it_should(classes: int) -> None:
    labels = np.full(100_000, 1)
    said = randomise(labels, 1.3, classes, np.random.default_rng(0))
    shares = np.bincount(said, minlength=classes) / len(said)
    keep = keep_probability(1.3, classes)
    assert shares[1] == pytest.approx(keep, abs=0.01)
    np.testing.assert_allclose(np.delete(shares, 1), (1 - keep) / (classes - 1), atol=0.01)
    assert keep / ((1 - keep) / (classes - 1)) == pytest.approx(np.exp(1.3))


def test_rows_of_the_same_release_are_the_same_and_others_are_independent() -> None:
    table = make_table(30)
    plan = make_plan("release_once", 30)

    def noise(sigma: float, of: RepresentationTable, seed: int, **changes: float) -> Floats:
        changed = make_plan("release_once", 30, **changes)
        z = np.concatenate([z for z, _ in release_once.noisy_rows(changed, sigma, of, 2, seed)])
        return (z - np.concatenate([u for u, _ in bounded_rows(of, changed)])) / sigma

    first = noise(2.0, table, 7)
    np.testing.assert_array_equal(first, noise(2.0, table, 7, ridge=9.0))
    other = RepresentationTable(table.h[::-1].copy(), table.labels, "other")
    for another in (noise(3.0, table, 7), noise(2.0, other, 7), noise(2.0, table, 8)):
        assert np.abs(first - another).max() > 0.1
    assert release_id(plan, 2.0, table, 7) != release_id(plan, 2.0, table, 8)


def test_the_head_copes_with_rows_that_are_nearly_all_noise() -> None:
    """Clean rows are far shorter than noised ones; a head fitted to the latter would not do."""
    train = make_table(20_000, width=30, classes=3)
    dev = make_table(1000, width=30, classes=3, seed=4)
    plan = make_plan("release_once", 20_000)
    known = release_once.release(plan, 1.0, train, 3, seed=2)
    head = discriminant(known, 2.0, 0.01)
    u = np.concatenate([u for u, _ in bounded_rows(dev, plan)])
    assert np.mean((u @ head.weight.T + head.bias).argmax(1) == dev.labels) > 0.9


def test_public_rows_help_where_noise_hides_the_difference() -> None:
    rng = np.random.default_rng(3)
    width, rows = 200, 4000
    scale = np.where(np.arange(width) < 3, 1.0, 0.02)
    labels = rng.integers(0, 2, rows)
    h = scale * rng.standard_normal((rows, width))
    h[:, 0] += np.where(labels == 1, 0.8, -0.8)
    train = RepresentationTable(h[:3000].astype(np.float32), labels[:3000], "train")
    dev = RepresentationTable(h[3000:].astype(np.float32), labels[3000:], "dev")
    plan = make_plan("release_once", 3000)
    u = np.concatenate([u for u, _ in bounded_rows(dev, plan)])
    public = np.cov(u.T)
    scores: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(5):
        known = release_once.release(plan, 8.0, train, 2, seed)
        for helped in (True, False):
            head = discriminant(known, 2.0, 0.01, public if helped else None)
            right = (u @ head.weight.T + head.bias).argmax(1) == dev.labels
            scores[helped].append(float(np.mean(right)))
    assert np.mean(scores[True]) > np.mean(scores[False]) + 0.05
