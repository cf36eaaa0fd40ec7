"""The statistics of the one-run audit: from correct guesses to a lower bound on the leak.

The game: each of m canaries is put into the training set by its own fair coin; the model is
trained once; the auditor sees the result and guesses r of the m coins, abstaining on the rest;
v guesses are right. A mechanism that is truly private makes a large v improbable, so a large v
refutes the claim at the chosen confidence.

Two bounds:

* `one_run_epsilon` refutes (epsilon, delta)-DP. It assumes nothing about the mechanism.
* `one_run_gdp` refutes mu-GDP, and is much tighter when the claim *is* Gaussian (`release_once`
  and `moments`). Its epsilon is that of the refuted mu: it says nothing about an
  (epsilon, delta) claim whose trade-off curve is not Gaussian (subsampled training, for one).
  For any other stated curve use `refutes_curve`.

`outcome.py` makes the guesses from scores, for several r, and pays for having looked often.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from scipy import special, stats

from dpfp_ray.privacy.accounting import gdp_epsilon

# About half-decades of m: few looks (each costs confidence), yet never far from the best r.
_GUESS_FRACTIONS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)
_FEWEST_GUESSES = 8  # with fewer, even all right proves next to nothing
_TOLERANCE = 1e-6  # absolute, on epsilon and mu; bounds are rounded down
_ROUNDING = 1e-9  # relative slack so that float error can never refute a true claim


@dataclass(frozen=True)
class GdpBound:
    """mu-GDP is refuted for every mu below `mu`; `epsilon` is what `mu` means at delta."""

    mu: float
    epsilon: float


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Largest epsilon such that (epsilon, delta)-DP is refuted; 0 if none is.

    Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run" (2023), the theorem for
    approximate DP. With q = e^eps / (1 + e^eps): beta = P[Bin(r, q) >= v],
    alpha = max over i in 1..v of P[v - i <= Bin(r, q) < v] / i, and the p-value is at most
    beta + 2 m delta alpha.
    """
    _check(canaries, guesses, correct, confidence)
    if not 0.0 <= delta < 1.0:
        raise ValueError(f"delta must be in [0, 1), got {delta}")
    if correct == 0:
        return 0.0
    significance = 1.0 - confidence
    # Where beta alone reaches the significance (Clopper-Pearson). Below it v lies in the upper
    # tail, where alpha too grows with epsilon, so the p-value crosses the significance once.
    upper = float(special.logit(special.betaincinv(correct, guesses - correct + 1, significance)))

    def refuted(epsilon: float) -> bool:
        return _p_value(canaries, guesses, correct, delta, epsilon) < significance

    return _largest(refuted, upper)


def _p_value(canaries: int, guesses: int, correct: int, delta: float, epsilon: float) -> float:
    """min(1, beta + 2 m delta alpha), without cancellation.

    Wrong guesses are counted rather than right ones: their probability 1 - q is known to full
    relative precision for large epsilon. The sums below `correct` are running sums of the
    probabilities themselves, never differences of distribution functions.
    """
    wrong, miss = guesses - correct, float(special.expit(-epsilon))
    beta = float(special.bdtr(wrong, guesses, miss))
    if delta == 0.0:
        return beta
    # P[v - i <= Bin < v] / i is the mean of the i probabilities below v. Past the bulk of the
    # distribution the sum no longer grows and the mean only falls: stop 12 deviations beyond.
    spread = 12.0 * math.sqrt(guesses * miss * (1.0 - miss)) + 40.0
    last = min(guesses, max(wrong, math.ceil(guesses * miss)) + math.ceil(spread))
    below = stats.binom.pmf(np.arange(wrong + 1, last + 1), guesses, miss)
    alpha = float(np.max(np.cumsum(below) / np.arange(1, len(below) + 1)))
    return min(1.0, beta + 2.0 * canaries * delta * alpha)


