"""From scores and coins to an outcome: what right guesses prove, beside what the plan states; and,
before anything is trained, whether they could prove anything.

The game: each of m canaries is put into the training set by its own fair coin; the model is
trained once; the auditor sees the result and guesses r of the m coins, abstaining on the rest;
v guesses are right. A mechanism that is truly private makes a large v improbable, so a large v
refutes the claim at the chosen confidence. `one_run_epsilon` refutes (ε, δ)-DP and assumes nothing
about the mechanism; `one_run_gdp` refutes μ-GDP, which is much tighter where the claim *is*
Gaussian, and says nothing about any other; `refutes_curve` is for any other stated curve.

A claim is what a plan states, in a form that guesses can refute; it follows from the plan alone:

gaussian          releases without sampling (`release_once`, `moments`, full batches) state a
                  Gaussian trade-off curve, and are held to all of it
sampled_gaussian  `dpsgd` and `rgp` state the curve of their accountant (pld), of which (ε, δ)
                  is one point; guesses are far more likely to contradict the rest of it
epsilon_delta     everything else states (ε, δ) and no more
none              nothing is stated

If every guess were right and the claim would still stand, nothing can come of the audit. Mostly δ
is too large: (ε, δ) lets the whole record show with chance δ, which m canaries multiply.

DIR/audit.json says what an audit has begun with, and at its end what it found. It holds the two
seeds that repeat the audit to the bit, so it is its owner's only, and a checksum: a seed of which
one digit has changed would be another audit's.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy import special, stats

from dpfp_ray.auditing.canaries import Bools
from dpfp_ray.auditing.scores import Floats
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting, pld
from dpfp_ray.privacy.accounting import gdp_epsilon, joint_mu
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.statement import guarantee
from dpfp_ray.system.cache import cached_number, explained
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import PRIVATE, read_json, to_json, write_json

# About half-decades of m: few looks (each costs confidence), yet never far from the best r.
_GUESS_FRACTIONS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)
_FEWEST_GUESSES = 8  # with fewer, even all right proves next to nothing
_TOLERANCE = 1e-6  # absolute, on epsilon and mu; bounds are rounded down
_ROUNDING = 1e-9  # relative slack so that float error can never refute a true claim
# Where "in" shows for sure but "out" looks like "in and never drawn", only the highest scores are
# guessed, all of them "in". About half of the canaries are in, and a few of those never drawn.
IN_ONLY_FRACTIONS = (0.45, 0.4, 0.3, 0.2, 0.1, 0.05)
# Round numbers from the largest down: the first that does is the one to name.
DELTAS = [lead * 10.0**-power for power in range(2, 13) for lead in (5, 2, 1)]
MORE_CANARIES = (2, 4, 8, 16)
# Where a sampled Gaussian's curve is computed; between these points it is bounded by them.
CURVE_DELTAS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35)
# Bounds are looked for among σ 2^(k/4): from a quarter of the stated noise to four times as much.
STEPS_PER_OCTAVE, OCTAVES = 4, 2
TOLERANCE = 0.02
AUDIT = "audit.json"
SCHEMA = 2
SEEDS = ("seed", "membership_seed")
Record = dict[str, Any]


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


@dataclass(frozen=True)
class Claim:
    """(ε, δ) and no more; `canaries`, `guesses`, `correct` and `confidence` are as above."""

    plan: Plan
    delta: float

    @property
    def kind(self) -> str:
        return "epsilon_delta" if self.plan.private else "none"

    def bound(self, canaries: int, guesses: int, correct: int, confidence: float) -> float:
        """A lower bound on ε at `delta`: every smaller ε of this kind of claim is refuted."""
        return one_run_epsilon(canaries, guesses, correct, self.delta, confidence)

    def refuted(self, canaries: int, guesses: int, correct: int, confidence: float) -> bool:
        stated = self.plan.epsilon
        return stated is not None and self.bound(canaries, guesses, correct, confidence) > stated


class Gaussian(Claim):
    kind = "gaussian"

    @property
    def mu(self) -> float:
        """μ of the budget; with randomised labels that of the text, as only texts are in or out."""
        assert self.plan.epsilon is not None
        if self.plan.label_epsilon:
            return joint_mu(self.plan.epsilon, self.plan.label_epsilon, self.delta)
        return accounting.gdp_mu_of_budget(self.plan.epsilon, self.delta)

    def bound(self, canaries: int, guesses: int, correct: int, confidence: float) -> float:
        return one_run_gdp(canaries, guesses, correct, self.delta, confidence).epsilon

    def refuted(self, canaries: int, guesses: int, correct: int, confidence: float) -> bool:
        return one_run_gdp(canaries, guesses, correct, self.delta, confidence).mu > self.mu


class SampledGaussian(Claim):
    kind = "sampled_gaussian"

    def bound(self, canaries: int, guesses: int, correct: int, confidence: float) -> float:
        """ε of the least noisy mechanism, with the plan's p and n, that is refuted."""
        low, high = -STEPS_PER_OCTAVE * OCTAVES, STEPS_PER_OCTAVE * OCTAVES
        look = (canaries, guesses, correct, confidence)
        if not self.refuted(*look, high):
            return 0.0
        while low < high:  # more noise is a stronger claim, and refuted more easily
            middle = (low + high) // 2
            low, high = (low, middle) if self.refuted(*look, middle) else (middle + 1, high)
        if high == 0:  # the plan's own noise, calibrated to this
            return self.plan.epsilon or 0.0
        return curve(self.plan, high)[0][0] / (1 + TOLERANCE)

    def refuted(
        self, canaries: int, guesses: int, correct: int, confidence: float, step: int = 0
    ) -> bool:
        inverse = partial(least_probability, curve(self.plan, step))
        return refutes_curve(inverse, canaries, guesses, correct, confidence)


