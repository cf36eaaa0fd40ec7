"""The minimum of a perturbed objective, to a gradient of norm τ: the one step of `objpert`.

    J(θ) = Σ ℓ(θ; x, y) + λ/2 ‖θ − θ₀‖² + ⟨b, θ⟩,     b ~ N(0, σ²I)

θ has one column for two classes (logistic loss of class 1 against class 0) and K columns for K > 2
(softmax). θ₀ is 0, or public (`methods/parts/label_words.py`): in θ − θ₀, J is the same objective
with losses whose scores are shifted by ⟨θ₀, x⟩, and the bounds of the proof hold at all scores.
Where the unit is a person, ℓ of each of their m rows counts 1/m. J is λ-strongly convex, so a point
with ‖∇J‖ ≤ τ is within τ/λ of the minimum: what is released has to have such a gradient, and this
is checked, not hoped for.

Newton's method with conjugate gradients. Steps are halved until ‖∇J‖ falls, not J: near the minimum
J changes by less than its own rounding long before ∇J is small enough. An exact step −H⁻¹∇J lowers
‖∇J‖ whenever it is short enough, so the method ends wherever it starts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.special import expit, softmax

from dpfp_ray.privacy.objective_perturbation import ObjectivePerturbation

Floats = NDArray[np.float64]
# x's last coordinate, the same for all records: its weight is the bias. Taken out of ‖x‖ ≤ 1, so a
# large one costs signal, and a small one makes λ weigh heavily on the bias.
BIAS = 0.25
# Rows are kept in fp32 and a little shorter than 1, so that rounding makes none longer.
SAFE = 1 - 1e-6
CHUNK = 8192  # rows in fp64 at once
SAMPLE = 8192  # rows, or twice the width, that stand for all of them in a preconditioner
ROUNDING = 1e-6  # of the trace of XᵀX, which bounds its eigenvalues: its errors in fp32
LEAST_ACCURACY = 1e-3  # of a Newton step: what fp32 can give
MOST_STEPS = 200


def with_bias(u: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """x = (√(1 − c²) u, c) of rows with ‖u‖ ≤ 1, so ‖x‖ ≤ 1."""
    x = np.empty((len(u), u.shape[1] + 1), np.float32)
    x[:, :-1] = SAFE * np.sqrt(1 - BIAS**2) * u
    x[:, -1] = SAFE * BIAS
    return x


def columns(classes: int) -> int:
    return 1 if classes == 2 else classes


@dataclass(frozen=True, eq=False)
class Objective:
    """J of rows `x` (n, d), ‖x‖ ≤ 1, with `labels` 0 … K−1; `b` is (d, columns)."""

    x: NDArray[np.float32]
    labels: NDArray[np.int64]
    classes: int
    ridge: float
    b: Floats
    weights: Floats | None = None  # of the rows' losses; None: all 1
    start: Floats | float = 0.0  # θ₀, public

    def gradient(self, theta: Floats) -> tuple[Floats, Floats]:
        """∇J(θ), and the rows' probabilities, which the Hessian is made of."""
        total = self.ridge * (theta - self.start) + self.b
        probabilities = np.empty((len(self.x), theta.shape[1]))
        for start in range(0, len(self.x), CHUNK):
            part = slice(start, start + CHUNK)
            x = self.x[part].astype(np.float64)
            p = expit(x @ theta) if self.classes == 2 else softmax(x @ theta, axis=1)
            probabilities[part] = p
            total += x.T @ self.residual(p, part)
        return total, probabilities

    def residual(self, probabilities: Floats, part: slice) -> Floats:
        """p − e_y of the rows in `part`, weighted: times x it is a row's gradient."""
        result, labels = probabilities.copy(), self.labels[part]
        if self.classes == 2:
            result[:, 0] -= labels
        else:
            result[np.arange(len(labels)), labels] -= 1
        return result if self.weights is None else result * self.weights[part, None]

    def curvature(self, probabilities: NDArray[np.float32], v: Floats) -> Floats:
        """∇²J v at the point with these probabilities, in fp32: it finds directions, ∇J judges."""
        p, moved = probabilities, self.x @ v.astype(np.float32)
        if self.classes == 2:
            change = p * (1 - p) * moved
        else:
            change = p * (moved - np.sum(p * moved, axis=1, keepdims=True))
        if self.weights is not None:
            change = change * self.weights[:, None].astype(np.float32)
        return self.ridge * v + self.x.T @ change

    def gram(self) -> Floats:
        """XᵀX, nearly: from some of many rows, and in fp32."""
        every = max(1, len(self.x) // max(SAMPLE, 2 * self.x.shape[1]))
        some = self.x[::every]
        if self.weights is not None:
            some = some * np.sqrt(self.weights[::every, None]).astype(np.float32)
        return len(self.x) / max(len(some), 1) * (some.T @ some).astype(np.float64)

    def mean_curvature(self, probabilities: Floats) -> float:
        """The w for which w XᵀX + λI is the Hessian with the rows' own weights averaged."""
        weight = float(np.mean(probabilities * (1 - probabilities))) if len(probabilities) else 0.0
        return weight if self.classes == 2 else weight * self.classes / (self.classes - 1)


class Preconditioner:
    """(w XᵀX + λI)⁻¹, nearly: what is wrong with a preconditioner costs steps, never accuracy.

    So w may be old: a factor of two costs a few more products with the rows, a new factorisation of
    wide rows as much as a hundred. And λ is a little larger than it is, since rounding in XᵀX may
    be as large as it: the matrix has to be positive definite. Under softmax all columns may move
    together without any effect, so their mean meets λ alone.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective, self.gram = objective, objective.gram()
        self.weight = np.nan

    def renew(self, weight: float) -> None:
        if not self.weight / 2 <= weight <= self.weight * 2:
            matrix = weight * self.gram
            rounding = ROUNDING * float(np.trace(matrix))
            matrix[np.diag_indices_from(matrix)] += self.objective.ridge + rounding
            self.factor = cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False)
            self.weight = weight

    def __call__(self, v: Floats) -> Floats:
        if self.objective.classes == 2:
            return np.asarray(cho_solve(self.factor, v, check_finite=False))
        shared = v.mean(axis=1, keepdims=True)
        own = cho_solve(self.factor, v - shared, check_finite=False)
        return np.asarray(own + shared / self.objective.ridge)


def minimise(objective: Objective, tau: float) -> Floats:
    """θ with ‖∇J(θ)‖ ≤ τ. It stops at τ/2, and leaves the other half to rounding in ∇J."""
    theta = np.zeros_like(objective.b) + objective.start
    gradient, probabilities = objective.gradient(theta)
    precondition = Preconditioner(objective)
    first = size = float(np.linalg.norm(gradient))
    for _ in range(MOST_STEPS):
        if size <= tau / 2:
            return theta
        accuracy = max(LEAST_ACCURACY, min(0.1, np.sqrt(size / first)))
        precondition.renew(objective.mean_curvature(probabilities))
        step = _newton_step(objective, probabilities, gradient, precondition, accuracy)
        length = 1.0
        while True:
            nearer = theta + length * step
            gradient, probabilities = objective.gradient(nearer)
            if np.linalg.norm(gradient) <= (1 - 1e-4 * length) * size:
                break
            length /= 2
            if length < 1e-12:
                raise ArithmeticError(f"rounding keeps the gradient at {size:.3g}, above τ = {tau}")
        theta, size = nearer, float(np.linalg.norm(gradient))
    raise ArithmeticError(f"no gradient below τ = {tau} in {MOST_STEPS} steps; it is {size:.3g}")


def _newton_step(
    objective: Objective,
    probabilities: Floats,
    gradient: Floats,
    precondition: Preconditioner,
    accuracy: float,
) -> Floats:
    """−H⁻¹∇J by conjugate gradients, to a residual of `accuracy` ‖∇J‖."""
    rounded = probabilities.astype(np.float32)
    step = np.zeros_like(gradient)
    residual = -gradient
    goal = accuracy * np.linalg.norm(gradient)
    towards = conditioned = precondition(residual)
    product = float(np.sum(residual * conditioned))
    for _ in range(10 * gradient.size + 10):
        if np.linalg.norm(residual) <= goal:
            break
        bent = objective.curvature(rounded, towards)
        far = product / float(np.sum(towards * bent))
        step = step + far * towards
        residual = residual - far * bent
        conditioned = precondition(residual)
        product, before = float(np.sum(residual * conditioned)), product
        towards = conditioned + product / before * towards
    return step


def perturbed_minimum(
    x: NDArray[np.float32],
    labels: NDArray[np.int64],
    mechanism: ObjectivePerturbation,
    rng: np.random.Generator,
    weights: Floats | None = None,
    start: Floats | float = 0.0,
) -> Floats:
    """The release: (d, columns). All that is random in it comes from `rng`.

    `weights` are of the rows' losses, and those of a person add up to 1.
    """
    if len(x) and float(np.max(np.einsum("ij,ij->i", x, x, dtype=np.float64))) > 1:
        raise ValueError("a row is longer than 1; the guarantee counts on ‖x‖ ≤ 1")
    shape = (x.shape[1], columns(mechanism.classes))
    b = mechanism.sigma * rng.standard_normal(shape)
    if (weights is not None) != mechanism.persons:
        raise ValueError("σ is calibrated either for records or for persons")
    objective = Objective(x, labels, mechanism.classes, mechanism.ridge, b, weights, start)
    theta = minimise(objective, mechanism.tau)
    return theta + mechanism.output_sigma * rng.standard_normal(shape)


def linear_head(theta: Floats) -> tuple[Floats, Floats]:
    """Weights (K, k) and biases (K,) for rows u, from θ for rows x = (√(1 − c²) u, c)."""
    scores = np.concatenate([-theta / 2, theta / 2], axis=1) if theta.shape[1] == 1 else theta
    return SAFE * np.sqrt(1 - BIAS**2) * scores[:-1].T, SAFE * BIAS * scores[-1]


def theta_of(weight: Floats) -> Floats:
    """θ of which `linear_head` makes these weights (K, k) and no biases."""
    columns = weight.T if len(weight) > 2 else (weight[1:] - weight[:1]).T
    theta = np.zeros((columns.shape[0] + 1, columns.shape[1]))
    theta[:-1] = columns / (SAFE * np.sqrt(1 - BIAS**2))
    return theta
