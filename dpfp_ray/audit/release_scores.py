"""Scores from a release: the auditor sees all that `release_once` and `moments` ever make of the
private records, knows the records, and has only the coins and the noise to tell apart.
"""

from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from dpfp_ray.audit.scores import Trained
from dpfp_ray.audit.tables import neighbours, select
from dpfp_ray.methods import moments, release_once
from dpfp_ray.methods.parts.one_release import add_up, bounded_rows
from dpfp_ray.models.classifier import bound_rows
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan

Floats = npt.NDArray[np.float64]


def released_row(trained: Trained) -> Floats:
    """The log-likelihood ratio of the canary's own noisy row, times σ²: no test does better.

    z = u + noise if in, o + noise if out (o = 0, or another record's row under `replace_one`), so
    the ratio is ⟨z, u − o⟩ − (‖u‖² − ‖o‖²)/2.
    """
    prepared, plan, canaries = trained.prepared, trained.plan, trained.canaries
    table = cast(RepresentationTable, prepared.data.train)
    z = np.empty((len(canaries), table.width))
    start = 0
    for rows, _ in release_once.noisy_rows(
        plan, prepared.noise_multiplier, table, trained.model.classes, trained.seed
    ):
        here = (canaries.places >= start) & (canaries.places < start + len(rows))
        z[here] = rows[canaries.places[here] - start]
        start += len(rows)
    u = bounded(cast(RepresentationTable, canaries.table), plan)
    o = np.zeros_like(u)
    if plan.adjacency == "replace_one":
        o = bounded(cast(RepresentationTable, select(trained.real, neighbours(canaries))), plan)
    return np.sum(z * (u - o), axis=1) - (np.sum(u * u, axis=1) - np.sum(o * o, axis=1)) / 2


def released_moments(trained: Trained) -> Floats:
    """The best linear guess of all coins together.

    The release, less the known records, is r = V b + σ noise, with a column v_i of V for each
    canary (what it would add) and its coin b_i. With b = ½ ± ½, independent, the estimate of least
    variance is b − ½ = (VᵀV + 4σ²I)⁻¹ Vᵀ(r − V ½): what others explain is not held for i's.
    """
    prepared, plan, canaries = trained.prepared, trained.plan, trained.canaries
    table = cast(RepresentationTable, prepared.data.train)
    classes, width = trained.model.classes, table.width
    seen = moments.release(plan, prepared.noise_multiplier, table, classes, trained.seed)
    others = np.setdiff1d(np.arange(len(trained.real)), canaries.places)
    known = cast(RepresentationTable, select(trained.real, others))
    counts, sums, second = add_up(bounded_rows(known, plan), width, classes)
    counts, sums, second = seen.counts - counts, seen.sums - sums, seen.second - second

    u, y = bounded(cast(RepresentationTable, canaries.table), plan), canaries.table.labels
    projected = (
        moments.COUNTS * counts[y]
        + moments.SUMS * np.sum(sums[y] * u, axis=1)
        + moments.SECOND * np.einsum("ij,jk,ik->i", u, second, u, optimize=True)
    )
    products, same = u @ u.T, y[:, None] == y
    gram = same * (moments.COUNTS + moments.SUMS * products) + moments.SECOND * products**2
    noise = 4 * prepared.noise_multiplier**2 * np.eye(len(u))
    return np.asarray(np.linalg.solve(gram + noise, projected - gram.sum(1) / 2))


def bounded(table: RepresentationTable, plan: Plan) -> Floats:
    """u = h/C of every row, ‖u‖ ≤ 1."""
    h = torch.from_numpy(np.asarray(table.h, dtype=np.float64))
    return np.asarray(bound_rows(h, plan.scaling, plan.C).numpy() / plan.C)
