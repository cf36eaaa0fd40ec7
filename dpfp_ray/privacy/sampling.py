"""Which records take part in a step: exact draws that are pure functions of (secret seed, step).

Because nothing but the seed and the step's number enters, every worker can draw the whole step and
take its share, and a resumed run repeats exactly what an unbroken one would have done. The seed is
the run's own (`run_seed`), so that runs which differ in anything have independent draws and noise.

Noise on millions of weights is such a function, too, and fast: the bits are AES-128 in counter mode
under a key of the step, so who cannot break AES cannot tell the noise from any other. Two words of
32 bits become two independent normal numbers (Box and Muller 1958): r = √(−2 ln u) and an angle φ
give r cos φ and r sin φ. numpy computes these with the processor's vector instructions: a quarter
of the cost of its own generators; processors of another kind may differ in a last digit.
"""

import hashlib
import math
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

Records = NDArray[np.int64]


def fresh_seed() -> int:
    """A secret seed of 128 bits from the operating system."""
    return secrets.randbits(128)


def step_key(seed: int, purpose: str, step: int) -> bytes:
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


class AllocationSampler:
    """Each record in exactly one of `batches` steps of an epoch: a uniform choice of its own.

    The choices of different records, and of different epochs, are independent; a shuffle cut into
    batches of equal size is another distribution, for which the theorem is not proved.
    """

    def __init__(self, records: int, batches: int, seed: int) -> None:
        self.records, self.batches, self.seed = records, batches, seed
        self._latest: tuple[int, list[Records]] = (-1, [])  # the epoch drawn last, for speed

    def draw(self, step: int) -> Records:
        epoch, batch = divmod(step, self.batches)
        if self._latest[0] != epoch:
            rng = keyed_generator(self.seed, "allocation", epoch)
            chosen = rng.integers(self.batches, size=self.records)
            ends = np.cumsum(np.bincount(chosen, minlength=self.batches))[:-1]
            self._latest = (epoch, np.split(np.argsort(chosen, kind="stable"), ends))
        return self._latest[1][batch]


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
    if plan.allocates:
        return AllocationSampler(plan.D, plan.batches, seed)
    if plan.private:
        return PoissonSampler(plan.D, plan.M, plan.p, seed)
    return ShuffleSampler(plan.D, plan.B, seed)


# Numbers that are made at once, cosines before sines: so many that threads seldom wait for each
# other between two calls of numpy. The size is part of what a seed means: with another one the same
# numbers come in another order.
BLOCK = 2**19
# u is (k + ½)/2³² for a word k. Below this k such a grid would be coarse and end at r = 6.8, which
# 23 million weights reach once in a thousand steps: there u gets 53 bits more.
TAIL = 1024


def add_noise(tensors: "Sequence[Tensor]", std: float, seed: int, step: int) -> None:
    """Add N(0, std²) to every number of `tensors`, in place: by several threads, because a
    model has millions of weights.

    Taken one after the other, the tensors' numbers get the step's normal numbers in their order,
    whatever the number of threads or their layout in memory. Noise is made in fp32 and on the CPU;
    for tensors of a GPU it is made there, and is another one (`device_noise`).
    """
    import torch  # a second, which accounting need not wait

    if any(tensor.device.type == "cuda" for tensor in tensors):
        from dpfp_ray.privacy import device_noise

        device_noise.add_noise(tensors, std, seed, step)
        return
    # A transposed tensor cannot be seen as one row in the order of its indices; it gets a copy.
    flats = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    starts = np.concatenate([[0], np.cumsum([len(flat) for flat in flats])]).astype(np.int64)
    source = Noise(std, seed, step, int(starts[-1]))

    def noise_block(block: int) -> None:
        noise = source.block(block)
        for number, mine, theirs in overlaps(starts, block):
            # In numpy: torch would start threads of its own in each of ours.
            target = flats[number][mine].numpy()
            np.add(target, noise[theirs], out=target)

    threads = min(torch.get_num_threads(), source.blocks)
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            # The list makes an exception in a thread ours.
            list(pool.map(noise_block, range(source.blocks)))
    else:
        for block in range(source.blocks):
            noise_block(block)
    for tensor, flat in zip(tensors, flats, strict=True):
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))


def overlaps(
    starts: NDArray[np.int64], block: int, size: int = BLOCK
) -> Iterator[tuple[int, slice, slice]]:
    """The tensors that have numbers in `block`: which, where in the tensor, where in the block."""
    begin, end = block * size, (block + 1) * size
    first = int(np.searchsorted(starts, begin, side="right")) - 1
    for number in range(first, len(starts) - 1):
        low, high = max(begin, int(starts[number])), min(end, int(starts[number + 1]))
        if low >= end:
            return
        if low < high:
            offset = int(starts[number])
            yield number, slice(low - offset, high - offset), slice(low - begin, high - begin)


class Noise:
    """`count` numbers from N(0, std²), of one step, block by block."""

    def __init__(self, std: float, seed: int, step: int, count: int) -> None:
        self.std, self.seed, self.step, self.count = std, seed, step, count
        self.key = step_key(seed, "noise", step)
        self.blocks = -(-count // BLOCK)
        self.size = min(BLOCK, count + count % 2)
        self.zeros = bytes(4 * self.size)
        self.own = threading.local()

    def block(self, number: int) -> NDArray[np.float32]:
        """Block `number`, in its thread's own memory: to be used before the next is made."""
        if not hasattr(self.own, "words"):
            # The cipher asks for room for one more of its own blocks, of 16 bytes.
            self.own.words = np.empty(self.size + 4, np.uint32)
            self.own.noise = np.empty(self.size, np.float32)
            self.own.radius = np.empty(self.size // 2, np.float32)
        words, noise, radius = self.own.words, self.own.noise, self.own.radius
        self._fill(words, number)
        half = self.size // 2
        k, turn = words[:half], words[half : self.size].view(np.int32)
        cosine, sine = noise[:half], noise[half:]
        np.copyto(radius, k, casting="unsafe")
        radius += np.float32(0.5)
        radius *= np.float32(2**-32)
        np.log(radius, out=radius)
        radius *= np.float32(-2)
        np.sqrt(radius, out=radius)
        self._finer_tail(radius, k, number)
        radius *= np.float32(self.std)
        np.copyto(sine, turn, casting="unsafe")
        sine *= np.float32(math.pi * 2**-31)  # the angle, from −π to π
        np.cos(sine, out=cosine)
        np.sin(sine, out=sine)
        cosine *= radius
        sine *= radius
        return noise

    def _fill(self, words: NDArray[np.uint32], number: int) -> None:
        """AES of the counters that belong to the block; no two blocks have one in common."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        first = (number * 4 * BLOCK // 16).to_bytes(16, "big")
        cipher = Cipher(algorithms.AES(self.key), modes.CTR(first)).encryptor()
        cipher.update_into(self.zeros, words.view(np.uint8).data)

    def _finer_tail(self, radius: NDArray[np.float32], k: NDArray[np.uint32], number: int) -> None:
        if k.min() >= TAIL:
            return
        where = np.flatnonzero(k < TAIL)
        rng = keyed_generator(self.seed, f"noise tail {number}", self.step)
        u = (k[where] + (1 - rng.random(len(where)))) / 2**32  # 1 − [0, 1) is never 0
        radius[where] = np.sqrt(-2 * np.log(u))
