"""The privacy loss of different mechanisms together: `pld.py` for a list instead of one.

Sampled Gaussians of any rates and noises, plain Gaussians and pure ε-DP mechanisms are put on one
grid of losses, each rounded up, and convolved by the product of their spectra. The two directions
(the record became ⊥, ⊥ became the record) are composed each on its own; the larger ε counts. What a
grid or a window leaves out is charged to δ: the result is an upper bound at any grid.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import expit

from dpfp_ray.privacy.convolution import TAIL_SHARE, Floats, Losses, composed_epsilon
from dpfp_ray.privacy.pld import MOST_POINTS, TOLERANCE, Release, connect_dots, gaussian_curve

# A mechanism's losses on the grid with this interval and this share of δ left out, both directions.
OnGrid = Callable[[float, float], tuple[Losses, Losses]]


class PlainGaussian(Release):
    """A Gaussian release without sampling; both directions are alike."""

    def __init__(self, noise_multiplier: float) -> None:
        super().__init__(p=1.0, noise_multiplier=noise_multiplier, adjacency="replace_one")

    def forward(self, eps: Floats) -> Floats:
        return gaussian_curve(eps, self.noise_multiplier)

    def backward(self, eps: Floats) -> Floats:
        return self.forward(eps)


def release(one: Release) -> OnGrid:
    return lambda tail, interval: connect_dots(one, tail, interval)


def pure(epsilon: float) -> OnGrid:
    """Any ε-DP mechanism: binary randomised response dominates it (Kairouz et al. 2015)."""

    def on_grid(tail: float, interval: float) -> tuple[Losses, Losses]:
        steps = max(1, math.ceil(epsilon / interval))  # a larger ε dominates a smaller one
        masses = np.zeros(2 * steps + 1)
        masses[-1] = expit(steps * interval)
        masses[0] = 1 - masses[-1]
        both = Losses(interval, -steps, masses, 0.0)
        return both, both

    return on_grid


def epsilon(parts: Sequence[tuple[OnGrid, int]], delta: float, scale: float) -> float:
    """ε at `delta` of all `parts`, each (mechanism, count); `scale` is a rough guess of it.

    Grids are refined until two agree to `TOLERANCE`, or would need more memory than `MOST_POINTS`
    allow (about 300 MB); coarser grids give a larger ε, never a smaller one.
    """
    interval = 3e-4 * scale
    coarse = epsilon_at(parts, delta, interval)
    while True:
        interval /= 3.0
        if max(_points(parts, delta, interval), 3 * coarse / interval) > MOST_POINTS:
            return coarse
        fine = epsilon_at(parts, delta, interval)
        if coarse - fine <= TOLERANCE * fine:
            return min(coarse, fine)
        coarse = fine


def epsilon_at(parts: Sequence[tuple[OnGrid, int]], delta: float, interval: float) -> float:
    tail = TAIL_SHARE * delta / sum(count for _, count in parts)
    pairs = [(on_grid(tail, interval), count) for on_grid, count in parts]
    found = composed_epsilon([(forward, count) for (forward, _), count in pairs], delta)
    return composed_epsilon([(backward, count) for (_, backward), count in pairs], delta, found)


def _points(parts: Sequence[tuple[OnGrid, int]], delta: float, interval: float) -> float:
    """How many points the widest mechanism needs at `interval`, seen on a grid 27 times coarser."""
    tail = TAIL_SHARE * delta / sum(count for _, count in parts)
    return max(27 * len(on_grid(tail, 27 * interval)[0].masses) for on_grid, _ in parts)
