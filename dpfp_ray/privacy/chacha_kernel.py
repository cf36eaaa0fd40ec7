# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""ChaCha20 as one kernel of a GPU, where there is Triton: torch's wheels for CUDA bring it.

The same words as `device_noise.chacha20` computes in 400 launches, each of which reads and writes
all of them. `device_noise` compares its first words with those before it trusts it. Triton reads
annotations as part of its own language, so its functions have none but `constexpr`.
"""

import triton
import triton.language as tl
from torch import Tensor

LANES = 256  # cipher blocks of 16 words, side by side


@triton.jit
def _turned(word, bits: tl.constexpr):
    return (word << bits) | (word >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 12)
    a = a + b
    d = _turned(d ^ a, 8)
    c = c + d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(start, number: tl.constexpr, lane):
    """Word `number` of every block's first state; word 12 counts the blocks."""
    word = tl.load(start + number).to(tl.uint32, bitcast=True) + lane * 0
    return word + lane if number == 12 else word


@triton.jit
def _kernel(start, out, count, lanes: tl.constexpr):
    block = tl.program_id(0) * lanes + tl.arange(0, lanes)
    lane = block.to(tl.uint32)
    a0, a1, a2, a3 = (
        _word(start, 0, lane),
        _word(start, 1, lane),
        _word(start, 2, lane),
        _word(start, 3, lane),
    )
    b0, b1, b2, b3 = (
        _word(start, 4, lane),
        _word(start, 5, lane),
        _word(start, 6, lane),
        _word(start, 7, lane),
    )
    c0, c1, c2, c3 = (
        _word(start, 8, lane),
        _word(start, 9, lane),
        _word(start, 10, lane),
        _word(start, 11, lane),
    )
    d0, d1, d2, d3 = (
        _word(start, 12, lane),
        _word(start, 13, lane),
        _word(start, 14, lane),
        _word(start, 15, lane),
    )
    for _ in range(10):
        a0, b0, c0, d0 = _quarter(a0, b0, c0, d0)
        a1, b1, c1, d1 = _quarter(a1, b1, c1, d1)
        a2, b2, c2, d2 = _quarter(a2, b2, c2, d2)
        a3, b3, c3, d3 = _quarter(a3, b3, c3, d3)
        a0, b1, c2, d3 = _quarter(a0, b1, c2, d3)
        a1, b2, c3, d0 = _quarter(a1, b2, c3, d0)
        a2, b3, c0, d1 = _quarter(a2, b3, c0, d1)
        a3, b0, c1, d2 = _quarter(a3, b0, c1, d2)
    _store(start, out, count, block, 0, a0, a1, a2, a3)
    _store(start, out, count, block, 4, b0, b1, b2, b3)
    _store(start, out, count, block, 8, c0, c1, c2, c3)
    _store(start, out, count, block, 12, d0, d1, d2, d3)


@triton.jit
def _store(
    start,
    out,
    count,
    block,
    row: tl.constexpr,
    one,
    two,
    three,
    four,
):
    lane, place, here = block.to(tl.uint32), out + block.to(tl.int64) * 16 + row, block < count
    tl.store(place, (one + _word(start, row, lane)).to(tl.int32, bitcast=True), mask=here)
    tl.store(place + 1, (two + _word(start, row + 1, lane)).to(tl.int32, bitcast=True), mask=here)
    tl.store(place + 2, (three + _word(start, row + 2, lane)).to(tl.int32, bitcast=True), mask=here)
    tl.store(place + 3, (four + _word(start, row + 3, lane)).to(tl.int32, bitcast=True), mask=here)


def key_stream(start: Tensor, count: int) -> Tensor:
    """The words of `count` cipher blocks; `start` has the sixteen of the first one's state."""
    out = start.new_empty(16 * count)
    _kernel[(triton.cdiv(count, LANES),)](start, out, count, lanes=LANES)
    return out
