import numpy as np
import pytest

from dpfp_ray.methods import moments
from dpfp_ray.methods.parts.one_release import ClassStatistics, add_up, bounded_rows, discriminant
from dpfp_ray.models import representations
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.privacy.calibration import noise_multiplier
from tests.support.one_release import (
    Floats,
    make_plan,
    make_table,
    measured_epsilon,
    naive_statistics,
)


def exact_vector(h: Floats, labels: Floats, classes: int, scaling: str, clip: float) -> Floats:
    plan = make_plan("moments", len(h), scaling=scaling, clip=clip)
    table = RepresentationTable(np.asarray(h, np.float32), np.asarray(labels, np.int64), "")
    return moments.flatten(*add_up(bounded_rows(table, plan), h.shape[1], classes))


@pytest.mark.parametrize(("scaling", "clip"), [("unit", 1.0), ("clip", 1.0), ("clip", 7.5)])
def test_adding_any_record_moves_the_release_by_at_most_one(scaling: str, clip: float) -> None:
    rng = np.random.default_rng(1)
    largest = 0.0
    for _ in range(200):
        rows, width, classes = rng.integers(1, 8), rng.integers(1, 9), rng.integers(2, 5)
        h = rng.standard_normal((rows + 1, width)) * 10 ** rng.uniform(-3, 3, (rows + 1, 1))
        labels = rng.integers(0, classes, rows + 1)
        with_record = exact_vector(h, labels, classes, scaling, clip)
        without = exact_vector(h[:-1], labels[:-1], classes, scaling, clip)
        largest = max(largest, float(np.linalg.norm(with_record - without)))
        assert np.linalg.norm(with_record - without) <= 1 + 1e-9
    assert largest >= 1 - 1e-6  # the bound is attained, by every row of norm C


def test_shards_of_rows_add_up_to_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, table = make_plan("moments", 30), make_table(rows=30)
    whole = moments.sums_of(plan, table, 2)
    monkeypatch.setattr(representations, "SHARD", 7)
    for total, expected in zip(moments.sums_of(plan, table, 2), whole, strict=True):
        np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-12)


def test_shares_of_the_sensitivity_add_up_to_one() -> None:
    total = moments.COUNTS + moments.SUMS + moments.SECOND
    assert total == pytest.approx(1, abs=1e-15)


def test_svec_is_an_isometry_and_unflatten_inverts_flatten() -> None:
    rng = np.random.default_rng(2)
    counts, sums = rng.standard_normal(3), rng.standard_normal((3, 5))
    second = rng.standard_normal((5, 5))
    second = second + second.T
    vector = moments.flatten(counts, sums, second)
    expected = (
        moments.COUNTS * np.sum(counts**2)
        + moments.SUMS * np.sum(sums**2)
        + moments.SECOND * np.sum(second**2)
    )
    assert np.sum(vector**2) == pytest.approx(expected)
    back = moments.unflatten(vector, 5, 3, 1.0)
    np.testing.assert_allclose(back.counts, counts)
    np.testing.assert_allclose(back.sums, sums)
    np.testing.assert_allclose(back.second, second)
    assert len(vector) == moments.coordinates(5, 3)


def test_the_noise_is_what_the_release_says_of_it() -> None:
    table, sigma = make_table(40, width=4), 2.5
    plan = make_plan("moments", 40)
    releases = [moments.release(plan, sigma, table, 2, seed) for seed in range(3000)]
    second = np.stack([known.second for known in releases])
    assert np.std(second[:, 0, 1]) == pytest.approx(releases[0].second_std, rel=0.05)
    assert np.std(second[:, 2, 2]) == pytest.approx(np.sqrt(2) * releases[0].second_std, rel=0.05)
    assert np.var([known.sums[1, 0] for known in releases]) == pytest.approx(
        releases[0].sum_var[1], rel=0.1
    )
    assert np.std([known.counts[0] for known in releases]) == pytest.approx(
        releases[0].count_std, rel=0.05
    )
    exact = naive_statistics(
        np.concatenate([u for u, _ in bounded_rows(table, plan)]), table.labels, 2
    )
    np.testing.assert_allclose(second.mean(0), exact.second, atol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "caught"), [(1.0, False), (0.5, True)])
def test_measured_privacy_loss_stays_below_epsilon(factor: float, caught: bool) -> None:
    """Two records or one, the best test there is (the likelihood ratio), thousands of releases."""
    epsilon, delta, runs = 0.5, 0.02, 4000
    one = RepresentationTable(np.array([[1.0, 0.0]], np.float32), np.array([0]), "one")
    both = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    two = RepresentationTable(both, np.array([0, 1]), "two")
    plan = make_plan("moments", 2, epsilon=epsilon, delta=delta)
    sigma = factor * noise_multiplier(plan)
    direction = exact_vector(two.h, two.labels, 2, "unit", 1.0) - exact_vector(
        one.h, one.labels, 2, "unit", 1.0
    )

    def score(table: RepresentationTable, seed: int) -> float:
        known = moments.release(plan, sigma, table, 2, seed)
        return float(direction @ moments.flatten(known.counts, known.sums, known.second))

    p = np.array([score(two, seed) for seed in range(runs)])
    q = np.array([score(one, seed) for seed in range(runs, 2 * runs)])
    found = measured_epsilon(p, q, delta)
    assert (found > epsilon) == caught, found


