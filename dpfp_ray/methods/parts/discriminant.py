"""A linear head from noisy class statistics, in closed form: regularised LDA.

It is given a release and nothing else. Whatever it does is therefore post-processing, and any
number of heads (other ridges, other priors) can be made from one release at no further cost.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# A class whose count is not larger than this many standard deviations of its noise is unknown.
SEEN = 4.0
# Variance along a direction that tells classes apart, over the mean variance of all directions; a
# guess for when noise hides it (a sentence encoder's own order of magnitude).
GUESSED_SPREAD = 3.0
LEAST_SURE = 1e-3  # not 0: the order of scores must survive


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
    found = in_order(known)
    if found is None:
        return LinearHead(np.zeros(known.sums.shape), np.zeros(len(known.counts)))
    return head_of(found, ridge, shrinkage, public)


def in_order(known: ClassStatistics) -> Classes | None:
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
    """See `discriminant`."""
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
    variance = _variance(weight, float(inverse.sum()), known.within, priors, spread, entry_std)
    # A ridge makes scores too small: the right scale is separation over variance. Where noise hides
    # the separation the order of scores is all there is, and the logits are made less sure of it.
    scale = max(separation, np.sqrt(unsure)) / max(variance, 1e-300)
    bias = scale * (-distance / 2 - weight @ known.centre) + np.log(priors)
    logits = LinearHead(scale * weight, bias)
    positive = max(separation, 0.0)
    sure = max(positive**2 / max(positive**2 + unsure, 1e-300), LEAST_SURE)
    return LinearHead(sure * logits.weight, sure * logits.bias)


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


def _variance(
    weight: Floats,
    trace: float,
    within: Floats,
    priors: Floats,
    spread: float,
    entry_std: float,
) -> float:
    """Σ π_c w_cᵀΣw_c, the variance of a class's scores on clean rows, from noisy Σ + E and tr P.

    P was made with the same E, which makes wᵀ(Σ+E)w too small by 2 τ² tr P ‖w‖² to first order (for
    a symmetric Gaussian E, E[E A E] = τ² (tr A · I + A)). Where τ hides the variance a guess takes
    over: the two are weighted by how far off each may be.
    """
    size = float(priors @ np.einsum("ck,ck->c", weight, weight))
    correction = 2 * entry_std**2 * trace
    measured = float(priors @ np.einsum("ck,kl,cl->c", weight, within, weight))
    guess = GUESSED_SPREAD * spread
    trust = guess**2 / (guess**2 + 2 * entry_std**2 + correction**2)
    mixed = trust * (measured + correction * size) + (1 - trust) * guess * size
    return max(mixed, (1 - trust) * guess * size / 4)
