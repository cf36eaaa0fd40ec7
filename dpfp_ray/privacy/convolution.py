"""Sums of discrete privacy losses, and the ε that they leave: the convolution of `pld.py`.

Losses are tilted, q(l) → q(l) e^{θl} / E e^{θl}, so that the convolution is centred at ε, not at
the mean. Rounding is then relative to δ, and the FFT spans only the neighbourhood of ε.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.optimize import minimize_scalar

# Share of δ that is given away to keep grids short; it is charged, so ε stays an upper bound.
TAIL_SHARE = 1e-6

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Losses:
    """A discrete privacy loss: `masses[i]` at (`first` + i) `interval`, `infinite` at infinity."""

    interval: float
    first: int
    masses: Floats
    infinite: float


def composed_epsilon(
    parts: Sequence[tuple[Losses, int]], delta: float, at_least: float = 0.0
) -> float:
    """ε at `delta` of the sum of all losses, each (loss, count), or `at_least` if that is larger.

    The convolution is circular, modulo `width`. What it folds into the window from outside can only
    add to δ, and `width` is chosen so that it adds less than `TAIL_SHARE`: mass from below the
    window arrives e^{θ width} times smaller than it was, mass from above as much larger.
    """
    interval = parts[0][0].interval
    values = [grid(losses.first, len(losses.masses), interval) for losses, _ in parts]
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
            # From where losses matter only as a sum, up to where e^{θl} is still a double.
            bounds=(-math.log(10 * reach * math.sqrt(number)), math.log(600 / reach)),
            method="bounded",
            options={"xatol": 0.2},  # any θ is valid, a near one nearly best
        )
        return float(best.fun), math.exp(best.x)

    left = delta - lost - TAIL_SHARE * delta
    above_epsilon, steepest = chernoff(math.log(1 / left))
    if above_epsilon <= at_least:
        return at_least
    # That θ centres the sum at ε; half of it rounds nearly as well and needs half the window.
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
        width *= 1.5  # the window's top rises by less than half of this, so its bottom falls


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
    back = log_total - theta * grid(first, points, parts[0][0].interval)
    # Where the factor would overflow, far below ε, a δ of 1 is all that need be known.
    return np.maximum(0.0, product) * np.exp(np.minimum(back, 300.0))


def _solve(masses: Floats, first: int, interval: float, delta: float) -> float | None:
    """The smallest ε ≥ 0 with Σ_{l > ε} (1 − e^{ε−l}) mass(l) ≤ `delta`; None if below `first`."""
    weights = -np.expm1(-interval * np.arange(1, len(masses)))

    def left_at(index: int) -> float:
        rest = masses[index + 1 :]
        return float(rest @ weights[: len(rest)])

    low, high = max(0, -first), len(masses) - 1
    if left_at(low) <= delta:
        return 0.0 if first <= 0 else None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left_at(middle) > delta else (low, middle)
    # Between two grid points δ(ε) = A − e^ε B: solve it there.
    rest = masses[low + 1 :]
    total = float(rest.sum())
    discounted = float(rest @ (1 - weights[: len(rest)]))
    return (first + low) * interval + math.log((total - delta) / discounted)


def grid(first: int, count: int, interval: float) -> Floats:
    return interval * np.arange(first, first + count, dtype=np.float64)
