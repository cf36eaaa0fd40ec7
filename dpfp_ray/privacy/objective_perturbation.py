"""What objective perturbation costs (Redberg, Koskela & Wang 2023), with approximate minima.

θ* minimises J(θ) = Σ ℓ(θ; x, y) + λ/2 ‖θ‖² + ⟨b, θ⟩ with b ~ N(0, σ²I) and ‖x‖ ≤ 1; released is a
point with ‖∇J‖ ≤ τ plus N(0, σ_out² I). `docs/privacy_objpert.md` has the proofs. One record added
or removed changes the log density of what is released by at most

    a + s²/2 + V + N(m²/2, m²),

    a   the change of ∇²J's determinant
    s   L/σ, L the most that one record's gradient can measure
    V   ≥ 0, what b says along the record's x; independent of the last term
    m   2τ/(λ σ_out), the release's last step: a Gaussian of sensitivity 2τ/λ

Two classes (logistic loss, L = 1, β = 1/4): V = s|Z|, a = −log(1 − β/λ), both as published.
K > 2 classes (softmax, all classes jointly, L = √2): V = (max_{c≠y} Z_c − Z_y)₊ / σ, the Z being
independent standard Gaussians, a = (K − 1) log(1 + 1/(Kλ)): ours, proved there. V grows with
√log K, where one-against-the-rest would have to compose K releases.

Persons whose loss is the mean of several rows': V is at most the mean of the rows' own, of which
a tail bound is known (`_tail_of_mean`) and the same Rényi moments hold; a = (1 − 1/K)/λ for K > 2.
"""

import functools
import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import simpson
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from dpfp_ray.privacy.accounting import gdp_delta, gdp_mu_of_budget, renyi_epsilon
from dpfp_ray.system.errors import UserError

Floats = NDArray[np.float64]

BETA = 0.25  # the largest second derivative of log(1 + e^−t)
# For two classes λ has to exceed β. For more there is no such limit, but a smaller λ regularises
# nothing, and is not worth an ill-conditioned problem.
LEAST_RIDGE = BETA * (1 + 1e-6)
# σ beyond the Gaussian mechanism's: a little more noise allows a far smaller λ. After DESIGN 3.7.
MORE_NOISE = 1.2
# Where δ is large (D of some hundreds) that is hardly more than the σ which no λ can go below, and
# λ would be without bounds: up to CLOSE times that σ, MORE_THAN_LEAST times it is taken instead.
CLOSE, MORE_THAN_LEAST = 1.01, 1.05
# m/s. The last step's share of the squared privacy loss is its square: a millionth.
OUTPUT_SHARE = 1e-3
GRADIENT_TOLERANCE = 1e-8  # τ: far above the rounding of a sum over millions of rows
ORDERS = (*np.geomspace(1.01, 512, 160).tolist(),)  # of Rényi divergences, to convert from
LEAD_REACH = 120.0


@dataclass(frozen=True)
class ObjectivePerturbation:
    """One release. `ridge` is λ, `output_mu` is m."""

    ridge: float
    sigma: float
    classes: int = 2
    output_mu: float = 0.0
    tau: float = GRADIENT_TOLERANCE
    persons: bool = field(default=False, repr=False)

    @property
    def determinant_cost(self) -> float:
        """a, in nats."""
        if self.classes == 2:
            return math.inf if self.ridge <= BETA else -math.log1p(-BETA / self.ridge)
        if self.persons:  # of any rank, so bounded by the trace alone
            return (1 - 1 / self.classes) / self.ridge
        return (self.classes - 1) * math.log1p(1 / (self.classes * self.ridge))

    @property
    def output_sigma(self) -> float:
        """σ_out: two points with ‖∇J‖ ≤ τ of one λ-strongly convex J are 2τ/λ apart at most."""
        if self.output_mu == 0:
            return 0.0
        return 2 * self.tau / (self.ridge * self.output_mu)

    def delta(self, epsilon: float) -> float:
        """δ(ε) of the whole release, its last step included."""
        rest = epsilon - self.determinant_cost
        return profile(rest, self.sigma, self.output_mu, self.classes, self.persons)

    def rdp(self, order: float) -> float:
        """A bound on the Rényi divergence of order α > 1, either way."""
        s = lipschitz(self.classes) / self.sigma
        t = order - 1
        if self.classes == 2:
            # E e^{t s|Z|} = 2 e^{t²s²/2} Φ(t s)
            log_moment = math.log(2) + (t * s) ** 2 / 2 + float(log_ndtr(t * s))
        else:
            log_moment = _softmax_log_moment(t / self.sigma, self.classes)
        own = self.determinant_cost + s**2 / 2 + log_moment / t
        return own + order * self.output_mu**2 / 2

    def zcdp(self) -> tuple[float, float]:
        """(ξ, ρ) with RDP(α) ≤ ξ + ρα for every α: what composes with other mechanisms.

        V/s is a 1-Lipschitz function of standard Gaussians, so E e^{tV} ≤ e^{t E V + t²s²/2}.
        """
        s = lipschitz(self.classes) / self.sigma
        if self.classes == 2:
            mean = s * math.sqrt(2 / math.pi)
        else:
            mean = mean_of_lead(self.classes) / self.sigma
        return self.determinant_cost + mean, (s**2 + self.output_mu**2) / 2

    def epsilon(self, delta: float) -> float:
        """The ε at which the release has this δ: its own profile, no accountant's."""
        if math.isinf(self.determinant_cost):
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        top = 1.0
        while self.delta(top) > delta:
            top *= 2
        return float(brentq(lambda eps: _log(self.delta(eps)) - _log(delta), 0.0, top, xtol=1e-12))

    def rdp_epsilon(self, delta: float) -> float:
        return min(renyi_epsilon(order, self.rdp(order), delta) for order in ORDERS)


