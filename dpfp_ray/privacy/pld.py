"""The privacy loss distribution of Poisson-sampled Gaussians, fast enough to search with.

The method is that of Doroshenko et al. 2022 ("Connect the Dots", as in dp-accounting, which the
tests hold this to): the hockey-stick curve of one release, evaluated on a grid of losses and joined
by chords in e^ε, is the curve of a discrete loss that is never smaller; n releases convolve it n
times. The result is an upper bound on ε at any grid.

What differs from dp-accounting, which took seconds to minutes at the paper's n = 202,016 and cannot
see a δ below the FFT's rounding error, about 1e-16 n:

* curves are evaluated as arrays, and each tail from its own side, so nothing cancels;
* losses are tilted before they are convolved, q(l) → q(l) e^{θl} / E e^{θl}: the convolution is
  centred at ε, rounding is relative to δ, and the FFT spans only the neighbourhood of ε.

Different mechanisms together (`joint_epsilon`): sampled Gaussians of any rates and noises, plain
Gaussians and pure ε-DP mechanisms are put on one grid of losses, each rounded up, and convolved by
the product of their spectra. The two directions (the record became ⊥, ⊥ became the record) are
composed each on its own; the larger ε counts. What a grid or a window leaves out is charged to δ:
the result is an upper bound at any grid.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.optimize import brentq, minimize_scalar
from scipy.special import expit, log_ndtr

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


# Relative error allowed to the discretisation (on the safe side), and the finest grid we can
# afford: an evaluation at this limit takes about a second and 300 MB.
TOLERANCE = 5e-4
MOST_POINTS = 1_000_000


def epsilon(
    p: float,
    n: int,
    noise_multiplier: float,
    delta: float,
    scale: float,
    adjacency: str = "add_remove",
    tolerance: float = TOLERANCE,
) -> float:
    """ε at `delta`, too large by a share of at most `tolerance`; `scale` is a rough guess of it.

    The error falls with the grid's interval h, as h where losses are finer than the grid and as h²
    where they are not; taken as h^1.5, two grids show what a third needs. If that cannot be
    afforded, the finest that can is used: the result may be larger, never less.
    """
    finest = Release(p, noise_multiplier, adjacency).span(TAIL_SHARE * delta / n) / MOST_POINTS
    interval = max(3e-4 * scale * math.sqrt(tolerance / TOLERANCE), finest)
    coarse = epsilon_at(p, n, noise_multiplier, delta, interval, adjacency)
    shrink = 3.0
    while interval / shrink >= finest:
        interval /= shrink
        fine = epsilon_at(p, n, noise_multiplier, delta, interval, adjacency)
        error = max(0.0, coarse - fine) / (shrink**1.5 - 1)
        if error <= tolerance * fine or 3 * fine / interval > MOST_POINTS:
            return fine
        shrink = min(4.0, max(1.5, error / (tolerance * fine))) if fine > 0 else 4.0
        coarse = fine
    return coarse


def epsilon_at(
    p: float,
    n: int,
    noise_multiplier: float,
    delta: float,
    interval: float,
    adjacency: str = "add_remove",
) -> float:
    one = Release(p, noise_multiplier, adjacency)
    forward, backward = connect_dots(one, TAIL_SHARE * delta / n, interval)
    at_least = composed_epsilon([(forward, n)], delta)
    return at_least if one.symmetric else composed_epsilon([(backward, n)], delta, at_least)


@dataclass(frozen=True)
class Release:
    """One release: its two hockey-stick curves, and how far its losses reach."""

    p: float
    noise_multiplier: float
    adjacency: str

    @property
    def symmetric(self) -> bool:
        return self.adjacency == "replace_one"

    def forward(self, eps: Floats) -> Floats:
        """H_{e^ε}(P‖Q), P the output with the record and Q without it (or with another)."""
        curve = replace_curve if self.symmetric else remove_curve
        return curve(eps, self.p, self.noise_multiplier)

    def backward(self, eps: Floats) -> Floats:
        """H_{e^ε}(Q‖P)."""
        curve = replace_curve if self.symmetric else add_curve
        return curve(eps, self.p, self.noise_multiplier)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - every grid of a search asks for the same
    def top(self, mass: float) -> float:
        return root_of_decreasing(self.forward, mass)

    def bottom(self, mass: float) -> float:
        """The same in the other direction; no outcome is less likely by more than 1 − p."""
        return self.top(mass) if self.symmetric else -math.log1p(-self.p)

    def span(self, mass: float) -> float:
        return self.top(mass) + self.bottom(mass)


def connect_dots(release: Release, tail: float, interval: float) -> tuple[Losses, Losses]:
    """The loss of P against Q and of Q against P, on multiples of `interval`, rounded up.

    With δ_i the curve at loss i·h, the mass under P at i is (Doroshenko et al. 2022, Algorithm 1)
    (δ_{i−1} − δ_i)/(1 − e^{−h}) − (δ_i − δ_{i+1})/(e^h − 1), and that under Q is e^{−ih} times it.
    Losses above 0 are taken from the forward curve, those below from the backward one, where
    each is small; the masses of the two directions are those of one pair (P, Q) of distributions.
    """
    up_losses = grid(0, math.ceil(release.top(tail) / interval) + 2, interval)
    down_losses = grid(0, math.ceil(release.bottom(tail) / interval) + 2, interval)
    up, down = release.forward(up_losses), release.backward(down_losses)
    up_drops, down_drops = -np.diff(up), -np.diff(down)
    centre = 1 - up[0] - (up_drops[0] + down_drops[0]) / math.expm1(interval)
    above, below = _dots(up_drops, interval), _dots(down_drops, interval)
    with_record = np.concatenate(
        [(below * np.exp(-down_losses[1:]))[::-1], [max(0.0, centre)], above]
    )
    without = np.concatenate([(above * np.exp(-up_losses[1:]))[::-1], [max(0.0, centre)], below])
    return (
        Losses(interval, -len(below), with_record, float(up[-1])),
        Losses(interval, -len(above), without, float(down[-1])),
    )


def _dots(drops: Floats, interval: float) -> Floats:
    masses = drops / -math.expm1(-interval)
    masses[:-1] -= drops[1:] / math.expm1(interval)
    return np.maximum(0.0, masses)


def remove_curve(eps: Floats, p: float, noise_multiplier: float) -> Floats:
    """H_{e^ε}(P‖Q), P = (1−p) N(0, σ²) + p N(1, σ²), Q = N(0, σ²).

    P − e^ε Q = p (N(1) − e^{ε'} N(0)) with e^{ε'} = 1 + (e^ε − 1)/p, where that is positive.
    """
    divergence = -np.expm1(np.minimum(eps, 0.0))
    inside = eps > math.log1p(-p)
    e = eps[inside]
    # log((e^ε − 1 + p)/p), which neither overflows for large ε nor cancels for small ones.
    shifted = np.where(
        e > 1, e + np.log1p(-(1 - p) * np.exp(-e)), np.log(np.expm1(np.minimum(e, 1)) + p)
    ) - math.log(p)
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


def replace_curve(eps: Floats, p: float, noise_multiplier: float) -> Floats:
    """H_{e^ε}(P‖Q) for ε ≥ 0, P and Q = (1−p) N(0, σ²) + p N(±1, σ²): a record and its negative.

    With μ = 1/σ, P/Q grows with x and is e^ε at xμ = ε/2 + asinh((1−p)/p e^{μ²/2} sinh(ε/2)).
    """
    mu = 1 / noise_multiplier
    with np.errstate(divide="ignore"):  # log 0 = −∞ at ε = 0 is meant
        log_growth = eps + np.log(-np.expm1(-eps)) + math.log1p(-p) - math.log(p)
    log_sinh = log_growth - eps / 2 + mu * mu / 2 - math.log(2)
    small = np.arcsinh(np.exp(np.minimum(log_sinh, 20.0)))
    asinh = np.where(log_sinh > 20, log_sinh + math.log(2), small)
    x = (eps / 2 + asinh) / mu
    above = log_ndtr(mu - x)
    # At most 1 together, whatever rounding makes of exponents of 1e20.
    opposite = np.exp(np.minimum(0.0, eps + log_ndtr(-mu - x) - above))
    absent = np.exp(np.minimum(0.0, log_growth + log_ndtr(-x) - above))
    return np.clip(p * np.exp(above) * (1 - opposite - absent), 0.0, 1.0)


def gaussian_curve(eps: Floats, noise_multiplier: float) -> Floats:
    """δ(ε; μ) of one Gaussian release, μ = 1/`noise_multiplier` (Balle & Wang 2018)."""
    mu = 1 / noise_multiplier
    above = log_ndtr(-eps / mu + mu / 2)
    below = eps + log_ndtr(-eps / mu - mu / 2)
    return -np.exp(above) * np.expm1(np.minimum(0.0, below - above))


def root_of_decreasing(curve: Callable[[Floats], Floats], mass: float) -> float:
    """Where `curve` has fallen to `mass`; 0 if it never was above."""

    def excess(eps: float) -> float:
        return math.log(max(float(curve(np.array([eps]))[0]), 1e-300)) - math.log(mass)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high, rtol=1e-6))


# A mechanism's losses on the grid with this interval and this share of δ left out, both directions.
OnGrid = Callable[[float, float], tuple[Losses, Losses]]


class PlainGaussian(Release):
    """A Gaussian release without sampling; both directions are alike."""

    def __init__(self, noise_multiplier: float) -> None:
        super().__init__(p=1.0, noise_multiplier=noise_multiplier, adjacency="replace_one")

    def forward(self, eps: Floats) -> Floats:
        return gaussian_curve(eps, self.noise_multiplier)

    backward = forward


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


def joint_epsilon(parts: Sequence[tuple[OnGrid, int]], delta: float, scale: float) -> float:
    """ε at `delta` of all `parts`, each (mechanism, count); `scale` is a rough guess of it.

    Grids are refined until two agree to `TOLERANCE`, or would need more memory than `MOST_POINTS`
    allow (about 300 MB); coarser grids give a larger ε, never a smaller one.
    """
    interval = 3e-4 * scale
    coarse = joint_epsilon_at(parts, delta, interval)
    while True:
        interval /= 3.0
        if max(_points(parts, delta, interval), 3 * coarse / interval) > MOST_POINTS:
            return coarse
        fine = joint_epsilon_at(parts, delta, interval)
        if coarse - fine <= TOLERANCE * fine:
            return min(coarse, fine)
        coarse = fine


def joint_epsilon_at(parts: Sequence[tuple[OnGrid, int]], delta: float, interval: float) -> float:
    tail = TAIL_SHARE * delta / sum(count for _, count in parts)
    pairs = [(on_grid(tail, interval), count) for on_grid, count in parts]
    found = composed_epsilon([(forward, count) for (forward, _), count in pairs], delta)
    return composed_epsilon([(backward, count) for (_, backward), count in pairs], delta, found)


def _points(parts: Sequence[tuple[OnGrid, int]], delta: float, interval: float) -> float:
    """How many points the widest mechanism needs at `interval`, seen on a grid 27 times coarser."""
    tail = TAIL_SHARE * delta / sum(count for _, count in parts)
    return max(27 * len(on_grid(tail, 27 * interval)[0].masses) for on_grid, _ in parts)
