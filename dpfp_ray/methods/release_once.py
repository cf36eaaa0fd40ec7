"""DP-FP, mode `release_once`: each record's bounded representation, noised once.

z_i = u_i + N(0, σ² I_k) with ‖u_i‖ ≤ 1, for every record. A record touches its own row only, and
moves it by at most 1 if its text is replaced by nothing (zero-out: u = 0), by at most 2 if it is
replaced by another (replace-one). So the list of all rows is exactly 1/σ-GDP (2/σ), with no
assumption on sampling, and already in the local model: a record's owner could add the noise.
Labels are public, unless `label_epsilon` randomises them, each on its own (`accounting.py`).

A person with m rows releases all of them with N(0, m σ² I_k) each: together they move by at most
√(m · 1/(mσ²)) = 1/σ in units of their noise, as one row does. Each of their labels is randomised
with `label_epsilon`/m. Rows then count 1/m in the sums: a person whose rows are of one class adds
noise of variance σ² to it, as one who has one row.

What is known of the noise makes a good head possible. Rows have k σ² of noise in their squared
norm, clean ones at most 1: a head that was trained on such rows as if they were data is dominated
by its bias on clean ones. Class means, however, average the noise away, and the second moment has
exactly n σ² I too much, which is taken off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.methods.parts.one_release import (
    ClassStatistics,
    Recent,
    Rows,
    Seen,
    add_up,
    bounded,
    bounded_rows,
    membership,
    release_id,
    rows_of_person,
)
from dpfp_ray.plan.method_spec import MethodSpec, OneRelease, closed_form
from dpfp_ray.privacy.sampling import keyed_generator

if TYPE_CHECKING:
    from dpfp_ray.models.representations import RepresentationTable
    from dpfp_ray.plan.plan import Plan

_summaries = Recent()  # of noisy rows: not private


@dataclass(frozen=True)
class RowStatistics(ClassStatistics):
    """Class statistics of released rows, and the rows: `rows()` gives them, `summarise(rows())` the
    statistics again. They are made again rather than kept, for they can be larger than memory."""

    rows: Callable[[], Rows]
    summarise: Callable[[Rows], ClassStatistics]


def release(
    plan: Plan, noise_multiplier: float, table: RepresentationTable, classes: int, seed: int
) -> RowStatistics:
    rows = partial(noisy_rows, plan, noise_multiplier, table, classes, seed)
    facts = (noise_multiplier, plan.label_epsilon, table.width, classes, rows_of_person(table))
    name = release_id(plan, noise_multiplier, table, seed)
    known: ClassStatistics = _summaries.get(name, lambda: summarise(rows(), *facts))
    return RowStatistics(**vars(known), rows=rows, summarise=lambda rows: summarise(rows, *facts))


def noisy_rows(
    plan: Plan, noise_multiplier: float, table: RepresentationTable, classes: int, seed: int
) -> Rows:
    """The release itself: (z, label) of every record in order, a chunk at a time.

    Not written to disk, because it need not be: the same arguments give the same numbers.
    """
    from dpfp_ray.privacy.accounting import randomise

    name = release_id(plan, noise_multiplier, table, seed)
    std = np.nextafter(np.float32(noise_multiplier), np.float32(np.inf))  # rounded up, never down
    sizes, start = rows_of_person(table), 0
    for number, (u, labels) in enumerate(bounded_rows(table, plan)):
        rng = keyed_generator(seed, f"release {name}", number)
        noise = rng.standard_normal(u.shape, dtype=np.float32)
        if sizes is not None:
            roots = np.sqrt(sizes[start : start + len(u)])[:, None]
            noise = noise * np.nextafter(roots.astype(np.float32), np.float32(np.inf))
            start += len(u)
        z = (u + std * noise).astype(np.float32)
        if plan.label_epsilon is not None:
            shares = 1.0 if sizes is None else sizes[start - len(u) : start]
            labels = randomise(labels, plan.label_epsilon / shares, classes, rng)
        yield z, labels


def summarise(
    rows: Rows,
    noise_multiplier: float,
    label_epsilon: float | None,
    width: int,
    classes: int,
    sizes: NDArray[np.float64] | None = None,
) -> ClassStatistics:
    """Unbiased class statistics of the clean rows, from the released ones and public facts.

    `sizes` is m of each row's person: its noise has the variance m σ², and it counts 1/m.

    A randomised label is y with probability q and each other one with r, so that the expected
    sum over records that say c is (q − r) S_c + r S with S over all classes; solved for S_c, and
    likewise for the counts. Without randomisation q = 1 and r = 0.
    """
    from dpfp_ray.privacy.accounting import keep_probability

    if sizes is not None:
        return summarise_persons(rows, noise_multiplier, label_epsilon, width, classes, sizes)
    said, said_sums, second = add_up(rows, width, classes)
    total, variance = said.sum(), noise_multiplier**2
    q = 1.0 if label_epsilon is None else keep_probability(label_epsilon, classes)
    r = (1 - q) / (classes - 1)
    counts = (said - r * total) / (q - r)
    sums = (said_sums - r * said_sums.sum(0)) / (q - r)
    # A record weighs (1 − r)/(q − r) or −r/(q − r) in S_c; which of the two is random as well.
    weights = (said * (1 - r) ** 2 + (total - said) * r**2) / (q - r) ** 2
    own = np.clip(counts, 0.0, total)
    flips = (own * q * (1 - q) + (total - own) * r * (1 - r)) / (q - r) ** 2
    return ClassStatistics(
        counts=counts,
        sums=sums,
        second=second - total * variance * np.eye(width),
        count_std=float(np.sqrt(flips.max())),
        sum_var=weights * variance + flips / width,
        # z_i z_j of one row, i ≠ j: variance σ⁴ + σ² (u_i² + u_j²), and Σ u_i² ≤ 1
        second_std=float(np.sqrt(total * (variance**2 + 2 * variance / width))),
    )


def summarise_persons(
    rows: Rows,
    noise_multiplier: float,
    label_epsilon: float | None,
    width: int,
    classes: int,
    sizes: NDArray[np.float64],
) -> ClassStatistics:
    """As `summarise`, for rows with the weight 1/m, noise of variance m σ² and labels that were
    kept with a q of their own.

    Weighted, the noise of a row has the variance σ²/m in a sum, the mean σ² on the diagonal of the
    second moment, and the variance σ⁴ + σ² (u_i² + u_j²)/m off it.
    """
    from dpfp_ray.privacy.accounting import keep_probability

    share, variance, number = 1 / sizes, noise_multiplier**2, len(sizes)
    kept = None if label_epsilon is None else keep_probability(label_epsilon / sizes, classes)
    said: list[NDArray[np.int64]] = []

    def heard() -> Rows:
        for z, labels in rows:
            said.append(labels)
            yield z, labels

    counts, sums, second = add_up(heard(), width, classes, share, kept)
    belongs = membership(np.concatenate(said), classes, kept)
    # The variance of a, for rows of the class and for others; which they are, a says on average.
    q = np.ones(number) if kept is None else kept
    r = (1 - q) / (classes - 1)
    own, other = q * (1 - q) / (q - r) ** 2, r * (1 - r) / (q - r) ** 2
    flips = np.maximum(belongs @ (share**2 * (own - other)) + share**2 @ other, 0.0)
    return ClassStatistics(
        counts=counts,
        sums=sums,
        second=second - number * variance * np.eye(width),
        count_std=float(np.sqrt(flips.max())),
        sum_var=belongs**2 @ share * variance + flips / width,
        second_std=float(np.sqrt(number * variance**2 + 2 * variance / width * share.sum())),
    )


def coordinates(width: int, classes: int) -> int:
    return width


def released_row(seen: Seen) -> NDArray[np.float64]:
    """The log-likelihood ratio of each canary's own noisy row, times σ²: no test does better.

    z = u + noise if in, o + noise if out (o = 0, or another record's row under `replace_one`), so
    the ratio is ⟨z, u − o⟩ − (‖u‖² − ‖o‖²)/2; of a person, the sum over their m rows, over m.
    """
    places, plan, released = seen.places, seen.plan, seen.released
    z = np.empty((len(places), seen.table.width))

    def looked_at() -> Rows:
        start = 0
        for rows, labels in released.rows():
            here = (places >= start) & (places < start + len(rows))
            z[here] = rows[places[here] - start]
            start += len(rows)
            yield rows, labels

    if not np.array_equal(released.summarise(looked_at()).sums, released.sums):
        raise ValueError("these are not the rows that the head was made from")
    u = bounded(seen.canaries.h, plan)
    o = np.zeros_like(u) if seen.absent is None else bounded(seen.absent.h, plan)
    ratios = np.sum(z * (u - o), axis=1) - (np.sum(u * u, axis=1) - np.sum(o * o, axis=1)) / 2
    sizes = rows_of_person(seen.canaries)
    if sizes is None or seen.canaries.persons is None:
        return ratios
    return np.asarray(np.bincount(seen.canaries.persons, ratios / sizes), np.float64)


SPEC = MethodSpec(
    method="dpfp",
    mode="release_once",
    label="DP-FP (release once)",
    order=4,
    guarantee="proved",
    adjacencies=("zero_out", "replace_one"),
    scopes=("head",),
    one_release=OneRelease(release, coordinates, released_row),
    uses=("scaling", "ridge", "shrinkage", "prior", "label_epsilon"),
    bounds_persons=True,
    # Measured on SST-2 and the demo, which are public (benchmarks/frozen.md); the optimum is flat.
    defaults=closed_form(ridge=2.0, shrinkage=0.01),
    released="every record's bounded representation with noise, once",
    trust="local: each record's owner could add the noise; central, if the holder does",
    labels_protected=False,
)