def lipschitz(classes: int) -> float:
    """L: ‖∇ℓ‖ ≤ |σ(−yθ·x)| ‖x‖ < 1 for two classes, ≤ ‖softmax − e_y‖ ‖x‖ < √2 for more."""
    return 1.0 if classes == 2 else math.sqrt(2)


def calibrate(
    epsilon: float, delta: float, classes: int = 2, persons: bool = False
) -> ObjectivePerturbation:
    """The release for a budget: σ, and the smallest λ for which this σ meets it.

    σ = 1.2 σ_G, with σ_G the Gaussian mechanism's for sensitivity L. δ depends on ε − a alone, so
    the largest a that the budget leaves is one root, and λ follows from it. The budget is that of
    the whole release: its last step is in δ here, and takes about a millionth of 1/σ².
    """
    if not 0 < delta < 1 or epsilon <= 0:
        raise UserError(f"objpert needs epsilon > 0 and 0 < delta < 1, not {epsilon} and {delta}")
    gaussian = lipschitz(classes) / gdp_mu_of_budget(epsilon, delta)
    sigma, least = MORE_NOISE * gaussian, least_sigma(epsilon, delta, classes, persons)
    if sigma < CLOSE * least:
        sigma = MORE_THAN_LEAST * least
    output_mu = OUTPUT_SHARE * lipschitz(classes) / sigma

    def over(rest: float) -> float:
        return _log(profile(rest, sigma, output_mu, classes, persons)) - _log(delta)

    rest = float(brentq(over, 0.0, epsilon, xtol=1e-14, rtol=1e-13))
    # Rounding must not put it over budget: a ten-millionth of `a` is given away.
    cost = (epsilon - rest) * (1 - 1e-7)
    ridge = max(_ridge_of_cost(cost, classes, persons), LEAST_RIDGE)
    found = ObjectivePerturbation(ridge, sigma, classes, output_mu, persons=persons)
    assert found.delta(epsilon) <= delta, "calibration is over budget"
    return found


