"""What a plan states, in a form that guesses can refute. A claim follows from the plan alone.

gaussian          releases without sampling (`release_once`, `moments`, full batches) state a
                  Gaussian trade-off curve, and are held to all of it
sampled_gaussian  `dpsgd` and `rgp` state the curve of their accountant (pld), of which (ε, δ)
                  is one point; guesses are far more likely to contradict the rest of it
epsilon_delta     everything else states (ε, δ) and no more
none              nothing is stated
"""

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from dpfp_ray.audit.bounds import one_run_epsilon, one_run_gdp, refutes_curve
from dpfp_ray.data.cache import cached_number
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting, pld
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.labels import joint_mu
from dpfp_ray.privacy.statement import guarantee

# Where a sampled Gaussian's curve is computed; between these points it is bounded by them.
DELTAS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35)
# Bounds are looked for among σ 2^(k/4): from a quarter of the stated noise to four times as much.
STEPS_PER_OCTAVE, OCTAVES = 4, 2
TOLERANCE = 0.02


@dataclass(frozen=True)
class Claim(ABC):
    """`canaries`, `guesses`, `correct` and `confidence` are as in `audit_bounds`."""

    plan: Plan
    delta: float

    @property
    @abstractmethod
    def kind(self) -> str: ...

    @abstractmethod
    def bound(self, canaries: int, guesses: int, correct: int, confidence: float) -> float:
        """A lower bound on ε at `delta`: every smaller ε of this kind of claim is refuted."""

    def refuted(self, canaries: int, guesses: int, correct: int, confidence: float) -> bool:
        """Is what the plan states refuted?"""
        stated = self.plan.epsilon
        return stated is not None and self.bound(canaries, guesses, correct, confidence) > stated


class EpsilonDelta(Claim):
    @property
    def kind(self) -> str:
        return "epsilon_delta" if self.plan.private else "none"

    def bound(self, canaries: int, guesses: int, correct: int, confidence: float) -> float:
        return one_run_epsilon(canaries, guesses, correct, self.delta, confidence)


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

        def refuted(step: int) -> bool:
            inverse = functools.partial(least_probability, curve(self.plan, step))
            return refutes_curve(inverse, canaries, guesses, correct, confidence)

        if not refuted(high):
            return 0.0
        while low < high:  # more noise is a stronger claim, and refuted more easily
            middle = (low + high) // 2
            low, high = (low, middle) if refuted(middle) else (middle + 1, high)
        if high == 0:  # the plan's own noise, calibrated to this
            return self.plan.epsilon or 0.0
        return curve(self.plan, high)[0][0] / (1 + TOLERANCE)

    def refuted(self, canaries: int, guesses: int, correct: int, confidence: float) -> bool:
        inverse = functools.partial(least_probability, curve(self.plan, 0))
        return refutes_curve(inverse, canaries, guesses, correct, confidence)


def claim_of(plan: Plan) -> Claim:
    delta = plan.delta or 1 / (2 * plan.D)
    if plan.private and plan.p == 1 and not plan.spec.own_profile:
        return Gaussian(plan, delta)
    if guarantee(plan) == "proved" and plan.accountant == "pld" and plan.p < 1:
        return SampledGaussian(plan, delta)
    return EpsilonDelta(plan, delta)


@functools.lru_cache(maxsize=64)
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

    def known(delta: float) -> float:
        return cached_number(f"audit curve {mechanism} {delta!r}", lambda: epsilon(delta))

    return tuple((known(delta), delta) for delta in (plan.delta, *DELTAS))


def least_probability(points: tuple[tuple[float, float], ...], y: float) -> float:
    """The least probability of an event that a neighbour gives y, if all of `points` hold.

    y ≤ e^ε x + δ, and the same for the complements: 1 − x ≤ e^ε (1 − y) + δ.
    """
    found = 0.0
    for epsilon, delta in points:
        if math.isfinite(epsilon):
            found = max(found, (y - delta) * math.exp(-epsilon))
            found = max(found, 1 - delta - math.exp(epsilon) * (1 - y))
    return found