def claim_of(plan: Plan) -> Claim:
    delta = plan.delta or 1 / (2 * plan.D)
    if plan.private and plan.p == 1 and not plan.spec.own_profile:
        return Gaussian(plan, delta)
    sampled = guarantee(plan) in ("proved", "claimed") and plan.p < 1 and not plan.allocates
    if sampled and plan.accountant == "pld":
        return SampledGaussian(plan, delta)
    return Claim(plan, delta)


@lru_cache(maxsize=64)
def curve(plan: Plan, step: int) -> tuple[tuple[float, float], ...]:
    """Points (ε, δ) of `plan`'s mechanism with σ 2^(step/4); the first is at the plan's own δ.

    Each ε is too large by a share of at most TOLERANCE, which can only weaken the claim.
    """
    assert plan.delta is not None
    sigma = noise_multiplier(plan) * 2 ** (step / STEPS_PER_OCTAVE)
    mechanism = accounting.mechanism(plan, sigma)

    def epsilon(delta: float) -> float:
        scale = max(accounting.rdp_epsilon(mechanism, delta), 0.1)
        facts = (mechanism.p, mechanism.n, sigma, delta, scale, mechanism.adjacency)
        return pld.epsilon(*facts, tolerance=TOLERANCE)

    return tuple(
        (cached_number(f"audit curve {mechanism} {delta!r}", partial(epsilon, delta)), delta)
        for delta in (plan.delta, *CURVE_DELTAS)
    )


def least_probability(points: tuple[tuple[float, float], ...], y: float) -> float:
    """The least probability of an event that a neighbour gives y, if all of `points` hold.

    y ≤ e^ε x + δ, and the same for the complements: 1 − x ≤ e^ε (1 − y) + δ.
    """
    least = 0.0
    for epsilon, delta in points:
        if math.isfinite(epsilon):
            other = 1 - delta - math.exp(epsilon) * (1 - y)
            least = max(least, (y - delta) * math.exp(-epsilon), other)
    return least


def audit_outcome(
    plan: Plan,
    scores: Floats,
    members: Bools,
    *,
    confidence: float,
    rng: np.random.Generator,
    in_only: bool = False,
) -> dict[str, Any]:
    """The bound at `confidence`, corrected for all looks, and the outcome (key `verdict`):

    refuted     the data contradict the stated ε: it is wrong, unless a chance of 1 − confidence
    consistent  they do not. This proves nothing; `ceiling` is the most that could have been shown
    no claim    the method states no ε
    """
    claim = claim_of(plan)
    m, counts = len(scores), count_correct(scores, members, rng, in_only)
    each = 1 - (1 - confidence) / len(counts)
    # The share of right guesses decides between looks that show nothing.
    bounds = [(claim.bound(m, r, v, each), v / r, r, v) for r, v in counts]
    epsilon, _, guesses, correct = max(bounds)
    outcome = "consistent"
    if plan.epsilon is None:
        outcome = "no claim"
    elif any(claim.refuted(m, r, v, each) for r, v in counts):
        outcome = "refuted"
    return {
        "verdict": outcome,
        "epsilon": epsilon,
        "stated_epsilon": plan.epsilon,
        "guesses": guesses,
        "correct": correct,
        "canaries": m,
        "unit": plan.unit,
        "canaries_in": int(members.sum()),
        "confidence": confidence,
        "looks": len(counts),
        "ceiling": max(claim.bound(m, r, r, each) for r, _ in counts),
        "delta": claim.delta,
        "accountant": plan.accountant if plan.private else None,
        "adjacency": plan.adjacency,
        "guarantee": guarantee(plan),
        "claim": claim.kind,
    }


