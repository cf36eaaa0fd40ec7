"""The privacy loss distribution of Poisson-sampled Gaussians, fast enough to calibrate with.

dp-accounting evaluates the loss of each grid point in Python and keeps tails of mass e^-50, which
takes seconds at the paper's n = 202,016 draws. Here only its input differs: the hockey-stick
curve is evaluated as an array and cut where the tail is worth 1e-4 of δ; dp-accounting's
connect-the-dots discretisation (Doroshenko et al. 2022) and composition are used as they are, and
they keep the result an upper bound at any grid.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr

# Share of δ that is given away to make the grid short; it is charged, so ε stays an upper bound.
TAIL_SHARE = 1e-4
# Relative error allowed to the grid (on the safe side), and the finest grid we can afford.
TOLERANCE = 1e-3
MOST_POINTS = 2_000_000

Floats = NDArray[np.float64]


def epsilon(p: float, n: int, noise_multiplier: float, delta: float, scale: float) -> float:
    """ε at `delta`, too large by at most `TOLERANCE`; `scale` is a rough guess of it.

    The error is about proportional to the grid's interval, so two grids show what a third needs.
    """
    interval = 3e-4 * scale
    coarse = epsilon_at(p, n, noise_multiplier, delta, interval)
    shrink = 3.0
    while True:
        interval /= shrink
        fine = epsilon_at(p, n, noise_multiplier, delta, interval)
        error = max(0.0, coarse - fine) / (shrink - 1)
        if error <= TOLERANCE * fine or _points(p, n, noise_multiplier, delta, interval) > 0.2:
            return fine
        shrink = min(5.0, max(1.5, 1.3 * error / (TOLERANCE * max(fine, error))))
        coarse = fine


def epsilon_at(p: float, n: int, noise_multiplier: float, delta: float, interval: float) -> float:
    """ε at `delta` with privacy losses kept as multiples of `interval`."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    top = _largest_loss(p, noise_multiplier, TAIL_SHARE * delta / n)
    bottom = math.log1p(-p)  # no outcome makes presence less likely than by 1 − p
    pmfs = []
    for curve, low, high in ((remove_curve, bottom, top), (add_curve, -top, -bottom)):
        steps = np.arange(math.floor(low / interval) - 1, math.ceil(high / interval) + 2)
        deltas = curve(steps * interval, p, noise_multiplier)
        pmfs.append(pld_pmf.create_pmf_pessimistic_connect_dots(interval, steps, deltas))
    losses = privacy_loss_distribution.PrivacyLossDistribution(*pmfs)
    return float(losses.self_compose(n).get_epsilon_for_delta(delta))


def remove_curve(eps: Floats, p: float, noise_multiplier: float) -> Floats:
    """H_{e^ε}(P‖Q), P = (1−p) N(0, σ²) + p N(1, σ²), Q = N(0, σ²).

    P − e^ε Q = p (N(1) − e^{ε'} N(0)) with e^{ε'} = 1 + (e^ε − 1)/p, where that is positive.
    """
    divergence = -np.expm1(eps)
    inside = eps > math.log1p(-p)
    shifted = np.log((np.expm1(eps[inside]) + p) / p)
    divergence[inside] = p * gaussian_curve(shifted, noise_multiplier)
    return np.clip(divergence, 0.0, 1.0)


def add_curve(eps: Floats, p: float, noise_multiplier: float) -> Floats:
    """H_{e^ε}(Q‖P): Q − e^ε P = a N(0) − p e^ε N(1) with a = 1 − (1−p) e^ε, 0 once a ≤ 0."""
    divergence = np.zeros_like(eps)
    a = p - (1 - p) * np.expm1(eps)
    inside = a > 0
    shifted = eps[inside] + math.log(p) - np.log(a[inside])
    divergence[inside] = a[inside] * gaussian_curve(shifted, noise_multiplier)
    return np.clip(divergence, 0.0, 1.0)


def gaussian_curve(eps: Floats, noise_multiplier: float) -> Floats:
    """δ(ε; μ) of one Gaussian release, μ = 1/`noise_multiplier` (Balle & Wang 2018)."""
    mu = 1 / noise_multiplier
    above = log_ndtr(-eps / mu + mu / 2)
    below = eps + log_ndtr(-eps / mu - mu / 2)
    return -np.exp(above) * np.expm1(np.minimum(0.0, below - above))


def _largest_loss(p: float, noise_multiplier: float, mass: float) -> float:
    """The loss beyond which one release has a divergence of `mass` left."""

    def excess(eps: float) -> float:
        left = remove_curve(np.array([eps]), p, noise_multiplier)[0]
        return math.log(max(left, 1e-300)) - math.log(mass)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high))


def _points(p: float, n: int, noise_multiplier: float, delta: float, interval: float) -> float:
    """How full the finest affordable grid is: 1 is at the limit."""
    top = _largest_loss(p, noise_multiplier, TAIL_SHARE * delta / n)
    return (top + abs(n * math.log1p(-p))) / interval / MOST_POINTS
