"""Noise that is made where the weights are: on a GPU, by ChaCha20 in torch's integer arithmetic.

On the host, noise for 355 million weights takes a second, and must be copied. Here nothing is
copied but a key. ChaCha20 (RFC 8439) is a stream cipher as AES in counter mode is one: who cannot
break it cannot tell its words from random ones. Its words are functions of (key, nonce, counter),
so all of them are computed side by side, by one kernel where there is Triton. They equal those of
the library `cryptography`.

The key is a function of (seed, step), the nonce is the block's number, the counter counts in the
block: no two numbers of a run share a word. Words become normal numbers as in `sampling`.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpfp_ray.privacy.sampling import TAIL, overlaps

BLOCK = 2**22  # numbers of a block; a worker makes whole blocks. It is part of what a seed means.
SPARE = 2**12  # further pairs of words, for numbers of the tail: 0.5 are expected in a block
CONSTANTS = np.frombuffer(b"expand 32-byte k", np.int32)
UNSIGNED = 2.0**32


def add_noise(
    tensors: Sequence[Tensor], std: float, seed: int, step: int, worker: int = 0, workers: int = 1
) -> None:
    """Add to `tensors`, in place, N(0, std²) on every `workers`-th block of their numbers.

    After the sum over all workers each number has its noise once, whatever their number.
    """
    flats = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    starts = np.concatenate([[0], np.cumsum([len(flat) for flat in flats])]).astype(np.int64)
    key = step_key(seed, "noise", step)
    for block in range(worker, -(-int(starts[-1]) // BLOCK), workers):
        size = min(BLOCK, int(starts[-1]) - block * BLOCK)
        noise = normal_numbers(key, block, size, flats[0].device).mul_(std)
        places = list(overlaps(starts, block, BLOCK))
        torch._foreach_add_(
            [flats[number][mine] for number, mine, _ in places],
            [noise[theirs] for _, _, theirs in places],
        )
    for tensor, flat in zip(tensors, flats, strict=True):
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))


def step_key(seed: int, purpose: str, step: int) -> bytes:
    return hashlib.blake2b(f"{seed} device {purpose} {step}".encode(), digest_size=32).digest()


def normal_numbers(key: bytes, block: int, count: int, device: torch.device) -> Tensor:
    """`count` numbers from N(0, 1): two words make two of them (Box and Muller), as on the host."""
    half = (count + 1) // 2
    words = chacha20(key, block, -(-(2 * half + 2 * SPARE) // 16), device)
    k, turn, spare = words[:half], words[half : 2 * half], words[2 * half :][: 2 * SPARE]
    u = _unsigned(k)
    # The smallest words get 64 bits more, each from a pair of its own; without waiting for how
    # many they are.
    small = (k >= 0) & (k < TAIL)
    order = small.cumsum(0, dtype=torch.int32).sub_(1).clamp_(0, SPARE - 1)
    finer = (_unsigned(spare[SPARE:]) + 0.5).div_(UNSIGNED).add_(_unsigned(spare[:SPARE]))
    u += torch.where(small, finer.div_(UNSIGNED)[order], 0.5)
    radius = u.div_(UNSIGNED).log_().mul_(-2).clamp_(min=0).sqrt_()
    angle = turn.float().mul_(math.pi * 2**-31)
    return torch.cat([radius * angle.cos(), radius * angle.sin_()])[:count]


def _unsigned(words: Tensor) -> Tensor:
    """As numbers from 0 to 2³² in fp32; torch has few operations for unsigned words."""
    value = words.float()
    return value.add_((words < 0).float().mul_(UNSIGNED))


def chacha20(key: bytes, nonce: int, count: int, device: torch.device) -> Tensor:
    """The key stream of `count` cipher blocks of 16 words, counted from 0, as signed words."""
    assert 0 <= nonce < 2**31, "a model of 10¹⁶ weights"
    words = [*CONSTANTS.tolist(), *np.frombuffer(key, np.int32).tolist(), 0, nonce, 0, 0]
    start = torch.tensor(words, dtype=torch.int32)
    if device.type == "cuda":  # a copy that the host need not wait for
        start = start.pin_memory().to(device, non_blocking=True)
        if kernel := fused():
            return kernel(start, count)
    return key_stream(start, count)


@functools.cache
def fused() -> Callable[[Tensor, int], Tensor] | None:
    """One kernel in place of 400, if there is one here that gives the same words."""
    try:
        from dpfp_ray.privacy import chacha_kernel

        start = torch.arange(16, dtype=torch.int32, device="cuda") * 0x0F1E2D3C
        if torch.equal(chacha_kernel.key_stream(start, 1000), key_stream(start, 1000)):
            return chacha_kernel.key_stream
    except Exception:  # no Triton, or no compiler that it needs, or a card that it does not know
        pass
    return None


def key_stream(start: Tensor, count: int) -> Tensor:
    """The words of `count` cipher blocks; `start` has the sixteen of the first one's state."""
    device = start.device
    state = start[:, None].repeat(1, count)
    state[12] += torch.arange(count, dtype=torch.int32, device=device)
    rows = state.clone()
    scratch = torch.empty(4, count, dtype=torch.int32, device=device)
    for _ in range(10):
        _quarter_rounds(rows, scratch)  # the columns
        rows = _diagonals(rows, 1)
        _quarter_rounds(rows, scratch)
        rows = _diagonals(rows, 3)
    return rows.add_(state).T.reshape(-1)


def _diagonals(rows: Tensor, by: int) -> Tensor:
    """Rows of four words, the first as it is, the others turned by once, twice, thrice `by`."""
    turned = [(by * row) % 4 for row in range(4)]
    ends = [(4 * row + turn, 4 * row + 4) for row, turn in enumerate(turned)]
    starts = [(4 * row, 4 * row + turn) for row, turn in enumerate(turned)]
    return torch.cat([rows[a:b] for both in zip(ends, starts, strict=True) for a, b in both])


def _quarter_rounds(rows: Tensor, scratch: Tensor) -> None:
    """Four of them side by side, in place; sums of signed words wrap as those of unsigned ones."""
    a, b, c, d = rows.split(4)
    for one, two, three, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        one += two
        three ^= one
        if bits % 8 == 0:  # whole bytes change places; a word's lowest comes first
            bytes_ = three.view(torch.uint8).unflatten(1, (-1, 4))
            bytes_.copy_(bytes_.roll(bits // 8, 2))
            continue
        torch.bitwise_right_shift(three, 32 - bits, out=scratch)
        scratch &= 2**bits - 1  # the shift has copied the sign
        three <<= bits
        three |= scratch
