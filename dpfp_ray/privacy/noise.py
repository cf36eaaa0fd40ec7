"""Gaussian noise on millions of weights: a pure function of (secret seed, step), and fast.

The bits are AES-128 in counter mode under a key of the step, so who cannot break AES cannot tell
the noise from any other. Two words of 32 bits become two independent normal numbers (Box and Muller
1958): r = √(−2 ln u) and an angle φ give r cos φ and r sin φ. numpy computes these with the
processor's vector instructions, which makes a number four times as cheap as one of its own normal
generators; processors of another kind may differ in a number's last digit.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.privacy.sampling import keyed_generator, step_key

if TYPE_CHECKING:
    from torch import Tensor

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
    whatever the number of threads, the tensors' device or their layout in memory. Noise is made in
    fp32 and on the CPU.
    """
    import torch  # a second, which accounting need not wait

    # A transposed tensor cannot be seen as one row in the order of its indices; it gets a copy.
    flats = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    starts = np.concatenate([[0], np.cumsum([len(flat) for flat in flats])]).astype(np.int64)
    source = Noise(std, seed, step, int(starts[-1]))

    def noise_block(block: int) -> None:
        noise = source.block(block)
        for number, mine, theirs in overlaps(starts, block):
            target = flats[number][mine]
            if target.device.type == "cpu":  # torch would start threads of its own in each of ours
                np.add(target.numpy(), noise[theirs], out=target.numpy())
            else:
                target.add_(torch.from_numpy(noise[theirs]).to(target))

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


def overlaps(starts: NDArray[np.int64], block: int) -> Iterator[tuple[int, slice, slice]]:
    """The tensors that have numbers in `block`: which, where in the tensor, where in the block."""
    begin, end = block * BLOCK, (block + 1) * BLOCK
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
