"""The smallest noise that meets a budget, under a named accountant.

`gdp` is the paper's Algorithm 1, lines 1 and 2, in closed form. The others start from there and
follow the secant of log ε against log σ, which is nearly straight, so a handful of evaluations do.
"""

import math
from collections.abc import Callable

from dpfp_ray.cache import cached_number
from dpfp_ray.errors import UserError
from dpfp_ray.plan import Plan
from dpfp_ray.privacy import accounting, pld
from dpfp_ray.privacy.accounting import Mechanism

# σ may be larger than the smallest one that is on budget by this much, never smaller.
SIGMA_TOLERANCE = 1e-3
SMALLEST, LARGEST = 1e-3, 1e6


def noise_multiplier(plan: Plan) -> float:
    """σ/C for `plan`'s budget; 0 for a method without noise."""
    if not plan.private:
        return 0.0
    if plan.epsilon is None or plan.delta is None:
        raise ValueError("the plan is not bound to its data")
    return calibrate(
        plan.p, plan.draws, str(plan.adjacency), plan.epsilon, plan.delta, plan.accountant
    )


def calibrate(
    p: float, n: int, adjacency: str, epsilon: float, delta: float, accountant: str
) -> float:
    """The smallest σ/C (to 1e-3, never over budget) for which ε(σ) ≤ `epsilon`."""

    def release(sigma: float) -> Mechanism:
        return Mechanism(p, n, sigma, adjacency)

    start = _closed_form(p, n, adjacency, epsilon, delta)
    if accountant == "gdp":
        return start
    if accountant == "rdp" and adjacency == "replace_one" and p < 1:
        raise UserError(
            f"accountant {accountant} has no bound for adjacency {adjacency}; use pld or gdp"
        )

    def compute() -> float:
        rough = start
        if accountant == "pld" and p < 1 and adjacency != "replace_one":
            # A coarse grid is nearly right and several times faster.
            rough = _smallest(
                lambda sigma: pld.epsilon_at(p, n, sigma, delta, interval=3e-4 * epsilon),
                epsilon,
                start,
                tolerance=10 * SIGMA_TOLERANCE,
            )
        return _smallest(
            lambda sigma: accounting.epsilon(release(sigma), delta, accountant) or 0.0,
            epsilon,
            rough,
            tolerance=SIGMA_TOLERANCE,
        )

    key = f"sigma {accountant} {p!r} {n} {adjacency} {epsilon!r} {delta!r}"
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
    epsilon_of: Callable[[float], float], budget: float, start: float, tolerance: float
) -> float:
    """The smallest σ, to a factor 1 + `tolerance`, with `epsilon_of`(σ) ≤ `budget`.

    Keeps a bracket [low: over budget, high: within it] in log σ and steps along the secant of
    log ε, aimed a little inside the budget so that the step lands on the safe side.
    """
    low, high = math.log(SMALLEST), math.log(LARGEST)
    low_gap: float | None = None
    high_gap: float | None = None
    # ε falls about as σ^-3 near budgets people use: good enough for a first step.
    slope = -3.0
    x = min(max(math.log(start), low), high)
    while high - low > tolerance:
        gap = math.log(max(epsilon_of(math.exp(x)), 1e-300)) - math.log(budget)
        previous = (low, low_gap) if gap <= 0 else (high, high_gap)
        if gap <= 0:
            high, high_gap = x, gap
        else:
            low, low_gap = x, gap
        if previous[1] is not None and math.isfinite(previous[1]) and math.isfinite(gap):
            slope = min(-0.05, (gap - previous[1]) / (x - previous[0]))
        # On the safe side and closer to the budget than the tolerance: done.
        if gap <= 0 and gap >= slope * tolerance and high_gap == gap:
            return math.exp(high)
        aim = slope * tolerance / 2 if gap > -0.2 else 0.0
        step = (aim - gap) / slope if math.isfinite(gap) else math.inf
        x = x + max(-1.5, min(1.5, step))
        if not low < x < high:
            x = (low + high) / 2 if low_gap is not None and high_gap is not None else x
        x = min(max(x, math.log(SMALLEST)), math.log(LARGEST))
        if high_gap is not None and high == math.log(SMALLEST):
            break
        if low_gap is not None and low == math.log(LARGEST):
            raise UserError(f"no noise up to σ/C = {LARGEST:g} meets epsilon = {budget}; raise it")
    return math.exp(high)
