"""The smallest noise that meets a budget, under a named accountant, and what it costs under all.

`gdp` is the paper's Algorithm 1, lines 1 and 2, in closed form. The search for the others starts
from there, and works on log ε against log σ, which is nearly straight.

What a run has spent is a pure function of its plan, its noise and its steps: there is no running
total that a crash could lose or a resume could reset.

And what it costs if it is known which records were drawn, when: ε without amplification. A record's
number of rows N is Binomial(n, p) and does not depend on the data. Given N, its rows are N Gaussian
releases of sensitivity s with deviation σ: exactly √N s/σ-GDP (Dong et al. 2022, corollary 2). If N
is released too, δ(ε) is the mean over N of the curves (the pair of outputs is a mixture whose
component shows), and this is exact. No draw needs to be hidden for it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from dpfp_ray.plan.method_spec import METHODS, is_private
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting, pld
from dpfp_ray.privacy.accounting import (
    HOPELESS_EPSILON,
    Mechanism,
    gdp_delta,
    gdp_epsilon,
    joint_mu,
)
from dpfp_ray.system.cache import cached_number
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import waiting


@dataclass(frozen=True)
class Calibration:
    """σ = `noise_multiplier` C, and the ε that each accountant says it spends at `delta`.

    An accountant without a bound for this mechanism has None. `noise_power_ratio` is σ² relative to
    M = 1, and `noise_power_ratio_claimed` the paper's 1/M; both are None where M = 1.
    """

    plan: Plan
    sigma: float
    noise_multiplier: float
    p: float
    steps: int
    draws: int
    delta: float
    epsilon: dict[str, float | None]
    accountant: str
    adjacency: str
    noise_power_ratio: float | None = None
    noise_power_ratio_claimed: float | None = None
    own: Mapping[str, float] = field(default_factory=dict)  # constants that only this method has

    def to_dict(self) -> dict[str, Any]:
        facts = dict(vars(self))
        del facts["plan"]
        facts |= facts.pop("own")
        return {k: v for k, v in facts.items() if k[:11] != "noise_power" or v is not None}


def calibrate(plan: Plan, records: int | None = None) -> Calibration:
    """Solve the noise for `plan` on a training set of `records` rows; no data are needed.

    >>> plan = Plan(method="dpfp", epsilon=1.73, accountant="gdp")
    >>> round(calibrate(plan, records=67_349).sigma, 3)
    0.346
    """
    if not plan.private:
        private = ", ".join(name for name in METHODS if is_private(name))
        raise UserError(f"{plan.method} adds no noise; use --method {private}")
    if records is not None:
        plan = plan.bind(records=records)
    plan = plan.private_part
    if plan.records is None:
        raise UserError("the noise depends on D; give records, the rows of the training set")
    multiplier = noise_multiplier(plan)
    assert plan.delta is not None
    assert plan.adjacency is not None
    own = accounting.own_profile(plan) if plan.spec.own_profile else None
    single = noise_multiplier(dataclasses.replace(plan, micro_batches=1)) if plan.M > 1 else None
    return Calibration(
        plan=plan,
        sigma=multiplier * plan.C,
        noise_multiplier=multiplier,
        p=plan.p,
        steps=plan.steps,
        draws=plan.draws,
        delta=plan.delta,
        epsilon=accounting.epsilons(accounting.mechanism(plan, multiplier), plan.delta),
        accountant=plan.accountant,
        adjacency=plan.adjacency,
        noise_power_ratio=None if single is None else (multiplier / single) ** 2,
        noise_power_ratio_claimed=None if single is None else 1 / plan.M,
        own={"lambda": own.ridge, "sigma_out": own.output_sigma, "tau": own.tau} if own else {},
    )


# σ may be larger than the smallest one that is on budget by this much, never smaller.
SIGMA_TOLERANCE = 1e-3
SMALLEST, LARGEST = 1e-3, 1e6


def noise_multiplier(plan: Plan) -> float:
    """σ/C for `plan`'s budget; 0 for a method without noise."""
    plan = plan.private_part
    if not plan.private:
        return 0.0
    if plan.epsilon is None or plan.delta is None:
        raise ValueError("the plan is not bound to its data")
    if plan.spec.own_profile:
        return float(accounting.own_profile(plan).sigma)
    if plan.label_epsilon:
        mu = joint_mu(plan.epsilon, plan.label_epsilon, plan.delta)
        one = Mechanism(plan.p, plan.draws, 1.0, str(plan.adjacency))
        return one.sensitivity / mu * (1 + 1e-9)
    batches = accounting.mechanism(plan, 1.0).batches
    return smallest_noise(
        plan.p, plan.draws, str(plan.adjacency), plan.epsilon, plan.delta, plan.accountant, batches
    )


