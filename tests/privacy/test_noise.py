"""Keyed noise: the right distribution, the same numbers for everybody, whoever draws them."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dpfp_ray.privacy import noise
from dpfp_ray.privacy.noise import BLOCK, add_noise
from dpfp_ray.privacy.sampling import keyed_generator


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


def test_tensors_and_blocks_are_independent() -> None:
    first, second = noised((2 * BLOCK,), (BLOCK,))
    for one, two in [(first[:BLOCK], first[BLOCK:]), (first[:BLOCK], second)]:
        assert abs(np.corrcoef(one, two)[0, 1]) < 0.03


def test_a_tensor_does_not_depend_on_its_neighbours() -> None:
    # Frozen or not, wide or narrow: tensor 1's noise is tensor 1's.
    assert torch.equal(noised((5,), (7,))[1], noised((BLOCK + 9,), (7,), (2,))[1])


def test_a_block_is_its_own_keyed_draw() -> None:
    (sample,) = noised((BLOCK + 10,), seed=11, step=2)
    expected = keyed_generator(11, "noise 0 1", 2).standard_normal(10, dtype="float32")
    np.testing.assert_array_equal(sample[BLOCK:].numpy(), expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_does_not_depend_on_the_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = noised((3 * BLOCK + 1,), (17, 3))
    monkeypatch.setattr(noise.torch, "get_num_threads", lambda: threads)
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
