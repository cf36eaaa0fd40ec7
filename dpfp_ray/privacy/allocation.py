"""The privacy loss of random allocation: in each epoch every record is in exactly one of t batches.

The batch is chosen uniformly, for each record by itself. Feldman & Shenfeld (arXiv 2502.08202,
2602.17284) show that the t noisy sums of an epoch, taken one after the other, are dominated by

    P = (1/t) Σ_i N(e_i, σ² I_t)   against   Q = N(0, σ² I_t),

and E epochs by the E-fold product. Under Q the likelihood ratio is a mean of t independent
log-normal numbers of mean 1, A = (Y_1 + … + Y_t)/t with Y_i = exp(z_i/σ − 1/(2σ²)), so that

    H_{e^ε}(P‖Q) = E (A − e^ε)_+   and   H_{e^ε}(Q‖P) = E (1 − e^ε A)_+ .

Both are means of convex functions of A. So it is enough to know a number that is larger than A in
convex order: the mass of each Y between two points of a grid goes to these two points, its mean
kept (`_on_grid`). That spreads each Y, sums of independent spread numbers are spread too (Shaked &
Shanthikumar 2007, theorem 3.A.12), and the sum's law is one power of one Fourier transform. What
lies above the grid is charged in full. The result is an upper bound at any grid.

The Rényi curve is exact: E A^α at whole orders is a coefficient of a power series, and
E A^{1−α} an integral over the Laplace transform of Y.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import gammaln, logsumexp, ndtr, ndtri

from dpfp_ray.privacy import pld

Floats = NDArray[np.float64]

# Share of δ for what lies above the grid. More than for Poisson samples, whose curves have a closed
# form: below about 1e-10 here is the rounding of the transform.
TAIL_SHARE = 1e-3
LEAST_POINTS, MOST_POINTS = 2**18, 2**22
REACHES = 8
LARGEST_ORDER = 600  # of the Rényi curve


class Epoch(pld.Release):
    """One epoch of `batches` noisy sums, each record in one of them: a `pld.Release`."""

    def __init__(self, batches: int, noise_multiplier: float, tail: float) -> None:
        super().__init__(p=1 / batches, noise_multiplier=noise_multiplier, adjacency="zero_out")
        self.law = Law(batches, noise_multiplier, tail)

    def forward(self, eps: Floats) -> Floats:
        return self.law.forward(eps)

    def backward(self, eps: Floats) -> Floats:
        return self.law.backward(eps)

    def bottom(self, mass: float) -> float:
        return pld.root_of_decreasing(self.backward, mass)


class Law:
    """The laws of A under P and under Q, spread in convex order on a grid."""

    def __init__(self, batches: int, noise_multiplier: float, tail: float) -> None:
        self.batches, s = batches, 1 / noise_multiplier
        # P and Q give Y above `top` less than tail/2 in t tries.
        top = math.exp(s * s / 2 - s * float(ndtri(min(0.4, tail / (4 * batches)))))
        deviation = math.sqrt(math.expm1(min(s * s, 300.0)))
        reach = 2 * top + batches + 6 * deviation * math.sqrt(batches)
        wanted = reach / (0.02 * min(deviation, 1.0))
        size = fft.next_fast_len(int(min(MOST_POINTS, max(LEAST_POINTS, wanted))), real=True)
        for _ in range(REACHES):  # whatever is above is charged, so this may end early
            width = reach / size
            masses = _on_grid(width, math.ceil(top / width), s)
            above = _above(masses, width, batches, size)
            if above < tail / 4:
                break
            reach *= 1.4
        values = width * np.arange(len(masses))
        every = fft.rfft(masses, size)
        # P's law is that of Q with one Y by its size: E A f(A) = E Y_1 f(A), the Y being alike.
        one_by_size = fft.rfft(masses * values, size)
        without = np.maximum(0.0, fft.irfft(every**batches, size))
        with_record = np.maximum(0.0, fft.irfft(every ** (batches - 1) * one_by_size, size))
        kept = masses.sum()
        self.left_out_without = 1 - kept**batches
        self.left_out = 1 - kept ** (batches - 1) * float(masses @ values) + above
        places = width * np.arange(size) / batches  # of A
        # Reversed sums: each tail is added up from its small end.
        self.call = _from_above(with_record), _from_above(_divided(with_record, places))
        self.put = np.cumsum(without), np.cumsum(without * places)
        self.places = places

    def forward(self, eps: Floats) -> Floats:
        """E (A − k)_+ at k = e^ε, and what lies above the grid."""
        k = np.exp(eps)
        first = np.searchsorted(self.places, k, side="right")
        curve = self.call[0][first] - k * self.call[1][first]
        return np.clip(curve + self.left_out, 0.0, 1.0)

    def backward(self, eps: Floats) -> Floats:
        """E (1 − k A)_+ at k = e^ε."""
        k = np.exp(eps)
        last = np.searchsorted(self.places, 1 / k, side="left") - 1
        curve = self.put[0][last] - k * self.put[1][last]
        return np.clip(curve + self.left_out_without, 0.0, 1.0)


def _on_grid(width: float, top: int, s: float) -> Floats:
    """Masses at 0, width, …, top·width of a Y between 0 and the last of these, spread in convex
    order: of each cell's mass m₀ and mean m₁ the upper end gets (m₁ − lower m₀)/width."""
    edges = width * np.arange(top + 1)
    with np.errstate(divide="ignore"):
        z = np.log(edges) / s + s / 2
    mass, mean = _differences(z), _differences(z - s)
    up = np.clip((mean - edges[:-1] * mass) / width, 0.0, mass)
    masses = np.zeros(top + 1)
    masses[:-1] += mass - up
    masses[1:] += up
    return masses