def test_the_same_release_again_is_the_same_and_another_is_independent() -> None:
    table = make_table(50)
    plan = make_plan("moments", 50)
    first = moments.release(plan, 2.0, table, 2, seed=5)
    again = moments.release(make_plan("moments", 50, ridge=3.0), 2.0, table, 2, seed=5)
    np.testing.assert_array_equal(first.second, again.second)
    exact = moments.release(plan, 0.0, table, 2, seed=5)
    noise = [(first.sums - exact.sums).ravel() / 2]
    # Another σ, clip or record must not get the same noise: differences would be noise-free.
    noise.append((moments.release(plan, 4.0, table, 2, seed=5).sums - exact.sums).ravel() / 4)
    other = RepresentationTable(table.h, 1 - table.labels, table.key)
    bare = moments.release(plan, 0.0, other, 2, seed=5)
    noise.append((moments.release(plan, 2.0, other, 2, seed=5).sums - bare.sums).ravel() / 2)
    noise.append((moments.release(plan, 2.0, table, 2, seed=6).sums - exact.sums).ravel() / 2)
    for number, mine in enumerate(noise):
        for theirs in noise[:number]:
            assert np.abs(mine - theirs).max() > 0.1


def test_without_noise_the_head_is_lda() -> None:
    table = make_table(4000, width=5, classes=3)
    u = np.asarray(table.h, float) / 10
    head = discriminant(naive_statistics(u, table.labels, 3), ridge=0.0, shrinkage=0.0)
    means = np.stack([u[table.labels == c].mean(0) for c in range(3)])
    centred = u - means[table.labels]
    covariance = centred.T @ centred / len(u)
    covariance += 5 / 4000 * np.trace(covariance) / 5 * np.eye(5)
    inverse = np.linalg.inv(covariance)
    priors = np.bincount(table.labels) / len(u)
    scores = u @ inverse @ means.T - np.einsum("ck,kl,cl->c", means, inverse, means) / 2
    expected = scores + np.log(priors)
    logits = u @ head.weight.T + head.bias
    shift = (logits - expected)[:, :1]
    spread = np.abs(expected).max()
    np.testing.assert_allclose(logits - expected, np.repeat(shift, 3, 1), atol=0.01 * spread)
    assert np.mean(logits.argmax(1) == expected.argmax(1)) > 0.995


def test_a_class_without_records_is_never_predicted_and_breaks_nothing() -> None:
    table = make_table(500, classes=2)
    for sigma in (0.0, 3.0):
        known = moments.release(make_plan("moments", 500), sigma, table, 4, seed=1)
        head = discriminant(known, 0.5, 0.01)
        u = np.concatenate([u for u, _ in bounded_rows(table, make_plan("moments", 500))])
        logits = u @ head.weight.T + head.bias
        assert np.isfinite(logits).all()
        assert set(logits.argmax(1)) <= {0, 1}
        assert np.mean(logits.argmax(1) == table.labels) > 0.8


def test_nothing_but_noise_still_gives_a_head() -> None:
    known = moments.release(make_plan("moments", 5), 1e6, make_table(5), 2, seed=1)
    head = discriminant(known, 0.5, 0.01)
    assert np.isfinite(head.weight).all()
    assert np.isfinite(head.bias).all()
    empty = ClassStatistics(np.zeros(2), np.zeros((2, 3)), np.zeros((3, 3)), 1.0, np.ones(2), 1.0)
    np.testing.assert_array_equal(discriminant(empty, 0.5, 0.01).weight, 0)


def test_logits_are_calibrated_on_clean_rows() -> None:
    """Mean log-loss is close to the best that any rescaling of the same logits reaches."""
    train = make_table(20_000, width=20, apart=0.25)
    dev = make_table(4000, width=20, seed=5, apart=0.25)
    plan = make_plan("moments", 20_000)
    clean = np.concatenate([u for u, _ in bounded_rows(dev, plan)])

    def loss(logits: Floats) -> float:
        top = logits.max(1, keepdims=True)
        norm = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
        return float(np.mean(norm - logits[np.arange(len(dev)), dev.labels]))

    for sigma in (0.5, 5.0, 50.0):
        head = discriminant(moments.release(plan, sigma, train, 2, seed=3), 0.5, 0.01)
        logits = clean @ head.weight.T + head.bias
        best = min(loss(scale * logits) for scale in np.geomspace(0.2, 5, 30))
        assert loss(logits) < best + 0.02