def one_run_gdp(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> GdpBound:
    """Largest mu such that mu-GDP is refuted, and its epsilon at delta; zeros if none is.

    Mahloujifar, Melis, Chaudhuri, "Auditing f-Differential Privacy in One Run" (2024), for
    f = G_mu, whose inverse blow-up is y -> Phi(Phi^-1(y) - mu). See `refutes_curve`.
    """
    if not 0.0 < delta < 1.0:  # no epsilon makes a Gaussian private with delta = 0
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    normal = NormalDist()

    def refuted(mu: float) -> bool:
        def inverse(y: float) -> float:
            return 0.5 * math.erfc((mu - normal.inv_cdf(y)) * math.sqrt(0.5))

        return refutes_curve(inverse, canaries, guesses, correct, confidence)

    upper = 1.0
    while refuted(upper):  # ends: as mu grows the inverse blow-up goes to 0 and refutes nothing
        upper *= 2.0
    mu = _largest(refuted, upper)
    return GdpBound(mu, gdp_epsilon(mu, delta))


def refutes_curve(
    inverse_blow_up: Callable[[float], float],
    canaries: int,
    guesses: int,
    correct: int,
    confidence: float = 0.95,
) -> bool:
    """Does so many correct guesses refute f-DP at this confidence?

    `inverse_blow_up` is the inverse of x -> 1 - f(x) for a symmetric trade-off curve f:
    the least probability an event can have if its probability under a neighbour is y.

    The theorem (Mahloujifar et al. 2024, with abstention). Let p_i be the probability of exactly i
    right guesses. Take a canary at random, and flip its coin: an output where it was among i right
    guesses becomes one where it is wrong and i - 1 are right. f-DP bounds the first by the second,
    and by concavity the average over canaries and coins too, so that for every j

        right_j := sum_{i >= j} i/m p_i  <=  1 - f(wrong_{j-1}),
        wrong_j := sum_{i >= j} (r - i)/m p_i.

    Suppose P[at least v right] >= tau = 1 - confidence. Then (right_v, wrong_v) is least when all
    of tau sits at v, and going down from v every wrong_i must be at least inverse(right_{i+1}),
    which forces p_i = m (wrong_i - wrong_{i+1}) / (r - i) and so raises right_i as well. Adding the
    least each time gives the least right_0 + wrong_0; but that sum is r/m. If the forced sum is
    larger, then P[at least v right] < tau: the claim is refuted. ("Least" is in the order
    d_right >= 0, d_right + d_wrong >= 0, d_right >= (i-1)/(r-i+1) d_wrong, which one step down
    preserves, and to which a surplus of mass at any count >= i belongs.)
    """
    _check(canaries, guesses, correct, confidence)
    tau = 1.0 - confidence
    right, wrong = tau * correct / canaries, tau * (guesses - correct) / canaries
    everything = guesses / canaries * (1.0 + _ROUNDING)
    for i in range(correct - 1, -1, -1):
        forced = inverse_blow_up(right) - wrong
        if forced <= 0.0:  # nothing has changed, so nothing will further down either
            return False
        wrong += forced
        right += i / (guesses - i) * forced
        if right + wrong > everything:
            return True
    return False


def guess_grid(canaries: int) -> tuple[int, ...]:
    """The numbers of guesses to look at: even, and a function of m alone, never of the scores."""
    counts = {2 * int(canaries * fraction / 2) for fraction in _GUESS_FRACTIONS}
    return tuple(sorted(c for c in counts if c >= _FEWEST_GUESSES)) or (canaries,)


def _largest(refuted: Callable[[float], bool], upper: float) -> float:
    """Bisect for the largest refuted value in [0, upper]; the value returned *is* refuted."""
    if upper <= 0.0 or not refuted(0.0):
        return 0.0
    lower = 0.0
    while upper - lower > _TOLERANCE:
        middle = (lower + upper) / 2
        lower, upper = (middle, upper) if refuted(middle) else (lower, middle)
    return lower


def _check(canaries: int, guesses: int, correct: int, confidence: float) -> None:
    if not 1 <= guesses <= canaries:
        raise ValueError(f"guesses must be in 1..canaries ({canaries}), got {guesses}")
    if not 0 <= correct <= guesses:
        raise ValueError(f"correct must be in 0..guesses ({guesses}), got {correct}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