def _differences(z: Floats) -> Floats:
    """Φ(z_{j+1}) − Φ(z_j), each from the side where both are small."""
    return np.where(z[:-1] > 0, ndtr(-z[:-1]) - ndtr(-z[1:]), ndtr(z[1:]) - ndtr(z[:-1]))


def _above(masses: Floats, width: float, batches: int, size: int) -> float:
    """Chernoff's bound on P's mass of the sum at or above `size`, where the transform wraps."""
    values = width * np.arange(len(masses))
    best = 1.0
    for power in np.linspace(1.0, 60.0, 24):
        theta = power / values[-1]
        growth = np.exp(theta * values)
        each, largest = float(masses @ growth), float((masses * values) @ growth)
        log = (batches - 1) * math.log(each) + math.log(largest) - theta * width * size
        best = min(best, math.exp(min(0.0, log)))
    return best


def _from_above(masses: Floats) -> Floats:
    return np.append(np.cumsum(masses[::-1])[::-1], 0.0)


def _divided(masses: Floats, places: Floats) -> Floats:
    return np.divide(masses, places, out=np.zeros_like(masses), where=places > 0)


def on_grid(batches: int, noise_multiplier: float, delta: float) -> pld.OnGrid:
    """One epoch for `pld.joint_epsilon_at`; `delta` is what all epochs together may leave out."""

    def losses(_: float, interval: float) -> tuple[pld.Losses, pld.Losses]:
        tail = TAIL_SHARE * delta
        return pld.connect_dots(_epoch(batches, noise_multiplier, tail / 2), tail, interval)

    return losses


@functools.lru_cache(maxsize=4)
def _epoch(batches: int, noise_multiplier: float, tail: float) -> Epoch:
    return Epoch(batches, noise_multiplier, tail)


def epsilon(
    batches: int, epochs: int, noise_multiplier: float, delta: float, scale: float
) -> float:
    """ε at `delta` of `epochs` epochs: an upper bound, tight to about a permille where its `scale`
    is a rough guess of it."""
    part = on_grid(batches, noise_multiplier, delta / epochs)
    return pld.joint_epsilon([(part, epochs)], delta, scale)


