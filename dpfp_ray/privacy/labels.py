"""Randomised response for labels, and its exact composition with one Gaussian release.

k-ary randomised response (Warner 1965; Kairouz et al. 2016): keep the label with probability
q = e^{ε_L} / (e^{ε_L} + K − 1), else say one of the others, each with r = 1 / (e^{ε_L} + K − 1).
Nothing that it says is more than e^{ε_L} times likelier under one label than under another, so it
is (ε_L, 0)-DP for the label, in the local model.

The m labels of a person are randomised with ε_L/m each: all of them together are (ε_L, 0)-DP, and
every pair of (ε_L, 0)-close distributions is a post-processing of the response to two classes with
ε_L (Kairouz, Oh & Viswanath 2015). So the bound below holds for a person as for a record.
"""

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from dpfp_ray.privacy import accounting

Epsilon = TypeVar("Epsilon", float, NDArray[np.float64])


def keep_probability(label_epsilon: Epsilon, classes: int) -> Epsilon:
    """q, with which a label is kept; every other label is said with (1 − q)/(K − 1)."""
    return 1 / (1 + (classes - 1) * np.exp(-label_epsilon))


def randomise(
    labels: NDArray[np.int64],
    label_epsilon: float | NDArray[np.float64],
    classes: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Each label as randomised response says it, with its own ε where there are several."""
    kept = rng.random(len(labels)) < keep_probability(np.asarray(label_epsilon), classes)
    # A step of 1 … K−1 around the circle of classes is one of the other labels, all alike.
    steps = rng.integers(1, max(classes, 2), len(labels))
    return np.where(kept, labels, (labels + steps) % classes)


def joint_delta(eps: float, mu: float, label_epsilon: float) -> float:
    """δ(ε) of a μ-GDP release of a record's text together with randomised response for its label.

    The two are independent given the record, and δ(ε) of a product is the mean of one factor's
    curve at ε minus the other's privacy loss. With two classes that loss is +ε_L with probability
    q and −ε_L with 1 − q, and this is exact. With more classes it is 0 with some probability: the
    response to two classes, replaced by a constant now and then. So this is an upper bound there.
    """
    q = keep_probability(label_epsilon, classes=2)
    up, down = (accounting.gdp_delta(eps - loss, mu) for loss in (label_epsilon, -label_epsilon))
    return q * up + (1 - q) * down


def joint_epsilon(mu: float, label_epsilon: float, delta: float) -> float:
    """The ε at which text and label together have this δ; never more than the sum of both."""
    if not math.isfinite(mu):
        return math.inf
    if joint_delta(0.0, mu, label_epsilon) <= delta:
        return 0.0
    top = label_epsilon + accounting.gdp_epsilon(mu, delta)
    if joint_delta(top, mu, label_epsilon) >= delta:  # equal but for rounding
        return top
    return float(brentq(lambda e: joint_delta(e, mu, label_epsilon) - delta, 0.0, top, xtol=1e-12))


def joint_mu(epsilon: float, label_epsilon: float, delta: float) -> float:
    """The largest μ for the text such that text and label together stay within (ε, δ)."""
    if label_epsilon >= epsilon:
        raise ValueError(f"label_epsilon {label_epsilon} leaves nothing of epsilon {epsilon}")
    # The rest of ε alone would do; all of ε for the text would be too much.
    low = accounting.gdp_mu_of_budget(epsilon - label_epsilon, delta)
    high = accounting.gdp_mu_of_budget(epsilon, delta)
    if joint_delta(epsilon, high, label_epsilon) <= delta:
        return high
    return float(
        brentq(lambda mu: joint_delta(epsilon, mu, label_epsilon) - delta, low, high, rtol=1e-12)
    )
