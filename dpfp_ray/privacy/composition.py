"""The privacy loss of different mechanisms together: `pld.py` for a list instead of one.

Sampled Gaussians of any rates and noises, plain Gaussians and pure ε-DP mechanisms are put on one
grid of losses, each rounded up, and convolved by the product of their spectra. The two directions
(the record became ⊥, ⊥ became the record) are composed each on its own; the larger ε counts. As in
`pld.py` losses are tilted so that the convolution is centred at ε, and what a grid or a window
leaves out is charged to δ: the result is an upper bound at any grid.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import fft
from scipy.optimize import minimize_scalar
from scipy.special import expit

from dpfp_ray.privacy.pld import (
    MOST_POINTS,
    TAIL_SHARE,
    TOLERANCE,
    Floats,
    Losses,
    Release,
    _grid,
    _solve,
    connect_dots,
    gaussian_curve,
)

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


def composed_epsilon(
    parts: Sequence[tuple[Losses, int]], delta: float, at_least: float = 0.0
) -> float:
    """ε at `delta` of the sum of all losses, or `at_least` if that is larger.

    The convolution is circular, modulo `width`; what it folds into the window adds less than
    `TAIL_SHARE` to δ, for the reasons that `pld.composed_epsilon` gives.
    """
    interval = parts[0][0].interval
    values = [_grid(losses.first, len(losses.masses), interval) for losses, _ in parts]
    lost = -math.expm1(sum(count * math.log1p(-losses.infinite) for losses, count in parts))
    negligible = math.log(1 / (TAIL_SHARE * delta))
    reach = max(interval, *(float(np.abs(one).max()) for one in values))
    number = sum(count for _, count in parts)

    def cumulant(theta: float) -> float:
        return sum(
            count * math.log(losses.masses @ np.exp(theta * at))
            for (losses, count), at in zip(parts, values, strict=True)
        )

    def chernoff(log_mass: float) -> tuple[float, float]:
        """(x, θ): the sum exceeds x with probability at most e^−log_mass, shown by θ."""
        best = minimize_scalar(
            lambda x: (cumulant(math.exp(x)) + log_mass) * math.exp(-x),
            bounds=(-math.log(10 * reach * math.sqrt(number)), math.log(600 / reach)),
            method="bounded",
            options={"xatol": 0.2},  # any θ is valid, a near one nearly best
        )
        return float(best.fun), math.exp(best.x)

    left = delta - lost - TAIL_SHARE * delta
    above_epsilon, steepest = chernoff(math.log(1 / left))
    if above_epsilon <= at_least:
        return at_least
    theta = steepest / 2
    width = negligible / theta
    while True:
        points = fft.next_fast_len(math.ceil(width / interval), real=True)
        width = points * interval
        window_top, _ = chernoff(theta * width + negligible)
        first = math.floor(window_top / interval) - points + 1
        if first * interval < max(0.0, above_epsilon - 1 / theta):
            sums = _tilted_product(parts, values, theta, first, points)
            found = _solve(sums, first, interval, left)
            if found is not None:
                return max(found, at_least)
        width *= 1.5


def _tilted_product(
    parts: Sequence[tuple[Losses, int]],
    values: Sequence[Floats],
    theta: float,
    first: int,
    points: int,
) -> Floats:
    """Masses of the whole sum at the `points` multiples of the interval from `first` on."""
    spectrum = np.ones(points // 2 + 1, dtype=np.complex128)
    log_total = 0.0
    for (losses, count), at in zip(parts, values, strict=True):
        tilted = losses.masses * np.exp(theta * at)
        total = float(tilted.sum())
        places = np.arange(losses.first, losses.first + len(tilted)) % points
        one = fft.rfft(np.bincount(places, weights=tilted / total, minlength=points))
        # Powers are dear, and most frequencies vanish: |f|^n < 1e-30 is far below rounding.
        alive = np.abs(one) > math.exp(math.log(1e-30) / count)
        spectrum[alive] *= one[alive] ** count
        spectrum[~alive] = 0.0
        log_total += count * math.log(total)
    product = np.roll(fft.irfft(spectrum, points), -(first % points))
    back = log_total - theta * _grid(first, points, parts[0][0].interval)
    # Where the factor would overflow, far below ε, a δ of 1 is all that need be known.
    return np.maximum(0.0, product) * np.exp(np.minimum(back, 300.0))
