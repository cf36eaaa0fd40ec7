"""Which records take part in a step: exact draws that are pure functions of (secret seed, step).

Because nothing but the seed and the step's number enters, every worker can draw the whole step and
take its share, and a resumed run repeats exactly what an unbroken one would have done. The seed is
the run's own (`run_seed`), so that runs which differ in anything have independent draws and noise.
"""

import hashlib
import secrets
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.plan.plan import Plan

Records = NDArray[np.int64]


def fresh_seed() -> int:
    """A secret seed of 128 bits from the operating system."""
    return secrets.randbits(128)


def step_key(seed: int, purpose: str, step: int) -> bytes:
    """128 bits for one purpose at one step."""
    return hashlib.blake2b(f"{seed} {purpose} {step}".encode(), digest_size=16).digest()


def keyed_generator(seed: int, purpose: str, step: int) -> np.random.Generator:
    """The generator of one purpose at one step: Philox under a 128-bit key hashed from all three.

    torch's CPU generator would keep only 32 bits of a seed, few enough to try all; hence numpy.
    """
    key = np.frombuffer(step_key(seed, purpose, step), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def keyed_integer(seed: int, purpose: str, step: int = 0) -> int:
    """A seed of 63 bits for libraries that take nothing better (initial weights, dropout)."""
    return int(keyed_generator(seed, purpose, step).integers(2**63))


def derived_seed(seed: int, purpose: str) -> int:
    """A seed of 128 bits for a part of a larger whole, as secret as `seed` itself."""
    message = f"{seed} {purpose}".encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=16).digest(), "big")


def run_seed(seed: int, plan: Plan, noise_multiplier: float, content: str) -> int:
    """The seed of one run's draws and noise, from the secret `seed` and all that the run depends
    on: plan, noise and, as `content`, hashes of the records and of the initial weights.

    Equal noise then means equal run. Were it a function of `seed` alone, two plans under one seed
    would share their noise, and σ₂ (sum + σ₁ z) − σ₁ (sum + σ₂ z) is free of z.
    """
    return derived_seed(seed, f"run {plan.hash} {float(noise_multiplier)!r} {content}")


class Sampler(Protocol):
    def draw(self, step: int) -> Records:
        """The records of step `step` (from 0), one entry per row; may be empty."""
        ...


class PoissonSampler:
    """M independent Bernoulli(p) trials for each of D records, as one exact draw in O(B).

    The M × D trials are a grid of cells. How many succeed is Binomial(M D, p); given that number,
    all sets of so many distinct cells are equally likely. A record may come up in several
    micro-batches of one step, each time as a row of its own.
    """

    def __init__(self, records: int, micro_batches: int, p: float, seed: int) -> None:
        self.records = records
        self.cells = records * micro_batches
        self.p = p
        self.seed = seed

    def draw_cells(self, step: int) -> Records:
        """Successful cells in order; cell = micro-batch × D + record."""
        rng = keyed_generator(self.seed, "sample", step)
        count = int(rng.binomial(self.cells, self.p))
        # numpy picks sparse subsets by Floyd's algorithm, so neither time nor memory grows with D.
        return np.sort(rng.choice(self.cells, size=count, replace=False, shuffle=False))

    def draw(self, step: int) -> Records:
        return self.draw_cells(step) % self.records


class ShuffleSampler:
    """Ordinary batches of exactly B from reshuffled passes over the data, for non-private runs."""

    def __init__(self, records: int, batch_size: int, seed: int) -> None:
        self.records = records
        self.batch_size = batch_size
        self.seed = seed
        # The order of the pass drawn from last: kept for speed, never for its content.
        self._latest: tuple[int, Records] = (-1, np.empty(0, np.int64))

    def draw(self, step: int) -> Records:
        position = step * self.batch_size
        rows = []
        while position < (step + 1) * self.batch_size:
            index, offset = divmod(position, self.records)
            part = self._pass(index)[offset : offset + (step + 1) * self.batch_size - position]
            rows.append(part)
            position += len(part)
        return np.concatenate(rows)

    def _pass(self, index: int) -> Records:
        if self._latest[0] != index:
            order = keyed_generator(self.seed, "shuffle", index).permutation(self.records)
            self._latest = (index, order)
        return self._latest[1]


def make_sampler(plan: Plan, seed: int) -> Sampler:
    """The sampler that `plan`'s accounting assumes."""
    if plan.private:
        return PoissonSampler(plan.D, plan.M, plan.p, seed)
    return ShuffleSampler(plan.D, plan.B, seed)
