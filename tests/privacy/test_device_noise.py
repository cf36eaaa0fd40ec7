"""Noise that is made on a GPU, here on the CPU: its arithmetic is the same there."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats
from torch import Tensor

from dpfp_ray.privacy import device_noise
from dpfp_ray.privacy.device_noise import BLOCK, SPARE, add_noise, chacha20, normal_numbers

CPU = torch.device("cpu")
KEY = bytes(range(7, 39))


def key_stream(key: bytes, nonce: int, blocks: int) -> bytes:
    """By another implementation; its counter comes first, then the nonce."""
    start = bytes(4) + nonce.to_bytes(4, "little") + bytes(8)
    return Cipher(algorithms.ChaCha20(key, start), None).encryptor().update(bytes(64 * blocks))


def noised(
    *shapes: tuple[int, ...], std: float = 1.0, seed: int = 3, step: int = 5
) -> list[Tensor]:
    tensors = [torch.zeros(shape) for shape in shapes]
    add_noise(tensors, std, seed, step)
    return tensors


@pytest.mark.parametrize("nonce", [0, 1, 2**31 - 1])
@pytest.mark.parametrize("key", [KEY, bytes(32), b"\xff" * 32])
def test_words_are_those_of_cryptography(key: bytes, nonce: int) -> None:
    assert chacha20(key, nonce, 300, CPU).numpy().tobytes() == key_stream(key, nonce, 300)


def test_numbers_are_those_of_a_slow_twin() -> None:
    """Box and Muller in double precision, of the words of `cryptography`."""
    words = np.frombuffer(key_stream(KEY, 4, 2000), np.uint32)
    k, turn = words[:1000].astype(float), words[1000:2000].astype(np.int32) / 2**32
    radius = np.sqrt(-2 * np.log((k + 0.5) / 2**32))
    expected = radius * np.cos(2 * np.pi * turn), radius * np.sin(2 * np.pi * turn)
    found = normal_numbers(KEY, 4, 2000, CPU)
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=5e-4)


def test_is_standard_normal_times_std() -> None:
    (sample,) = noised((1_000_000,), std=2.5)
    scaled = sample.numpy() / 2.5
    assert stats.kstest(scaled, "norm").pvalue > 0.01
    assert abs(scaled.std() - 1) < 4 / np.sqrt(2e6)
    for bound in (3.0, 4.0):
        expected = 2e6 * stats.norm.sf(bound)
        assert abs((abs(scaled) > bound).sum() - expected) < 4 * np.sqrt(expected)


def test_the_smallest_words_get_finer_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from a pair of words of its own."""

    def zeros(*_: object) -> Tensor:
        words = torch.zeros(2 * 8 + 2 * SPARE, dtype=torch.int32)
        words[16 : 16 + SPARE] = torch.arange(SPARE) * 1000 + 500
        return words

    monkeypatch.setattr(device_noise, "chacha20", zeros)
    u = (np.arange(8) * 1000 + 500.5 - 0.5) / 2.0**64
    np.testing.assert_allclose(
        normal_numbers(KEY, 0, 16, CPU)[:8], np.sqrt(-2 * np.log(u)), rtol=1e-3
    )


@pytest.mark.parametrize("other", [{"step": 6}, {"seed": 4}])
def test_another_step_or_seed_is_other_noise(other: dict[str, int]) -> None:
    here, there = noised((10_000,))[0], noised((10_000,), **other)[0]
    assert abs(np.corrcoef(here, there)[0, 1]) < 0.04


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_make_all_of_it_once(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_noise, "BLOCK", 1000)
    shapes = [(7,), (30, 100), (0,), (1500,)]
    total = noised(*shapes)
    assert len(torch.cat([t.flatten() for t in total]).unique()) == 4507
    for worker in range(workers):
        add_noise(total, -1.0, 3, 5, worker, workers)
    for tensor in total:
        assert not tensor.any()


def test_is_added_in_place_whatever_the_layout() -> None:
    (plain,) = noised((30, 20))
    transposed = torch.full((20, 30), 7.0).T
    add_noise([transposed], 1.0, seed=3, step=5)
    torch.testing.assert_close(transposed - 7, plain, rtol=0, atol=2e-6)


def test_blocks_differ() -> None:
    one, other = (normal_numbers(KEY, block, 10_000, CPU) for block in (0, 1))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.04
    assert BLOCK % 2 == 0


KERNEL = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from dpfp_ray.privacy import chacha_kernel, device_noise
start = torch.randint(-(2**31), 2**31, (16,), dtype=torch.int32)
found, expected = (one.key_stream(start, 700) for one in (chacha_kernel, device_noise))
assert torch.equal(found, expected)
"""


def test_words_of_the_kernel_are_the_same() -> None:
    """In Triton's interpreter, which computes on a CPU; in a process that it may be chosen for."""
    pytest.importorskip("triton", reason="a build of torch for CPUs has no Triton")
    subprocess.run([sys.executable, "-c", KERNEL], check=True)
