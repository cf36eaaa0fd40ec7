"""From scores and coins to an outcome: what right guesses prove, beside what the plan states; and,
before anything is trained, whether they could prove anything.

If every guess were right and the claim would still stand, nothing can come of the audit. Mostly δ
is too large: (ε, δ) lets the whole record show with chance δ, which m canaries multiply.

DIR/audit.json says what an audit has begun with, and at its end what it found. It holds the two
seeds that repeat the audit to the bit, so it is its owner's only, and a checksum: a seed of which
one digit has changed would be another audit's.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfp_ray.audit.bounds import guess_grid
from dpfp_ray.audit.canaries import Bools
from dpfp_ray.audit.claims import Claim, SampledGaussian, claim_of
from dpfp_ray.audit.scores import Floats
from dpfp_ray.data.cache import explained
from dpfp_ray.data.whole_files import PRIVATE, read_json, to_json, write_json
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.statement import guarantee

# Where "in" shows for sure but "out" looks like "in and never drawn", only the highest scores are
# guessed, all of them "in". About half of the canaries are in, and a few of those never drawn.
IN_ONLY_FRACTIONS = (0.45, 0.4, 0.3, 0.2, 0.1, 0.05)
# Round numbers from the largest down: the first that does is the one to name.
DELTAS = [lead * 10.0**-power for power in range(2, 13) for lead in (5, 2, 1)]
MORE_CANARIES = (2, 4, 8, 16)


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
    """The numbers of guesses that are looked at."""
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
    found = []
    for guesses in guess_counts(m, in_only):
        lowest = 0 if in_only else guesses // 2
        right = np.sum(~was_in[:lowest]) + np.sum(was_in[m - (guesses - lowest) :])
        found.append((guesses, int(right)))
    return found


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


AUDIT = "audit.json"
SCHEMA = 2  # the first with a checksum
SEEDS = ("seed", "membership_seed")
Record = dict[str, Any]


def keep(folder: Path, facts: Record) -> None:
    """Owner-only from the first byte: with the seeds one could take the noise off again."""
    facts = {"schema": SCHEMA, **facts}
    with explained(folder / AUDIT):
        write_json(folder / AUDIT, {**facts, "checksum": checksum(facts)}, PRIVATE)


def read_begun(folder: Path) -> Record:
    """What `keep` has kept; empty if nothing was begun here."""
    if not (folder / AUDIT).exists():
        return {}
    found = read_json(folder / AUDIT)
    if isinstance(found, dict) and all(isinstance(found.get(name), int) for name in SEEDS):
        older = not found.keys() & {"schema", "checksum"}
        if older or found.pop("checksum", None) == checksum(found):
            return found
    raise UserError(
        f"{folder / AUDIT} is damaged; restore it from a backup, or start again with --overwrite "
        f"(the ledger keeps what was spent)"
    )


def checksum(facts: Record) -> str:
    return hashlib.blake2b(to_json(facts).encode(), digest_size=16).hexdigest()
