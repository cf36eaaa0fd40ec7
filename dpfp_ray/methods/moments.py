"""DP-FP, mode `moments`: class counts, class sums and second moment, released together once.

A record with the bounded representation u (‖u‖ ≤ 1) and label y adds to the released vector

    v(u, y) = (a e_y,  b e_y ⊗ u,  c svec(u uᵀ)),      a² + b² + c² = 1,

where svec lists the upper triangle with √2 on the off-diagonal, so that ‖svec(A)‖₂ = ‖A‖_F. Hence

    ‖v‖² = a² + b² ‖u‖² + c² ‖u uᵀ‖_F² = a² + b² ‖u‖² + c² ‖u‖⁴ ≤ 1,   with equality for ‖u‖ = 1:

adding or removing one record moves the sum of the v's by at most 1, whatever its text and label.
One Gaussian release of it with deviation σ is exactly 1/σ-GDP (Dong et al. 2022, theorem 1).

A person adds w Σ v over their m rows, w = 1/max(1, ‖Σ v‖): at most 1 again, clipped as one. All
blocks shrink alike, so the person's rows stay what they are and count w times each. ‖Σ v‖ ≤ m, so
this is never less than the mean of the v's; and the mean, over D persons of at most k rows, is
never less than a sum of all n rows with the sensitivity k, for n/k ≤ D.

An off-diagonal entry of the second moment so gets noise of variance σ²/(2c²), a diagonal one
σ²/c²: half of what a triangle without the √2 would need off the diagonal, and a noise matrix that
has the same law in every orthonormal basis.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.data.split import by_size
from dpfp_ray.methods.parts.base import noise_of_second_moment
from dpfp_ray.methods.parts.one_release import (
    CHUNK,
    ClassStatistics,
    Recent,
    Seen,
    add_up,
    best_linear_guess,
    bounded,
    bounded_rows,
    release_id,
)
from dpfp_ray.plan.method_spec import MethodSpec, OneRelease, closed_form
from dpfp_ray.privacy.sampling import keyed_generator

if TYPE_CHECKING:
    from dpfp_ray.models.representations import RepresentationTable
    from dpfp_ray.plan.plan import Plan

Floats = NDArray[np.float64]
# a², b², c²: shares of the squared sensitivity, chosen once and for all without any private data.
# Counts are large numbers of which one or two digits are enough. Under strong noise only the sums
# carry information (n numbers tell k of them, but not k² covariances); under weak noise both are
# precise and the split hardly matters. Hence somewhat more for the sums.
COUNTS, SUMS, SECOND = 0.05, 0.50, 0.45

_exact = Recent()  # private, never leaves the process: spares a sweep the sums over all records
_released = Recent()  # spares the trials of one release what they all make of it


def release(
    plan: Plan, noise_multiplier: float, table: RepresentationTable, classes: int, seed: int
) -> ClassStatistics:
    """The noisy statistics: the only thing here that is made from private records."""
    name = release_id(plan, noise_multiplier, table, seed)

    def make() -> ClassStatistics:
        key = (table.content(), plan.scaling, plan.C, classes)
        exact = _exact.get(key, lambda: flatten(*sums_of(plan, table, classes)))
        rng = keyed_generator(seed, f"release {name}", 0)
        noisy = exact + noise_multiplier * rng.standard_normal(len(exact))
        return unflatten(noisy, table.width, classes, noise_multiplier)

    found: ClassStatistics = _released.get((name, classes), make)
    return found


def sums_of(plan: Plan, table: RepresentationTable, classes: int) -> tuple[Floats, Floats, Floats]:
    if table.persons is not None:
        weights = person_weights(plan, table)
        return add_up(bounded_rows(table, plan), table.width, classes, weights)
    shards = table.by_shard(functools.partial(sums_of_shard, plan, classes))
    return functools.reduce(lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] + b[2]), shards)


def sums_of_shard(
    plan: Plan, classes: int, shard: RepresentationTable
) -> tuple[Floats, Floats, Floats]:
    return add_up(bounded_rows(shard, plan), shard.width, classes)


def person_weights(plan: Plan, table: RepresentationTable) -> Floats | None:
    """w of each row's person; None where every row is a unit of its own, and w = 1."""
    if table.persons is None:
        return None
    weights = np.empty(len(table))
    for _, groups in by_size(table.persons):
        for rows in np.array_split(groups, -(-groups.size // CHUNK)):
            u, y = bounded(table.h[rows.reshape(-1)], plan), np.asarray(table.labels)[rows]
            squares = gram(u.reshape(*rows.shape, -1), y).sum((1, 2))
            weights[rows] = 1 / np.sqrt(np.maximum(1.0, squares))[:, None]
    return weights


def gram(u: Floats, y: NDArray[np.int64]) -> Floats:
    """⟨v(u, y), v(u', y')⟩ of all pairs of rows; leading dimensions are taken one by one."""
    products, same = u @ np.swapaxes(u, -1, -2), y[..., :, None] == y[..., None, :]
    return np.asarray(same * (COUNTS + SUMS * products) + SECOND * products**2)


def flatten(counts: Floats, sums: Floats, second: Floats) -> Floats:
    """Σ v(u, y) as one vector: one record more or less moves it by at most 1 in L2."""
    upper, weights = _triangle(second.shape[0])
    return np.concatenate(
        [
            np.sqrt(COUNTS) * counts,
            np.sqrt(SUMS) * sums.reshape(-1),
            np.sqrt(SECOND) * weights * second[upper],
        ]
    )


def unflatten(vector: Floats, width: int, classes: int, noise_multiplier: float) -> ClassStatistics:
    """The statistics in a released vector, with what is publicly known of the noise in them."""
    upper, weights = _triangle(width)
    counts, sums, triangle = np.split(vector, [classes, classes * (1 + width)])
    second = np.zeros((width, width))
    second[upper] = triangle / (np.sqrt(SECOND) * weights)
    second = second + np.triu(second, 1).T
    return ClassStatistics(
        counts=counts / np.sqrt(COUNTS),
        sums=sums.reshape(classes, width) / np.sqrt(SUMS),
        second=second,
        count_std=noise_multiplier / np.sqrt(COUNTS),
        sum_var=np.full(classes, noise_multiplier**2 / SUMS),
        second_std=noise_multiplier / np.sqrt(2 * SECOND),
    )


def coordinates(width: int, classes: int) -> int:
    return classes + classes * width + width * (width + 1) // 2


@functools.cache
def _triangle(width: int) -> tuple[tuple[NDArray[np.intp], NDArray[np.intp]], Floats]:
    """Indices of the upper triangle, and svec's weights: 1 on the diagonal, √2 off it."""
    upper = np.triu_indices(width)
    return upper, np.where(upper[0] == upper[1], 1.0, np.sqrt(2.0))


def released_moments(seen: Seen) -> Floats:
    """`best_linear_guess` of the release less the known records; σ is what the release says of its
    own noise."""
    plan, found = seen.plan, seen.released
    sigma = found.count_std * np.sqrt(COUNTS)
    known = sums_of(plan, seen.others, seen.classes)
    counts, sums, second = found.counts - known[0], found.sums - known[1], found.second - known[2]

    u, y = bounded(seen.canaries.h, plan), seen.canaries.labels
    projected = (
        COUNTS * counts[y]
        + SUMS * np.sum(sums[y] * u, axis=1)
        + SECOND * np.einsum("ij,jk,ik->i", u, second, u, optimize=True)
    )
    return best_linear_guess(
        seen, gram(u, y), projected, sigma, person_weights(plan, seen.canaries)
    )


def noise_to_signal(plan: Plan, noise_multiplier: float, width: int, classes: int) -> float:
    return noise_of_second_moment(noise_multiplier, SECOND, width, plan.D)


SPEC = MethodSpec(
    method="dpfp",
    mode="moments",
    label="DP-FP (moments)",
    order=5,
    guarantee="proved",
    adjacencies=("add_remove",),  # sums over records, not rows
    scopes=("head",),
    one_release=OneRelease(release, coordinates, released_moments),
    uses=("scaling", "ridge", "shrinkage", "prior"),
    noise_to_signal=noise_to_signal,
    bounds_persons=True,
    # Measured on SST-2 and the demo, which are public (benchmarks/frozen.md); the optimum is flat.
    defaults=closed_form(ridge=0.5, shrinkage=0.01),
    released="class counts, class sums and second moment of the representations, with noise",
)