def guess_counts(canaries: int, in_only: bool) -> tuple[int, ...]:
    if not in_only:
        return guess_grid(canaries)
    return tuple(sorted({max(1, int(canaries * fraction)) for fraction in IN_ONLY_FRACTIONS}))


def count_correct(
    scores: Floats, members: Bools, rng: np.random.Generator, in_only: bool
) -> list[tuple[int, int]]:
    """(guesses, correct) for numbers of guesses that depend on m alone.

    Half of the guesses say "in" (the highest scores), half "out" (the lowest), or with `in_only`
    all say "in". Ties fall in an order drawn from `rng`, without regard to membership.
    """
    if np.isnan(scores).any():
        raise ValueError("scores must not contain NaN")
    m = len(scores)
    shuffled = rng.permutation(m)
    was_in = members[shuffled[np.argsort(scores[shuffled], kind="stable")]]
    counts = []
    for guesses in guess_counts(m, in_only):
        lowest = 0 if in_only else guesses // 2
        right = np.sum(~was_in[:lowest]) + np.sum(was_in[m - (guesses - lowest) :])
        counts.append((guesses, int(right)))
    return counts


def warning_of(plan: Plan, canaries: int, confidence: float, *, in_only: bool) -> str | None:
    """What to say of an audit that cannot refute `plan`'s ε; None of one that can, or need not."""
    if plan.epsilon is None or could_refute(claim_of(plan), canaries, confidence, in_only):
        return None
    claim = claim_of(plan)
    said = (
        f"this audit cannot refute ε = {plan.epsilon:g}: with {canaries:,} canaries at δ = "
        f"{claim.delta:.3g}, even if every guess is right"
    )
    if not isinstance(claim, SampledGaussian):  # whose δ is one point of a curve: it hardly counts
        for delta in DELTAS:
            smaller = claim_of(replace(plan, delta=delta))
            if delta < claim.delta and could_refute(smaller, canaries, confidence, in_only):
                return f"{said}; --delta {delta:.0e} would do"
    for times in MORE_CANARIES:
        more = canaries * times
        if more <= plan.D // 2 and could_refute(claim, more, confidence, in_only):
            return f"{said}; --canaries {more} would do"
    return f"{said}; neither a smaller δ nor more canaries would help, but a smaller ε would"


def could_refute(claim: Claim, canaries: int, confidence: float, in_only: bool) -> bool:
    counts = guess_counts(canaries, in_only)
    each = 1 - (1 - confidence) / len(counts)
    return any(claim.refuted(canaries, guesses, guesses, each) for guesses in counts)


def keep(folder: Path, facts: Record) -> None:
    """Owner-only from the first byte: with the seeds one could take the noise off again."""
    facts = {"schema": SCHEMA, **facts}
    with explained(folder / AUDIT):
        write_json(folder / AUDIT, {**facts, "checksum": checksum(facts)}, PRIVATE)


def read_begun(folder: Path) -> Record:
    """What `keep` has kept; empty if nothing was begun here."""
    if not (folder / AUDIT).exists():
        return {}
    facts = read_json(folder / AUDIT)
    if isinstance(facts, dict) and facts.pop("checksum", None) == checksum(facts):
        return facts
    raise UserError(
        f"{folder / AUDIT} is damaged; restore it from a backup, or start again with --overwrite "
        f"(the ledger keeps what was spent)"
    )


def checksum(facts: Record) -> str:
    return hashlib.blake2b(to_json(facts).encode(), digest_size=16).hexdigest()
