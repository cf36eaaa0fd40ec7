"""Methods that use the private records once: a release, and a head computed from it alone.

    release (private rows → noisy statistics)  →  discriminant (noisy statistics → head)

Only the left side sees private data, and it is a Gaussian mechanism whose cost `docs/privacy.md`
proves. The right side is post-processing: other ridges and other trials on a release cost nothing.

A release is named by `release_id`. Its noise is a pure function of the secret seed and of *all*
that the release depends on, the records included. So the same release made again is the same
numbers and costs nothing more; and two releases that differ in anything (C, σ, a record) have
independent noise, so that their costs compose. With noise keyed by the seed alone, the difference
of two releases would be free of noise.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dpfp_ray.models.representations import RepresentationTable
    from dpfp_ray.plan.plan import Plan

CHUNK = 8192  # rows in memory at once; part of what a seed means for a release of rows
KEPT = 4  # releases kept in memory, for the trials that follow

Floats = NDArray[np.float64]
Rows = Iterator[tuple[NDArray[np.floating[Any]], NDArray[np.int64]]]


def bounded_rows(table: RepresentationTable, plan: Plan) -> Rows:
    """u = h/C of all records in order, ‖u‖ ≤ 1, with their labels, a chunk at a time."""
    for start in range(0, len(table), CHUNK):
        part = slice(start, start + CHUNK)
        yield bounded(table.h[part], plan), np.asarray(table.labels[part])


def bounded(h: NDArray[np.floating[Any]], plan: Plan) -> Floats:
    """u = h/C of every row, ‖u‖ ≤ 1."""
    import torch

    from dpfp_ray.models.classifier import bound_rows

    rows = torch.from_numpy(np.asarray(h, dtype=np.float64))
    return np.asarray(bound_rows(rows, plan.scaling, plan.C).numpy() / plan.C)


def membership(labels: NDArray[np.int64], classes: int, kept: Floats | None = None) -> Floats:
    """(K, rows): 1 where a row is of a class. Where its label y was kept with probability q =
    `kept[i]`, and each other one said with r, ([said = c] − r)/(q − r): [y = c] on average."""
    member = np.zeros((classes, len(labels)))
    member[labels, np.arange(len(labels))] = 1.0
    if kept is None:
        return member
    r = (1 - kept) / (classes - 1)
    return np.asarray((member - r) / (kept - r))


def add_up(
    rows: Rows, width: int, classes: int, weights: Floats | None = None, kept: Floats | None = None
) -> tuple[Floats, Floats, Floats]:
    """Class counts (K,), class sums (K, k) and second moment (k, k) of `rows`; row i counts
    `weights[i]` times, and belongs to classes as `membership` says."""
    counts, sums = np.zeros(classes), np.zeros((classes, width))
    second = np.zeros((width, width))
    start = 0
    for u, labels in rows:
        part = slice(start, start + len(u))
        member = membership(labels, classes, None if kept is None else kept[part])
        member, scaled = member.astype(u.dtype, copy=False), u
        if weights is not None:
            own = weights[part]
            member, scaled = member * own, u * own[:, None]
        start += len(u)
        counts += member.sum(1)
        sums += member @ u
        second += scaled.T @ u
    return counts, sums, second


def rows_of_person(table: RepresentationTable) -> Floats | None:
    """m for each row: how many rows its person has; None where every row is a unit of its own."""
    if table.persons is None:
        return None
    return np.bincount(table.persons)[table.persons].astype(np.float64)


def release_id(plan: Plan, noise_multiplier: float, table: RepresentationTable, seed: int) -> str:
    """32 hex digits; equal for equal releases, and without the seed they tell nothing.

    The records are part of it, so an unkeyed hash could confirm a guess of them.
    """
    labels = hashlib.blake2b(np.ascontiguousarray(table.labels, dtype=np.int64).data).hexdigest()
    facts: dict[str, Any] = {
        "mode": plan.mode,
        "representations": table.key,
        "labels": labels,
        "scaling": plan.scaling,
        "clip": plan.C,
        "noise_multiplier": noise_multiplier,
        "label_epsilon": plan.label_epsilon,
    }
    if plan.start == "words" and table.words is not None:
        facts["words"] = f"{table.words.key} {table.words.labels.tolist()}"
    found = int(np.max(table.labels, initial=-1)) + 1
    if plan.classes and plan.classes != found:  # a class without records: other statistics
        facts["classes"] = plan.classes
    if table.persons is not None:  # other groups are another release
        persons = np.ascontiguousarray(table.persons, dtype=np.int64)
        facts["persons"] = hashlib.blake2b(persons.data).hexdigest()
    key = hashlib.blake2b(str(seed).encode(), digest_size=32).digest()
    return hashlib.blake2b(repr(facts).encode(), key=key, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Seen:
    """What an auditor has to guess from: all but the coins and the noise.

    Canary i is row i of `canaries` and stands at `places[i]` of `table`, from which the release was
    made, if its coin says so; if not, row i of `absent` stands there, or (None) nothing that adds.
    `others` are the records that are no canaries. `released` is what the method's `release` gave
    to the run, the very object that the head was made from; `noise_multiplier` is what is stated of
    it.
    """

    plan: Plan
    noise_multiplier: float
    classes: int
    released: Any
    table: RepresentationTable
    places: NDArray[np.int64]
    canaries: RepresentationTable
    absent: RepresentationTable | None
    others: RepresentationTable


def best_linear_guess(
    seen: Seen, gram: Floats, projected: Floats, sigma: float, weights: Floats | None = None
) -> Floats:
    """A score of all coins together, from `gram` = VᵀV and `projected` = Vᵀr.

    What is seen is r = V b + σ noise, with a column v_i of V for each row of a canary (what it
    would add) and its coin b_i. With b = ½ ± ½, independent, the estimate of least variance is
    b − ½ = (VᵀV + 4σ²I)⁻¹ Vᵀ(r − V ½): what others explain is not held for i's.
    """
    if (persons := seen.canaries.persons) is not None:  # a canary adds the weighted sum of its rows
        share = np.eye(persons.max() + 1)[:, persons] * (1.0 if weights is None else weights)
        projected, gram = share @ projected, share @ gram @ share.T
    noise = 4 * sigma**2 * np.eye(len(gram))
    return np.asarray(np.linalg.solve(gram + noise, projected - gram.sum(1) / 2))


class Recent:
    def __init__(self) -> None:
        self.known: OrderedDict[Any, Any] = OrderedDict()

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = compute()
            while len(self.known) > KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        return self.known[key]


# A linear head from noisy class statistics, in closed form: regularised LDA. It is given a release
# and nothing else, so any number of heads (other ridges, other priors) can be made from one release
# at no further cost.
#
# `ridge: auto` is the ridge that would have done best, judged by the release alone. A release is
# what is true plus noise of a known size: X + N, N ~ N(0, S). With W ~ N(0, S) drawn afresh and any
# t > 0,
#
#     A = X + N + t W,        B = X + N − W / t
#
# are two views of X whose noises N + tW and N − W/t are *independent*: they are jointly Gaussian,
# and their covariance is S − S = 0 (the coupled bootstrap of Oliveira, Lei & Tibshirani 2021). So a
# head made from A is judged by B as if B were fresh data. Of each ridge's head, B estimates without
# bias where it puts the class means and how far its scores spread; the ridge with the best accuracy
# for Gaussian classes, over several draws of W, is taken. A and B are made from the release and
# from random numbers that have nothing to do with the records, so the choice is post-processing too
# (Dwork & Roth 2014, proposition 2.1).

# A class whose count is not larger than this many standard deviations of its noise is unknown.
SEEN = 4.0
# Variance along a direction that tells classes apart, over the mean variance of all directions; a
# guess for when noise hides it (a sentence encoder's own order of magnitude).
GUESSED_SPREAD = 3.0
LEAST_SURE = 1e-3  # not 0: the order of scores must survive
RIDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0, 16.0)
# The fitting view gets 25% more noise variance, so that its ridge suits noise of this size; the
# validation view gets five times as much, and averages it away.
SHARE = 0.5
DRAWS = 3
CAUTION = 0.5
WIDE = 1000  # columns from which a draw takes seconds, and the average over them does the averaging


@dataclass(frozen=True)
class ClassStatistics:
    """What is known of the rows u (‖u‖ ≤ 1) after a release, and how far off it may be.

    counts     (K,) records of each class
    sums       (K, k) sum of each class's rows
    second     (k, k) Σ u uᵀ over all classes, symmetric; noise may have made it indefinite
    count_std  standard deviation of the noise in a count
    sum_var    (K,) variance of the noise in a coordinate of a class's sum
    second_std standard deviation of the noise in an off-diagonal entry of `second`
    """

    counts: Floats
    sums: Floats
    second: Floats
    count_std: float
    sum_var: Floats
    second_std: float

    @cached_property
    def in_order(self) -> Classes | None:
        """Once for all trials of a release, which may differ in the ridge alone."""
        return put_in_order(self)


@dataclass(frozen=True)
class LinearHead:
    """logits = weight @ u + bias."""

    weight: Floats
    bias: Floats


@dataclass(frozen=True)
class Classes:
    """Class statistics put in order: what heads of any ridge are made from.

    priors, means, centre   of the classes, and the mean of all rows
    between, between_var    means less the centre, and the variance of the noise in a coordinate
    within                  the covariance within classes
    entry_std               standard deviation of the noise in an off-diagonal entry of `within`
    spread                  mean variance of a coordinate
    total                   records
    """

    priors: Floats
    means: Floats
    centre: Floats
    between: Floats
    between_var: Floats
    within: Floats
    entry_std: float
    spread: float
    total: float

    @cached_property
    def spectrum(self) -> tuple[Floats, Floats]:
        """Eigenvalues and eigenvectors of `within`: nearly all the time that a head takes."""
        values, vectors = np.linalg.eigh((self.within + self.within.T) / 2)
        return values, vectors


def discriminant(
    known: ClassStatistics, ridge: float, shrinkage: float, public: Floats | None = None
) -> LinearHead:
    """log P(class | u) up to a constant, for Gaussian classes of one covariance Σ.

    logits_c = g_cᵀ P (u − m) − ½ g_cᵀ P g_c + log π_c,  P = (Σ₊ + λI)⁻¹,

    with m the mean of all rows, g_c = m_c − m, Σ₊ the released covariance without its negative
    eigenvalues. λ has two parts: `ridge` times the radius 2 τ √k of the noise's spectrum (Wigner's
    semicircle law; the noise of an entry is τ), and (`shrinkage` + k/n) times the mean variance of
    a coordinate, for what n rows cannot tell about k² entries even without noise. Both are known
    from the release. The noise in g_c makes g_cᵀ P g_c too large by its variance times tr P: taken
    off.

    `public` is a covariance of *public* rows. Classes differ mostly in directions in which texts
    differ at all, so g_c is then shrunk to what noise leaves likely, see `_likely`.
    """
    found = known.in_order
    if found is None:
        return LinearHead(np.zeros(known.sums.shape), np.zeros(len(known.counts)))
    return head_of(found, ridge, shrinkage, public)


def put_in_order(known: ClassStatistics) -> Classes | None:
    """None if noise hides even how many records there are."""
    width = known.sums.shape[1]
    seen = known.counts > np.maximum(1.0, SEEN * known.count_std)
    if not seen.any():
        return None
    counts = np.where(seen, known.counts, 1.0)
    total = counts[seen].sum()
    priors = np.where(seen, counts, 0.5) / total
    means = known.sums / counts[:, None]
    centre = known.sums[seen].sum(0) / total
    between = np.where(seen[:, None], means - centre, 0.0)
    mean_var = np.where(seen, known.sum_var / counts**2, 0.0)

    outer = (means[seen].T * priors[seen]) @ means[seen]
    noise_in_outer = priors[seen] @ mean_var[seen]
    within = known.second / total - outer + noise_in_outer * np.eye(width)
    entry_std = known.second_std / total
    # ‖u‖ ≤ 1 bounds the trace by 1; below its own noise's deviation it is not known.
    spread = float(np.trace(within)) / width
    spread = min(max(spread, entry_std * np.sqrt(2 / width), 1e-12), 1 / width)
    # g_c = (1 − π_c) m_c − Σ_{j≠c} π_j m_j, with independent noise in the m's
    between_var = (1 - 2 * priors) * mean_var + priors**2 @ mean_var
    return Classes(
        priors, means, centre, between, between_var, within, float(entry_std), spread, float(total)
    )


def head_of(
    known: Classes, ridge: float, shrinkage: float, public: Floats | None = None
) -> LinearHead:
    priors, between, between_var = known.priors, known.between, known.between_var
    width, spread, entry_std = between.shape[1], known.spread, known.entry_std
    radius = 2 * np.sqrt(width) * entry_std
    values, vectors = known.spectrum
    values = np.maximum(values, 0.0) + ridge * radius + (shrinkage + width / known.total) * spread
    inverse = 1 / np.maximum(values, 1e-12)  # P's eigenvalues

    noise_var = float(priors @ between_var)
    # g → weights is `solve`, here P; all that is asked of P itself is its spectrum.
    weight = (between @ vectors * inverse) @ vectors.T
    trace, squares = float(inverse.sum()), float(np.sum(inverse**2))
    if public is not None and noise_var > 0:
        signal = float(priors @ np.einsum("ck,ck->c", between, between)) - width * noise_var
        solve = (_likely(public, signal, noise_var) @ vectors * inverse) @ vectors.T
        weight = between @ solve
        trace, squares = float(np.trace(solve)), float(np.sum(solve**2))
    distance = np.einsum("ck,ck->c", weight, between) - between_var * trace
    separation = float(priors @ distance)
    # Its variance by the noise in the g's: the quadratic and the mixed part.
    size = float(priors @ np.einsum("ck,ck->c", weight, weight))
    unsure = 2 * noise_var**2 * squares + 4 * noise_var * size
    variance = _variance(weight, float(inverse.sum()), known)
    # A ridge makes scores too small: the right scale is separation over variance. Where noise hides
    # the separation the order of scores is all there is, and the logits are made less sure of it.
    scale = max(separation, np.sqrt(unsure)) / max(variance, 1e-300)
    bias = scale * (-distance / 2 - weight @ known.centre) + np.log(priors)
    positive = max(separation, 0.0)
    sure = max(positive**2 / max(positive**2 + unsure, 1e-300), LEAST_SURE)
    return LinearHead(sure * (scale * weight), sure * bias)


def _likely(public: Floats, signal: float, noise_var: float) -> Floats:
    """R such that R ĝ is the posterior mean of g, given ĝ = g + N(0, `noise_var` I).

    The prior is N(0, A), A proportional to the square of the public covariance (differences lie in
    its leading directions even more than the rows do) and with the trace `signal`, the estimate of
    ‖g‖², or that estimate's own standard deviation if it is smaller.
    """
    values, vectors = np.linalg.eigh(public)
    shape = np.maximum(values, 0.0) ** 2
    power = max(signal, noise_var * np.sqrt(2 * len(values)))
    expected = power * shape / max(float(shape.sum()), 1e-300)
    result: Floats = (vectors * (expected / (expected + noise_var))) @ vectors.T
    return result


def _variance(weight: Floats, trace: float, known: Classes) -> float:
    """Σ π_c w_cᵀΣw_c, the variance of a class's scores on clean rows, from noisy Σ + E and tr P.

    P was made with the same E, which makes wᵀ(Σ+E)w too small by 2 τ² tr P ‖w‖² to first order (for
    a symmetric Gaussian E, E[E A E] = τ² (tr A · I + A)). Where τ hides the variance a guess takes
    over: the two are weighted by how far off each may be.
    """
    within, priors, entry_std = known.within, known.priors, known.entry_std
    size = float(priors @ np.einsum("ck,ck->c", weight, weight))
    correction = 2 * entry_std**2 * trace
    measured = float(priors @ np.einsum("ck,kl,cl->c", weight, within, weight))
    guess = GUESSED_SPREAD * known.spread
    trust = guess**2 / (guess**2 + 2 * entry_std**2 + correction**2)
    mixed = trust * (measured + correction * size) + (1 - trust) * guess * size
    return max(mixed, (1 - trust) * guess * size / 4)


def choose_ridge(
    known: ClassStatistics, shrinkage: float, rng: np.random.Generator, public: Floats | None = None
) -> float:
    scores = np.zeros(len(RIDGES))
    for _ in range(DRAWS if known.sums.shape[1] < WIDE else 1):
        made_from, judged_by = (view.in_order for view in two_views(known, rng))
        if made_from is None or judged_by is None:
            continue
        heads = [head_of(made_from, ridge, shrinkage, public) for ridge in RIDGES]
        scores += [accuracy(head, judged_by) for head in heads]
    return RIDGES[int(np.argmax(scores))]


def two_views(
    known: ClassStatistics, rng: np.random.Generator
) -> tuple[ClassStatistics, ClassStatistics]:
    """The same truth under two independent noises, 1 + t² and 1 + 1/t² times as large."""
    classes, width = known.sums.shape
    counts = known.count_std * rng.standard_normal(classes)
    sums = np.sqrt(known.sum_var)[:, None] * rng.standard_normal((classes, width))
    upper = np.triu(rng.standard_normal((width, width)), 1)
    diagonal = np.sqrt(2) * rng.standard_normal(width)
    second = known.second_std * (upper + upper.T + np.diag(diagonal))

    def view(share: float) -> ClassStatistics:
        larger = float(np.sqrt(1 + share**2))
        return ClassStatistics(
            counts=known.counts + share * counts,
            sums=known.sums + share * sums,
            second=known.second + share * second,
            count_std=larger * known.count_std,
            sum_var=larger**2 * known.sum_var,
            second_std=larger * known.second_std,
        )

    return view(SHARE), view(-1 / SHARE)


def accuracy(head: LinearHead, classes: Classes) -> float:
    """Of telling any two classes apart, if they are Gaussian with these means and covariance.

    A row of class c scores c higher than d with probability Φ(m/s): m the lead at the mean of c, s²
    the variance of that lead. s² is taken half a standard deviation of its noise above its estimate
    (wᵀEw has the variance 2τ²‖w‖⁴): of two ridges that look alike, the smoother head is the safer.
    """
    from scipy.special import ndtr  # here: help texts read the methods, and must not wait for it

    total = weights = 0.0
    for c in range(len(classes.priors)):
        for d in range(len(classes.priors)):
            if c == d:
                continue
            w = head.weight[c] - head.weight[d]
            lead = w @ classes.means[c] + head.bias[c] - head.bias[d]
            noise = np.sqrt(2) * classes.entry_std * (w @ w)
            variance = max(w @ classes.within @ w, 0.0) + CAUTION * noise + 1e-300
            total += classes.priors[c] * float(ndtr(lead / np.sqrt(variance)))
            weights += classes.priors[c]
    return total / max(weights, 1e-300)
