"""Noise against a slow twin of its formula, its distribution, and what it depends on."""

import hashlib
import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from torch import Tensor

from dpfp_ray.privacy.sampling import BLOCK, TAIL, Noise, add_noise


def noised(
    *shapes: tuple[int, ...], std: float = 1.0, seed: int = 3, step: int = 5
) -> list[Tensor]:
    tensors = [torch.zeros(shape) for shape in shapes]
    add_noise(tensors, std, seed, step)
    return tensors


def test_is_standard_normal_times_std() -> None:
    (sample,) = noised((500, 400), std=2.5)
    scaled = sample.flatten().numpy() / 2.5
    assert stats.kstest(scaled, "norm").pvalue > 0.01
    assert abs(scaled.mean()) < 4 / np.sqrt(scaled.size)
    assert abs(scaled.std() - 1) < 4 / np.sqrt(2 * scaled.size)


def test_is_added_in_place() -> None:
    values = torch.full((10,), 7.0)
    add_noise([values], 0.5, seed=3, step=5)
    torch.testing.assert_close(values - 7, noised((10,), std=0.5)[0], atol=1e-6, rtol=0)


def test_std_zero_changes_nothing() -> None:
    assert not noised((100,), std=0.0)[0].any()


def test_same_key_same_noise() -> None:
    assert torch.equal(noised((3, 4))[0], noised((3, 4))[0])


@pytest.mark.parametrize("other", [{"step": 6}, {"seed": 4}])
def test_another_step_or_seed_is_other_noise(other: dict[str, int]) -> None:
    here, there = noised((10_000,))[0], noised((10_000,), **other)[0]
    assert abs(np.corrcoef(here, there)[0, 1]) < 0.04


def test_halves_blocks_and_squares_are_independent() -> None:
    (sample,) = noised((3 * BLOCK,))
    parts = sample.numpy().reshape(6, -1)  # cosines and sines of three blocks
    for values in (parts, parts**2):
        correlations = np.corrcoef(values)[np.triu_indices(6, 1)]
        assert np.abs(correlations).max() < 4 / np.sqrt(BLOCK / 2)


def test_tails_are_as_heavy_as_they_should_be() -> None:
    (sample,) = noised((2_000_000,))
    for bound in (3.0, 4.0):
        expected = 2_000_000 * 2 * stats.norm.sf(bound)
        found = int((sample.abs() > bound).sum())
        assert abs(found - expected) < 4 * np.sqrt(expected)


def test_words_are_aes_in_counter_mode_under_the_steps_key() -> None:
    key = hashlib.blake2b(b"11 noise 2", digest_size=16).digest()
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    counters = range(BLOCK // 4, BLOCK // 4 + 3)  # those of block 1 begin here: four words each
    expected = b"".join(block.update(counter.to_bytes(16, "big")) for counter in counters)
    words = np.empty(BLOCK + 4, np.uint32)
    Noise(1.0, 11, 2, 2 * BLOCK)._fill(words, 1)
    assert words[:12].tobytes() == expected


@pytest.mark.parametrize("count", [1, 2, 7, 500, BLOCK])
def test_numbers_are_those_of_a_slow_twin(count: int) -> None:
    """Box and Muller one pair at a time, in double precision."""
    noise = Noise(2.5, 3, 5, count)
    words = np.empty(noise.size + 4, np.uint32)
    noise._fill(words, 0)
    half = noise.size // 2
    some = min(half, 1000)
    expected = np.empty(2 * some)
    for pair in range(some):
        r = math.sqrt(-2 * math.log((int(words[pair]) + 0.5) / 2**32))
        angle = int(words[half + pair].astype(np.int32)) / 2**32 * 2 * math.pi
        expected[pair], expected[some + pair] = r * math.cos(angle), r * math.sin(angle)
    (sample,) = noised((count + count % 2,), std=2.5)
    found = np.concatenate([sample[:some], sample[half : half + some]])
    np.testing.assert_allclose(found, 2.5 * expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(noised((count,), std=2.5)[0], sample[:count])


def test_the_smallest_words_get_finer_numbers() -> None:
    noise = Noise(1.0, 3, 5, 8)
    k = np.array([0, 1, TAIL - 1, TAIL, 2**32 - 1], np.uint32)
    radius = np.full(5, -1.0, np.float32)
    noise._finer_tail(radius, k, 0)
    low, high = (np.sqrt(-2 * np.log((k[:3] + end) / 2**32)) for end in (1.0, 1e-16))
    assert (radius[:3] >= low.astype(np.float32)).all()
    assert (radius[:3] <= high).all()
    assert (radius[3:] == -1).all()


def test_finer_numbers_are_normal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfp_ray.privacy.sampling.TAIL", 2**31)  # half of all
    (sample,) = noised((BLOCK,))
    assert stats.kstest(sample.numpy(), "norm").pvalue > 0.01


def test_tensors_share_blocks_in_their_order() -> None:
    shapes = [(5,), (BLOCK - 3,), (2, 3), (0,), (BLOCK + 9,)]
    joined = torch.cat([tensor.flatten() for tensor in noised(*shapes)])
    assert torch.equal(joined, noised((len(joined),))[0])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_does_not_depend_on_the_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = noised((3 * BLOCK + 1,), (17, 3))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for one, two in zip(expected, noised((3 * BLOCK + 1,), (17, 3)), strict=True):
        assert torch.equal(one, two)


def test_does_not_depend_on_the_layout_in_memory() -> None:
    (plain,) = noised((30, 20))
    transposed = torch.zeros(20, 30).T
    add_noise([transposed], 1.0, seed=3, step=5)
    assert not transposed.is_contiguous()
    assert torch.equal(transposed, plain)


def test_weights_that_want_gradients_can_be_noised() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    add_noise([weight], 1.0, seed=3, step=5)
    assert weight.detach().all()


def test_nothing_to_noise_is_fine() -> None:
    add_noise([], 1.0, seed=3, step=5)
    add_noise([torch.zeros(0), torch.zeros(2, 0)], 1.0, seed=3, step=5)
