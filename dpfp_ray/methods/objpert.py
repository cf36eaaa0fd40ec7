"""Objective perturbation on frozen rows (Redberg, Koskela & Wang 2023, arXiv 2401.00583).

A linear classifier is the minimum of a regularised loss plus a random linear term; the minimum, to
a gradient of norm τ and with a little more noise, is the one release. Nothing is trained in steps:
there is no learning rate, no batch size and no number of epochs to choose. Labels are protected.
Where the unit is a person, a person's loss is the mean of their rows'.
σ and λ follow from the budget (`privacy/objective_perturbation.py`), the guarantee from
`docs/privacy_objpert.md`. Another λ would be another release, so there is no ridge to tune.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.methods.parts.base import noise_of_minimum
from dpfp_ray.methods.parts.one_release import (
    LinearHead,
    Recent,
    Seen,
    best_linear_guess,
    bounded,
    bounded_rows,
    release_id,
    rows_of_person,
)
from dpfp_ray.plan.method_spec import MethodSpec, OneRelease, OwnProfile, closed_form
from dpfp_ray.privacy.sampling import keyed_generator

if TYPE_CHECKING:
    from dpfp_ray.models.representations import RepresentationTable
    from dpfp_ray.plan.plan import Plan
    from dpfp_ray.privacy.objective_perturbation import ObjectivePerturbation

Floats = NDArray[np.float64]
_releases = Recent()  # not private


@functools.lru_cache(maxsize=64)
def calibrate(
    epsilon: float, delta: float, classes: int, persons: bool = False
) -> ObjectivePerturbation:
    from dpfp_ray.privacy import objective_perturbation

    return objective_perturbation.calibrate(epsilon, delta, classes, persons)


def accounted(plan: Plan, noise_multiplier: float) -> ObjectivePerturbation:
    """What the accounting takes the release to be; the release is made from nothing else."""
    from dpfp_ray.privacy.accounting import mechanism
    from dpfp_ray.privacy.objective_perturbation import ObjectivePerturbation

    own = mechanism(plan, noise_multiplier).own
    assert isinstance(own, ObjectivePerturbation)
    return own


def release(
    plan: Plan, noise_multiplier: float, table: RepresentationTable, classes: int, seed: int
) -> Floats:
    """θ, a column for two classes and K for more: all that is made from private records."""
    from dpfp_ray.methods.parts.perturbed_minimum import perturbed_minimum, with_bias

    own = accounted(plan, noise_multiplier)
    if own.classes != classes:
        raise ValueError(f"σ was calibrated for {own.classes} classes, not for {classes}")
    # The id has all that the release depends on but λ and K, which the key of the noise adds.
    name = f"objpert {own!r} {release_id(plan, noise_multiplier, table, seed)}"

    def compute() -> Floats:
        rows = [with_bias(u) for u, _ in bounded_rows(table, plan)]
        x = np.concatenate(rows) if rows else np.zeros((0, table.width + 1), np.float32)
        rng = keyed_generator(seed, f"release {name}", 0)
        weights, theta0 = shares(table), start(plan, table, classes)
        return perturbed_minimum(x, np.asarray(table.labels), own, rng, weights, theta0)

    found: Floats = _releases.get((seed, name), compute)
    return found


def start(plan: Plan, table: RepresentationTable, classes: int) -> Floats | float:
    """θ₀: public, made from words for the classes; else 0."""
    from dpfp_ray.methods.parts.label_words import head_of_words
    from dpfp_ray.methods.parts.perturbed_minimum import theta_of

    if plan.start == "zero":
        return 0.0
    assert table.words is not None, "these inputs were loaded for another plan"
    return theta_of(head_of_words(bounded(table.words.h, plan), table.words.labels, classes).weight)


def shares(table: RepresentationTable) -> Floats | None:
    """1/m for each of a person's m rows; None where every row is a unit of its own."""
    sizes = rows_of_person(table)
    return None if sizes is None else 1 / sizes


def head(theta: Floats) -> LinearHead:
    from dpfp_ray.methods.parts.perturbed_minimum import linear_head

    return LinearHead(*linear_head(theta))


def coordinates(width: int, classes: int) -> int:
    return (width + 1) * (1 if classes == 2 else classes)


def released_gradient(seen: Seen) -> Floats:
    """`best_linear_guess` from the gradient that the release solves: at θ the records that are in
    add up to −b − λ(θ − θ₀). Less the known ones it is r, and v_i is canary i's gradient at θ."""
    from dpfp_ray.methods.parts.perturbed_minimum import Objective, with_bias

    plan, sigma, classes = seen.plan, seen.noise_multiplier, seen.classes
    theta0 = start(plan, seen.table, classes)
    theta: Floats = seen.released
    zero = np.zeros_like(theta)

    def objective(table: RepresentationTable) -> Objective:
        x = with_bias(bounded(table.h, plan))
        return Objective(x, table.labels, classes, 0.0, zero, shares(table))

    known = objective(seen.others).gradient(theta)[0]
    left = -(accounted(plan, sigma).ridge * (theta - theta0) + known)
    canaries = objective(seen.canaries)
    residual = canaries.residual(canaries.gradient(theta)[1], slice(None))
    x = canaries.x.astype(np.float64)
    projected = np.einsum("id,dc,ic->i", x, left, residual)
    gram = (x @ x.T) * (residual @ residual.T)
    return best_linear_guess(seen, gram, projected, sigma)


def noise_to_signal(plan: Plan, noise_multiplier: float, width: int, classes: int) -> float:
    return noise_of_minimum(noise_multiplier, width, plan.D)


SPEC = MethodSpec(
    method="objpert",
    label="ObjPert",
    order=7,
    guarantee="proved",
    adjacencies=("add_remove",),
    scopes=("head",),
    one_release=OneRelease(release, coordinates, released_gradient, head),
    own_profile=OwnProfile(
        calibrate,
        "objective perturbation's own profile δ(ε), its last step included (Redberg et al. 2023 "
        "for two classes, docs/privacy_objpert.md for more): an upper bound",
    ),
    uses=("scaling", "start", "label_words"),
    noise_to_signal=noise_to_signal,
    bounds_persons=True,
    defaults=closed_form(ridge=None, shrinkage=None),
    released="the weights of a linear classifier that minimises a randomly perturbed loss, with "
    "a little noise",
)
