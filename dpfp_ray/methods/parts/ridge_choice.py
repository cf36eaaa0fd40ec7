"""`ridge: auto`: the ridge that would have done best, judged by the release alone.

A release is what is true plus noise of a known size: X + N, N ~ N(0, S). With W ~ N(0, S) drawn
afresh and any t > 0,

    A = X + N + t W,        B = X + N − W / t

are two views of X whose noises N + tW and N − W/t are *independent*: they are jointly Gaussian, and
their covariance is S − S = 0 (the coupled bootstrap of Oliveira, Lei & Tibshirani 2021). So a head
made from A is judged by B as if B were fresh data, with no bias from having seen its noise. Of each
ridge's head, B estimates without bias where it puts the class means and how far its scores spread;
the ridge with the best accuracy for Gaussian classes, over several draws of W, is taken.

Privacy: A and B are made from the release and from random numbers that have nothing to do with the
records. The choice is post-processing (Dwork & Roth 2014, proposition 2.1), and so is the head.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from dpfp_ray.methods.parts.discriminant import (
    Classes,
    ClassStatistics,
    LinearHead,
    head_of,
    in_order,
)

Floats = NDArray[np.float64]
RIDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0, 16.0)
# Little noise more in the view that heads are made from (a quarter in variance), so that the ridge
# is one for noise of this size; the other view gets five times as much, and averages it away.
SHARE = 0.5
DRAWS = 3
CAUTION = 0.5
WIDE = 1000  # columns from which a draw takes seconds, and the average over them does the averaging


def choose_ridge(
    known: ClassStatistics,
    shrinkage: float,
    rng: np.random.Generator,
    public: Floats | None = None,
) -> float:
    """One of `RIDGES`."""
    scores = np.zeros(len(RIDGES))
    for _ in range(DRAWS if known.sums.shape[1] < WIDE else 1):
        made_from, judged_by = (in_order(view) for view in two_views(known, rng))
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