def smallest_noise(
    p: float,
    n: int,
    adjacency: str,
    epsilon: float,
    delta: float,
    accountant: str,
    batches: int = 0,
) -> float:
    """The smallest σ/C (to 1e-3, never over budget) for which ε(σ) ≤ `epsilon`."""

    start = _closed_form(p, n, adjacency, epsilon, delta)
    if accountant == "gdp" or (accountant == "pld" and p == 1):  # exact without sampling
        return start * (1 + 1e-9)  # rounding must not put it over budget
    if accountant == "rdp" and adjacency == "replace_one" and p < 1:
        raise UserError(
            f"accountant {accountant} has no bound for adjacency {adjacency}; use pld or gdp"
        )

    def compute() -> float:
        rough, step = start, 0.1
        if accountant == "pld" and p < 1 and not batches:
            # To a percent first: several times faster, and leaves only a small step to make.
            def quick(sigma: float) -> float:
                return pld.epsilon(p, n, sigma, delta, epsilon, adjacency, tolerance=5e-3)

            rough, step = _smallest(quick, epsilon, start, step, tolerance=3e-3), 3e-3

        def exact(sigma: float) -> float:
            mech = Mechanism(p, n, sigma, adjacency, batches=batches)
            return accounting.epsilon(mech, delta, accountant) or 0.0

        return _smallest(exact, epsilon, rough, step, SIGMA_TOLERANCE)

    key = f"sigma {accountant} {p!r} {n} {adjacency} {epsilon!r} {delta!r}"
    key += f" allocated {batches}" if batches else ""
    with waiting(f"calibrating the noise to ε = {epsilon:g}"):
        return cached_number(key, compute)


def _closed_form(p: float, n: int, adjacency: str, epsilon: float, delta: float) -> float:
    """Algorithm 1: (ε, δ) → μ_tot → σ, by solving `accounting.gdp_mu` for σ/C."""
    mu_total = accounting.gdp_mu_of_budget(epsilon, delta)
    if p == 1:
        return Mechanism(p, n, 1.0, adjacency).sensitivity * math.sqrt(n) / mu_total
    share = (mu_total / p) ** 2 / n
    if adjacency == "replace_one":
        return 1 / math.sqrt(math.asinh(share / 4))
    return 1 / math.sqrt(math.log1p(share))


def _smallest(
    epsilon_of: Callable[[float], float], budget: float, start: float, step: float, tolerance: float
) -> float:
    """The smallest σ, to a factor 1 + `tolerance`, with `epsilon_of`(σ) ≤ `budget`.

    `epsilon_of` must not grow with σ. `step` is the first guess of how far off log `start` may be.
    """
    bottom, top = math.log(SMALLEST), math.log(LARGEST)

    @functools.cache
    def over(x: float) -> float:
        """log(ε / budget) at σ = e^x: made finite, and not 0, where the search would end early."""
        ratio = epsilon_of(math.exp(x)) / budget
        return math.log(min(max(ratio, 1e-3), 1e3)) or -1e-300

    low = high = min(max(math.log(start), bottom), top)
    while over(high) > 0:
        if high == top:
            raise UserError(
                f"no noise up to σ/C = {LARGEST:g} meets epsilon = {budget}; raise epsilon or delta"
            )
        low, high, step = high, min(high + step, top), 2 * step
    while over(low) <= 0:
        if low == bottom:
            return SMALLEST
        low, high, step = max(low - step, bottom), low, 2 * step
    x = float(brentq(over, low, high, xtol=tolerance / 3))
    while over(x) > 0:  # the root is within a third of the tolerance
        x += tolerance / 3
    return math.exp(x)


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
    if mech.p == 1 or mech.batches:
        return gdp_epsilon(mu * math.sqrt(mech.epochs if mech.batches else mech.n), delta)
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
    if mech.batches:
        return mech.epochs
    return mech.n if mech.p == 1 else int(stats.binom.isf(chance, mech.n, mech.p))
