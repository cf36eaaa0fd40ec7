"""Whether an audit could refute the stated ε at all, found before anything is trained.

If every guess were right and the claim would still stand, nothing can come of the audit. Mostly δ
is too large: (ε, δ) lets the whole record show with chance δ, which m canaries multiply.
"""

from dataclasses import replace

from dpfp_ray.audit.claims import Claim, SampledGaussian, claim_of
from dpfp_ray.audit.outcome import guess_counts
from dpfp_ray.plan.plan import Plan

# Round numbers from the largest down: the first that does is the one to name.
DELTAS = [lead * 10.0**-power for power in range(2, 13) for lead in (5, 2, 1)]
MORE_CANARIES = (2, 4, 8, 16)


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