# --- Rényi --------------------------------------------------------------------------------------

ORDERS = tuple(float(order) for order in (*range(2, 33), 40, 48, 64, 96, 128, 192, 256))


def rdp_epsilon(batches: int, epochs: int, noise_multiplier: float, delta: float) -> float:
    """ε by Rényi divergences: an upper bound, not tight."""
    from dpfp_ray.privacy.accounting import renyi_epsilon

    curve = renyi_curve(batches, noise_multiplier, ORDERS)
    return min(
        renyi_epsilon(order, epochs * value, delta)
        for order, value in zip(ORDERS, curve, strict=True)
    )


@functools.lru_cache(maxsize=256)
def renyi_curve(
    batches: int, noise_multiplier: float, orders: tuple[float, ...]
) -> tuple[float, ...]:
    """The larger Rényi divergence of the two directions, of one epoch, at each order.

    Orders that are not whole have the value of the next whole one, which is larger; ∞ above
    `LARGEST_ORDER`.
    """
    whole = [math.ceil(order) for order in orders]
    moments = _log_moments(
        batches, 1 / noise_multiplier, max([2, *(n for n in whole if n <= LARGEST_ORDER)])
    )

    def value(order: int) -> float:
        if order > LARGEST_ORDER:
            return math.inf
        inverse = _log_inverse_moment(batches, 1 / noise_multiplier, order - 1)
        return max(0.0, float(moments[order]), inverse) / (order - 1)

    return tuple(value(order) for order in whole)


def _log_moments(batches: int, s: float, largest: int) -> Floats:
    """log E A^n for n = 0 … `largest`: n! times the coefficients of (Σ_k E Y^k x^k/k!)^t, / t^n."""
    n = np.arange(largest + 1)
    base = n * (n - 1) * s * s / 2 - gammaln(n + 1)
    power, left = np.full(largest + 1, -np.inf), batches
    power[0] = 0.0
    while left:
        if left % 2:
            power = _log_product(power, base)
        left //= 2
        base = _log_product(base, base) if left else base
    return np.asarray(power + gammaln(n + 1) - n * math.log(batches))


def _log_product(a: Floats, b: Floats) -> Floats:
    """Logarithms of the coefficients of a product of two series that are given likewise."""
    return np.array([logsumexp(a[: n + 1] + b[n::-1]) for n in range(len(a))])


def _log_inverse_moment(batches: int, s: float, r: float) -> float:
    """log E A^{−r} = log ∫ u^{r−1} φ(u/t)^t du/Γ(r), φ the Laplace transform of Y.

    Both integrals are over analytic functions that vanish at the ends, on the logarithm's scale:
    there the trapezoidal rule converges faster than any power of its step. Where A^{−r} weighs
    most, each z is about −r s/t and log u about r s²/t: the ranges reach past both.
    """
    shift = 1.5 * r * s / batches
    z = np.arange(-12.0 - shift, 12.0, 0.025)
    log_density = -z * z / 2 + math.log(0.025 / math.sqrt(2 * math.pi))
    y = np.exp(s * z - s * s / 2)

    def log_integrand(x: Floats) -> Floats:
        return r * x + batches * np.array(
            [logsumexp(log_density - math.exp(place) / batches * y) for place in x]
        )

    x = np.linspace(math.log(r) - 40.0, math.log(r) + s * (2 * s + shift) + 20.0, 400)
    coarse = log_integrand(x)
    near = np.flatnonzero(coarse > coarse.max() - 45.0)
    x = np.linspace(x[max(0, near[0] - 1)], x[min(len(x) - 1, near[-1] + 1)], 1200)
    return float(logsumexp(log_integrand(x)) + math.log(x[1] - x[0]) - float(gammaln(r)))
