"""From scores and coins to a verdict: what the right guesses prove, beside what the plan states.

Which bound is used follows from the claim. Releases without sampling (`release_once`, `moments`,
full batches) claim a Gaussian trade-off curve and are held to it. All others are held to (ε, δ).
"""

from typing import Any

import numpy as np

from dpfp_ray.plan import Plan
from dpfp_ray.privacy.accounting import gdp_mu_of_budget
from dpfp_ray.privacy.audit_bounds import GdpBound, guess_grid, one_run_epsilon, one_run_gdp
from dpfp_ray.privacy.canaries import Bools
from dpfp_ray.privacy.canary_scores import Floats
from dpfp_ray.privacy.labels import joint_mu
from dpfp_ray.privacy.statement import verdict as guarantee

# Where "in" shows for sure but "out" looks like "in and never drawn", only the highest scores are
# guessed, all of them "in". About half of the canaries are in, and a few of those never drawn.
IN_ONLY_FRACTIONS = (0.45, 0.4, 0.3, 0.2, 0.1, 0.05)


def judge(
    plan: Plan,
    scores: Floats,
    members: Bools,
    *,
    confidence: float,
    rng: np.random.Generator,
    in_only: bool = False,
) -> dict[str, Any]:
    """The bound at `confidence`, corrected for all looks, and `verdict`:

    refuted     the data contradict the stated ε: it is wrong, unless a chance of 1 − confidence
    consistent  they do not. This proves nothing; `ceiling` is the most that could have been shown
    no claim    the method states no ε
    """
    gaussian = plan.private and plan.p == 1
    delta = plan.delta or 1 / (2 * plan.D)
    counts = count_correct(scores, members, rng, in_only)
    each = 1 - (1 - confidence) / len(counts)

    def bound(guesses: int, correct: int) -> GdpBound:
        """`mu` is 0 where the claim is not Gaussian."""
        if gaussian:
            return one_run_gdp(len(scores), guesses, correct, delta, each)
        return GdpBound(0.0, one_run_epsilon(len(scores), guesses, correct, delta, each))

    def strength(look: tuple[int, int]) -> tuple[float, float, float]:
        guesses, correct = look
        shown = bound(guesses, correct)
        return shown.mu, shown.epsilon, correct / guesses  # the last one decides between zeros

    guesses, correct = max(counts, key=strength)
    shown = bound(guesses, correct)
    ceiling = max(bound(made, made).epsilon for made, _ in counts)
    mu = stated_mu(plan) if gaussian else None
    excess = shown.mu > mu if mu is not None else shown.epsilon > (plan.epsilon or 0.0)
    verdict = "no claim" if plan.epsilon is None else "refuted" if excess else "consistent"
    return {
        "verdict": verdict,
        "epsilon": shown.epsilon,
        "stated_epsilon": plan.epsilon,
        "guesses": guesses,
        "correct": correct,
        "canaries": len(scores),
        "canaries_in": int(members.sum()),
        "confidence": confidence,
        "looks": len(counts),
        "ceiling": ceiling,
        "delta": delta,
        "accountant": plan.accountant if plan.private else None,
        "adjacency": plan.adjacency,
        "guarantee": guarantee(plan),
        "claim": "gaussian" if gaussian else "epsilon_delta" if plan.private else "none",
        "mu": shown.mu if gaussian else None,
        "stated_mu": mu,
    }


def stated_mu(plan: Plan) -> float:
    """μ of the budget; with randomised labels, that of the text, which alone tells in from out."""
    assert plan.epsilon is not None
    assert plan.delta is not None
    if plan.label_epsilon:
        return joint_mu(plan.epsilon, plan.label_epsilon, plan.delta)
    return gdp_mu_of_budget(plan.epsilon, plan.delta)


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
    grid = guess_grid(m)
    if in_only:
        grid = tuple(sorted({max(1, int(m * fraction)) for fraction in IN_ONLY_FRACTIONS}))
    found = []
    for guesses in grid:
        lowest = 0 if in_only else guesses // 2
        right = np.sum(~was_in[:lowest]) + np.sum(was_in[m - (guesses - lowest) :])
        found.append((guesses, int(right)))
    return found
