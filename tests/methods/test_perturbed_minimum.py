"""The release of `objpert`: the minimum is one, and its exact privacy loss keeps what is stated.

θ* ↔ b is one to one, so θ* has the density φ(b(θ); σ) |det ∇²J(θ)| with b(θ) = −Σ∇ℓ − λθ. In one or
two dimensions that can be put on a grid, and δ(ε) between neighbours be read off: no bound, no
simulation.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax
from scipy.stats import norm

from dpfp_ray.methods.parts.perturbed_minimum import (
    Objective,
    columns,
    linear_head,
    minimise,
    perturbed_minimum,
    with_bias,
)
from dpfp_ray.privacy.objective_perturbation import ObjectivePerturbation, calibrate

Floats = NDArray[np.float64]
Records = list[tuple[tuple[float, ...], int]]


def made_up(rows: int, width: int, classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(5)
    u = rng.standard_normal((rows, width))
    labels = (u[:, 0] + 0.5 * rng.standard_normal(rows) > 0).astype(np.int64)
    labels += (classes > 2) * (u[:, 1] > 0.3) * (classes - 2)
    return with_bias(u / np.linalg.norm(u, axis=1, keepdims=True)), labels


def naive_objective(theta: Floats, o: Objective) -> float:
    scores = o.x.astype(float) @ theta
    if o.classes == 2:
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
    fit = -log_softmax(scores, axis=1)[np.arange(len(scores)), o.labels].sum()
    return float(fit + o.ridge / 2 * np.sum(theta**2) + np.sum(o.b * theta))


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_the_minimum_is_the_one_a_plain_optimizer_finds(classes: int) -> None:
    x, labels = made_up(80, 3, classes)
    b = np.random.default_rng(1).standard_normal((4, columns(classes)))
    o = Objective(x, labels, classes, 0.7, b)
    slow = minimize(lambda t: naive_objective(t.reshape(b.shape), o), np.zeros(b.size), tol=1e-10)
    np.testing.assert_allclose(minimise(o, 1e-8), slow.x.reshape(b.shape), atol=2e-4)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_gradient_ends_below_tau_wherever_b_pulls(classes: int, scale: float) -> None:
    x, labels = made_up(200, 4, classes)
    b = scale * np.random.default_rng(2).standard_normal((5, columns(classes)))
    o = Objective(x, labels, classes, 0.3, b)
    theta = minimise(o, 1e-8)
    at = np.zeros_like(theta)
    for index in np.ndindex(theta.shape):  # central differences of J, to their own precision
        away = np.zeros_like(theta)
        away[index] = 1e-4
        at[index] = (naive_objective(theta + away, o) - naive_objective(theta - away, o)) / 2e-4
    assert np.linalg.norm(o.gradient(theta)[0]) <= 1e-8
    assert np.linalg.norm(at) < 1e-5 * max(scale, 1)


def test_rows_that_are_nearly_one_row_need_no_luck_with_rounding() -> None:
    """XᵀX in fp32 then has eigenvalues below −λ."""
    rng = np.random.default_rng(3)
    u = rng.standard_normal(300) + 1e-5 * rng.standard_normal((8000, 300))
    x = with_bias(u / np.linalg.norm(u, axis=1, keepdims=True))
    o = Objective(x, rng.integers(0, 2, 8000), 2, 1e-5, 1e-3 * rng.standard_normal((301, 1)))
    assert np.linalg.eigvalsh(0.25 * o.gram())[0] < -o.ridge
    assert np.linalg.norm(o.gradient(minimise(o, 1e-3))[0]) <= 1e-3


def test_without_records_the_minimum_is_b_over_lambda() -> None:
    o = Objective(np.zeros((0, 3), np.float32), np.zeros(0, np.int64), 2, 0.5, np.ones((3, 1)))
    np.testing.assert_allclose(minimise(o, 1e-10), -2 * np.ones((3, 1)))


def test_no_row_is_longer_than_one() -> None:
    u = np.random.default_rng(0).standard_normal((5000, 7))
    x = with_bias(u / np.linalg.norm(u, axis=1, keepdims=True)).astype(np.float64)
    assert 0.99999 < np.linalg.norm(x, axis=1).max() <= 1


def test_a_row_that_is_longer_than_one_is_refused() -> None:
    x = np.array([[0.9, 0.5]], np.float32)
    mech = calibrate(1.0, 1e-3)
    with pytest.raises(ValueError, match="longer than 1"):
        perturbed_minimum(x, np.array([0]), mech, np.random.default_rng(0))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_head_scores_rows_as_theta_does(classes: int) -> None:
    rng = np.random.default_rng(3)
    theta = rng.standard_normal((5, columns(classes)))
    u = rng.standard_normal((6, 4)) / 10
    weight, bias = linear_head(theta)
    scores = u @ weight.T + bias
    expected = with_bias(u) @ theta
    if classes == 2:
        scores = scores[:, 1:] - scores[:, :1]
    np.testing.assert_allclose(scores, expected, atol=1e-6)


# What is run is what is accounted for


@pytest.mark.parametrize("classes", [2, 3])
def test_the_release_has_the_sigma_and_the_lambda_of_its_mechanism(classes: int) -> None:
    """b = −Σ∇ℓ − λθ, computed from releases: halve σ or λ on the way, and its variance is off."""
    x, labels = made_up(4, 2, classes)
    mech = calibrate(3.0, 1e-4, classes)
    zero = np.zeros((3, columns(classes)))
    plain = Objective(x, labels, classes, mech.ridge, zero)
    found = []
    for seed in range(500):
        theta = perturbed_minimum(x, labels, mech, np.random.default_rng(seed))
        found.append(-plain.gradient(theta)[0])
    values = np.array(found)
    error = np.sqrt(2 / values.size)
    assert abs(values.var() / mech.sigma**2 - 1) < 5 * error
    assert abs(values.mean() / mech.sigma) < 5 / np.sqrt(values.size)


def test_the_last_step_adds_the_output_noise_of_its_mechanism() -> None:
    x, labels = made_up(4, 2, 2)
    mech = calibrate(3.0, 1e-4)
    added = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        b = mech.sigma * rng.standard_normal((3, 1))
        before = minimise(Objective(x, labels, 2, mech.ridge, b), mech.tau)
        added.append(perturbed_minimum(x, labels, mech, np.random.default_rng(seed)) - before)
    # 2τ/λ is the sensitivity, and m/s = 1e-3 the share: σ_out = 2τ σ/(1e-3 λ)
    expected = 2e-8 * mech.sigma / (1e-3 * mech.ridge)
    assert abs(np.var(added) / expected**2 - 1) < 5 * np.sqrt(2 / 900)


# The exact privacy loss of neighbours


def log_density(theta: Floats, records: Records, mech: ObjectivePerturbation) -> Floats:
    """Of θ* at every point (N, d, columns)."""
    points, width, cols = theta.shape
    gradient = mech.ridge * theta
    hessian = np.tile(mech.ridge * np.eye(width * cols), (points, 1, 1))
    for row, label in records:
        x = np.array(row)
        scores = np.einsum("d,ndc->nc", x, theta)
        if mech.classes == 2:
            p = 1 / (1 + np.exp(-scores))
            residual, inner = p - label, (p * (1 - p))[:, :, None]
        else:
            p = np.exp(log_softmax(scores, axis=1))
            residual = p - np.eye(mech.classes)[label]
            inner = p[:, :, None] * np.eye(mech.classes) - p[:, :, None] * p[:, None, :]
        gradient = gradient + x[None, :, None] * residual[:, None, :]
        outer = np.einsum("d,e,nab->ndaeb", x, x, inner)
        hessian += outer.reshape(points, width * cols, width * cols)
    normal = norm.logpdf(gradient.reshape(points, -1), scale=mech.sigma).sum(1)
    return np.asarray(normal + np.linalg.slogdet(hessian)[1])


def grid(dimensions: int, mech: ObjectivePerturbation) -> tuple[Floats, float]:
    reach = 6 * mech.sigma / mech.ridge + 6
    count = {1: 20_001, 2: 400}[dimensions]
    axis = np.linspace(-reach, reach, count)
    points = np.stack(np.meshgrid(*[axis] * dimensions, indexing="ij"), -1)
    return points.reshape(-1, dimensions), float((axis[1] - axis[0]) ** dimensions)


def exact_delta(
    epsilon: float, records: Records, extra: Records, mech: ObjectivePerturbation
) -> float:
    """The larger of both directions between `records` and `records` with `extra`."""
    width = len(extra[0][0])
    points, cell = grid(width * (mech.classes - 1), mech)
    theta = points.reshape(-1, width, mech.classes - 1)
    shared = 0.0
    if mech.classes > 2:
        # No record says anything of the mean column: it is −mean b/λ in both worlds, independent of
        # the rest, and its density (at 0) is taken out.
        contrasts = np.linalg.svd(np.ones((1, mech.classes)))[2][1:]
        theta = theta @ contrasts
        shared = width * (np.log(mech.ridge) + norm.logpdf(0, scale=mech.sigma))
    without = np.exp(log_density(theta, records, mech) - shared) * cell
    having = np.exp(log_density(theta, records + extra, mech) - shared) * cell
    assert abs(without.sum() - 1) < 2e-3, "the grid misses a part of the density"
    assert abs(having.sum() - 1) < 2e-3
    e = np.exp(epsilon)
    one = float(np.maximum(without - e * having, 0).sum())
    return max(one, float(np.maximum(having - e * without, 0).sum()))


LINE: list[Records] = [
    [],
    [((1.0,), 0)] * 3,
    [((1.0,), 0)] * 25,
    [((1.0,), 1)] * 25,
    [((1.0,), 0), ((1.0,), 1)] * 4,
    [((0.4,), 1), ((-0.7,), 0)],
]
EXTRA_LINE: list[Records] = [[((1.0,), 1)], [((-1.0,), 1)], [((1.0,), 0)], [((0.5,), 1)]]


@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 1e-2), (1.0, 1e-4), (3.0, 1e-5), (8.0, 1e-5)])
def test_no_neighbours_on_a_line_are_told_apart_better_than_stated(
    epsilon: float, delta: float
) -> None:
    mech = calibrate(epsilon, delta)
    found = [exact_delta(epsilon, r, e, mech) for r, e in itertools.product(LINE, EXTRA_LINE)]
    assert 1e-3 * delta < max(found) <= delta
    # At every other ε too.
    for other in (0.3 * epsilon, 0.7 * epsilon, 1.3 * epsilon):
        for records, extra in itertools.product(LINE, EXTRA_LINE[:1]):
            assert exact_delta(other, records, extra, mech) <= mech.delta(other)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-4), (3.0, 1e-5), (8.0, 1e-5)])
def test_half_of_sigma_is_caught_on_a_line(epsilon: float, delta: float) -> None:
    mech = calibrate(epsilon, delta)
    half = dataclasses.replace(mech, sigma=mech.sigma / 2)
    assert max(exact_delta(epsilon, r, EXTRA_LINE[0], half) for r in LINE) > 10 * delta


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_neighbours_in_the_plane_keep_to_it_and_half_of_sigma_does_not(factor: float) -> None:
    epsilon, delta = 1.0, 1e-3
    mech = calibrate(epsilon, delta)
    run = dataclasses.replace(mech, sigma=factor * mech.sigma)
    bases: list[Records] = [[], [((0.8, 0.6), 0)] * 6, [((0.6, 0.8), 0), ((-0.8, 0.6), 1)] * 3]
    extras: list[Records] = [[((0.8, 0.6), 1)], [((0.0, 1.0), 0)]]
    worst = max(exact_delta(epsilon, r, e, run) for r, e in itertools.product(bases, extras))
    assert worst <= delta if factor == 1 else worst > 3 * delta


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_three_classes_keep_to_the_joint_bound_and_half_of_sigma_does_not(factor: float) -> None:
    epsilon, delta = 4.0, 1e-4
    mech = calibrate(epsilon, delta, 3)
    run = dataclasses.replace(mech, sigma=factor * mech.sigma)
    bases: list[Records] = [[], [((1.0,), 0)] * 25, [((1.0,), 0), ((1.0,), 1)] * 8]
    worst = max(exact_delta(epsilon, r, [((1.0,), 2)], run) for r in bases)
    assert worst <= delta if factor == 1 else worst > 3 * delta


@pytest.mark.parametrize("classes", [3, 6])
def test_no_softmax_record_changes_the_determinant_by_more_than_stated(classes: int) -> None:
    rng = np.random.default_rng(4)
    mech = ObjectivePerturbation(0.4, 1.0, classes)
    for trial in range(200):
        theta = rng.standard_normal((1, 2, classes)) * (0.0 if trial == 0 else 2.0)
        records = [((0.6, 0.8), 0)] * int(rng.integers(0, 3))
        flat = dataclasses.replace(mech, sigma=1e9)  # only the determinants differ
        change = log_density(theta, [*records, ((1.0, 0.0), 1)], flat) - log_density(
            theta, records, flat
        )
        assert -1e-9 <= change[0] <= mech.determinant_cost + 1e-9
    assert mech.determinant_cost > 0


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_solver_that_errs_on_purpose_is_covered_by_the_last_step(factor: float) -> None:
    """Off by τ/λ to one side with the record, to the other without: ‖∇J‖ = τ allows that."""
    mech = ObjectivePerturbation(50.0, 400.0, output_mu=1.5, tau=60.0)
    points, cell = grid(1, mech)
    theta = points[:, None, :]
    shift, std = mech.tau / mech.ridge, factor * mech.output_sigma
    size = round(8 * std / cell)
    kernel = norm.pdf(np.arange(-size, size + 1) * cell, scale=std) * cell

    def released(records: Records, error: float) -> Floats:
        density = np.exp(log_density(theta - error, records, mech)) * cell
        return np.convolve(density, kernel, mode="full")

    # With b spread over far more than its sensitivity, who errs how shows in ∇J's own error alone:
    # the auditor knows b, that is θ* less the error, so the shift is seen against the kernel.
    shifted = norm.pdf(points[:, 0] - 2 * shift, scale=std) * cell
    still = norm.pdf(points[:, 0], scale=std) * cell
    epsilon = 2.0
    with_b_known = float(np.maximum(shifted - np.exp(epsilon) * still, 0).sum())
    with_b_hidden = np.maximum(
        released([((1.0,), 1)], shift) - np.exp(epsilon) * released([], -shift), 0
    ).sum()
    assert with_b_hidden <= with_b_known
    assert (with_b_known <= mech.delta(epsilon)) == (factor == 1)