def least_sigma(rest: float, delta: float, classes: int = 2, persons: bool = False) -> float:
    """The σ that meets (`rest`, δ) if a is 0. With `rest` = ε it is that for λ → ∞: the least."""
    start = lipschitz(classes) / gdp_mu_of_budget(rest, delta)

    def over(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        spent = profile(rest, sigma, OUTPUT_SHARE * lipschitz(classes) / sigma, classes, persons)
        return _log(spent) - _log(delta)

    # The Gaussian's own σ is too small, if at all off: V is never below its loss's noise.
    low, high = math.log(start) - 1e-6, math.log(start) + 0.25
    while over(high) > 0:
        high += 0.25
    return math.exp(float(brentq(over, low, high, xtol=1e-13)))


def _ridge_of_cost(cost: float, classes: int, persons: bool = False) -> float:
    """The λ whose determinant costs a = `cost`."""
    if classes == 2:
        return BETA / -math.expm1(-cost)
    if persons:
        return (1 - 1 / classes) / cost
    return 1 / (classes * math.expm1(cost / (classes - 1)))


def profile(
    rest: float, sigma: float, output_mu: float, classes: int, persons: bool = False
) -> float:
    """E (1 − e^{rest − s²/2 − V − N(m²/2, m²)})₊ with `rest` = ε − a.

    Given V, the mean over the last step is the Gaussian's own δ_G(e − V; m), e = rest − s²/2. Its
    derivative by e is −e^e Φ(−e/m − m/2), so with P[V > u] the mean over V is

        δ_G(e; m) + ∫₀^∞ P[V > u] e^{e−u} Φ((u − e)/m − m/2) du,

    an integral of a smooth function that falls faster than e^{−u}.
    """
    if math.isinf(rest):
        return 1.0
    s = lipschitz(classes) / sigma
    e = rest - s**2 / 2
    start = max(e, 0.0)
    if output_mu > 0:
        first = gdp_delta(e, output_mu)
        edges = [max(e - 12 * output_mu, 0.0), max(e + 12 * output_mu, 0.0)]
    else:
        first = max(-math.expm1(e), 0.0)
        edges = [start]
    # P[V > u] falls like a Gaussian of deviation s: after `reach` both factors are below e^−45.
    reach = min(45.0, math.sqrt(start**2 + 90 * s**2) - start)
    if persons:
        reach += mean_of_v(classes) / sigma
    edges += list(edges[-1] + reach * np.linspace(0, 1, 9)[1:])
    if persons:  # below its mean the tail is taken as 1, and jumps there
        edges = sorted({*edges, min(max(mean_of_v(classes) / sigma, edges[0]), edges[-1])})
    total = 0.0
    nodes, weights = np.polynomial.legendre.leggauss(32)
    for left, right in itertools.pairwise(edges):
        u = (left + right) / 2 + (right - left) / 2 * nodes
        step = ndtr((u - e) / output_mu - output_mu / 2) if output_mu > 0 else 1.0
        tail = _tail_of_mean(u, sigma, classes) if persons else _tail(u, sigma, classes)
        values = tail * np.exp(e - u) * step
        total += float(weights @ values) * (right - left) / 2
    return min(first + total, 1.0)


def _tail(u: Floats, sigma: float, classes: int) -> Floats:
    if classes == 2:
        result: Floats = 2 * ndtr(-u * sigma)
        return result
    return np.exp(log_tail_of_lead(u * sigma, classes))


def _tail_of_mean(u: Floats, sigma: float, classes: int) -> Floats:
    """P[V > u] ≤ Φ((E₁ − uσ)/L) above E₁/σ, E₁ the mean of one row's part (in units of 1/σ).

    V σ is a mean of convex functions of standard Gaussians, L-Lipschitz in them, so it exceeds its
    median by t with a probability of at most Φ(−t/L) (Borell; Sudakov & Tsirelson 1974), and its
    median is at most its mean (Kwapień 1994), which is at most E₁.
    """
    over = u * sigma - mean_of_v(classes)
    return np.where(over > 0, ndtr(-over / lipschitz(classes)), 1.0)


def mean_of_v(classes: int) -> float:
    """E₁ for one row: E Z₊ for two classes (the sign of y p is fixed), E M for more."""
    return 1 / math.sqrt(2 * math.pi) if classes == 2 else mean_of_lead(classes)


def mean_of_lead(classes: int) -> float:
    u, log_tail = _lead(classes)
    return float(simpson(np.exp(log_tail), x=u))


def log_tail_of_lead(m: Floats, classes: int) -> Floats:
    """log P[max_{c≠y} Z_c − Z_y > m] = log ∫ φ(z) (1 − Φ(z + m)^{K−1}) dz, by the trapezium rule.

    The integrand is a Gaussian bump between −m/2 and −m; the rule is exact to rounding on it. All
    is measured against the largest term, so that far tails do not vanish.
    """
    z = np.linspace(-12.0, 12.0, 481) - m[:, None] / 2
    kept = (classes - 1) * log_ndtr(z + m[:, None])
    # log(1 − e^kept); where kept rounds to 0 it is (K − 1) Φ(−z − m)
    upper = np.log(classes - 1) + log_ndtr(-z - m[:, None])
    lost = np.where(kept > -1e-8, upper, np.log(-np.expm1(np.minimum(kept, -1e-300))))
    logs = lost - z**2 / 2 - math.log(2 * math.pi) / 2
    top = logs.max(axis=1)
    step = 24.0 / 480
    result: Floats = top + np.log(np.exp(logs - top[:, None]).sum(axis=1) * step)
    return np.minimum(result, 0.0)


@functools.cache
def _lead(classes: int) -> tuple[Floats, Floats]:
    """M = (max_{c≠y} Z_c − Z_y)₊ as a table: points u, log P[M > u]."""
    u = np.linspace(0.0, LEAD_REACH, 1201)
    return u, log_tail_of_lead(u, classes)


def _softmax_log_moment(t: float, classes: int) -> float:
    """log E e^{tM} = log(1 + t ∫₀^∞ e^{tu} P[M > u] du)."""
    if 2 * t + 20 > LEAD_REACH:  # e^{tu − u²/4} is largest at 2t: outside of the table
        return math.inf
    u, log_tail = _lead(classes)
    logs = t * u + log_tail
    top = max(float(logs.max()), 0.0)
    integral = float(simpson(np.exp(logs - top), x=u))
    return top + math.log(math.exp(-top) + t * integral)


def _log(value: float) -> float:
    return math.log(max(value, 1e-320))
