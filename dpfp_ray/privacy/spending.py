"""What a run has spent so far: a pure function of its plan, its noise and the steps it has done.
There is no running total that a crash could lose or a resume could reset.

And what it costs if it is known which records were drawn, when: ε without amplification. A record's
number of rows N is Binomial(n, p) and does not depend on the data. Given N, its rows are N Gaussian
releases of sensitivity s with deviation σ: exactly √N s/σ-GDP (Dong et al. 2022, corollary 2). If N
is released too, δ(ε) is the mean over N of the curves (the pair of outputs is a mixture whose
component shows), and this is exact. No draw needs to be hidden for it.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.accounting import HOPELESS_EPSILON, Mechanism, gdp_delta, gdp_epsilon

MILESTONES = 10


@dataclass(frozen=True)
class Spending:
    plan: Plan
    noise_multiplier: float

    def spent(self, steps: int) -> dict[str, float | None]:
        """ε after `steps` steps by every accountant; empty for a method without a budget."""
        if not self.plan.private:
            return {}
        done = accounting.mechanism(self.plan, self.noise_multiplier, steps)
        return accounting.epsilons(done, self._delta)

    def at_most(self, steps: int) -> float | None:
        """The plan's own accountant at the next tenth of the run: cheap enough to show live."""
        if not self.plan.private or steps == 0:
            return 0.0 if self.plan.private else None
        # Milestone i of 10 is step ⌈i T / 10⌉; the first one that is not before `steps`.
        number = (steps - 1) * MILESTONES // self.plan.steps + 1
        milestone = -(-number * self.plan.steps // MILESTONES)
        done = accounting.mechanism(self.plan, self.noise_multiplier, milestone)
        return accounting.epsilon(done, self._delta, self.plan.accountant)

    @property
    def _delta(self) -> float:
        assert self.plan.delta is not None, "a bound private plan has a delta"
        return self.plan.delta


# Share of δ that stands for numbers of rows too improbable to go through; it is charged.
TAIL_SHARE = 1e-6


def shown_epsilon(mech: Mechanism, delta: float) -> float:
    """ε at `delta` if a record's draws are known, on average over how many there are."""
    mu = mech.sensitivity / mech.noise_multiplier
    if mech.p == 1:
        return gdp_epsilon(mu * math.sqrt(mech.n), delta)
    rows = stats.binom(mech.n, mech.p)
    most = int(rows.isf(TAIL_SHARE * delta)) + 1
    counts = np.arange(1, most + 1)
    chances = rows.pmf(counts)
    left = delta - float(rows.sf(most))

    def excess(eps: float) -> float:
        curves = (gdp_delta(eps, mu * math.sqrt(count)) for count in counts)
        return float(chances @ np.fromiter(curves, float, len(counts))) - left

    if excess(0.0) <= 0:
        return 0.0
    top = 1.0
    while excess(top) > 0:
        top *= 2
        if top > HOPELESS_EPSILON:
            return math.inf
    return float(brentq(excess, 0.0, top, xtol=1e-9))


def expected_epsilon(mech: Mechanism, delta: float) -> float:
    """ε for a record that is drawn as often as expected, n p times: μ = √(n p) s/σ."""
    return gdp_epsilon(mech.sensitivity / mech.noise_multiplier * math.sqrt(mech.n * mech.p), delta)


def likely_most_rows(mech: Mechanism, chance: float) -> int:
    """A record is drawn more often than this with at most this chance."""
    return mech.n if mech.p == 1 else int(stats.binom.isf(chance, mech.n, mech.p))
