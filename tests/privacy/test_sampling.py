"""Draws against the naive M × D grid of coin flips, and what makes them repeatable and secret."""

import hashlib
import math
import tracemalloc

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from torch import Tensor

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import (
    BLOCK,
    TAIL,
    Noise,
    PoissonSampler,
    ShuffleSampler,
    add_noise,
    derived_seed,
    fresh_seed,
    keyed_generator,
    keyed_integer,
    make_sampler,
)

# Chance that a correct sampler fails one of the statistical tests; seeds are fixed, so none does.
ALPHA = 1e-3
D, M, P = 7, 3, 0.2
STEPS = 4000


def grids(draw_cells: list[np.ndarray], records: int = D, micro_batches: int = M) -> np.ndarray:
    """Draws as 0/1 grids of shape (steps, M, D)."""
    grid = np.zeros((len(draw_cells), micro_batches * records), dtype=np.int64)
    for step, cells in enumerate(draw_cells):
        grid[step, cells] += 1
    return grid.reshape(-1, micro_batches, records)


@pytest.fixture(scope="module")
def ours() -> np.ndarray:
    sampler = PoissonSampler(D, M, P, seed=1)
    return grids([sampler.draw_cells(step) for step in range(STEPS)])


@pytest.fixture(scope="module")
def naive() -> np.ndarray:
    """The twin: one Bernoulli(p) trial for each record and micro-batch."""
    return (np.random.default_rng(2).random((STEPS, M, D)) < P).astype(np.int64)


def same_distribution(one: np.ndarray, other: np.ndarray) -> bool:
    """χ² test of two samples of small whole numbers; rare values are put together."""
    top = max(one.max(), other.max()) + 1
    table = np.stack([np.bincount(one, minlength=top), np.bincount(other, minlength=top)])
    rare = table.sum(0) < 20
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)])
    return bool(stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > ALPHA)


def test_no_cell_comes_up_twice_in_a_step(ours: np.ndarray) -> None:
    assert ours.max() == 1


def test_row_counts_are_binomial(ours: np.ndarray) -> None:
    counts = np.bincount(ours.sum((1, 2)), minlength=M * D + 1)
    expected = stats.binom.pmf(np.arange(M * D + 1), M * D, P) * STEPS
    rare = expected < 10
    seen = [*counts[~rare], counts[rare].sum()]
    assert stats.chisquare(seen, [*expected[~rare], expected[rare].sum()]).pvalue > ALPHA


def test_every_cell_comes_up_with_probability_p(ours: np.ndarray) -> None:
    low, high = stats.binom.interval(1 - ALPHA / (M * D), STEPS, P)
    hits = ours.sum(0)
    assert np.all((low <= hits) & (hits <= high))


def test_pairs_of_cells_are_independent(ours: np.ndarray) -> None:
    flat = ours.reshape(STEPS, M * D)
    together = (flat.T @ flat)[np.triu_indices(M * D, 1)]
    low, high = stats.binom.interval(1 - ALPHA / len(together), STEPS, P**2)
    assert np.all((low <= together) & (together <= high))


def test_a_record_is_in_several_micro_batches_as_often_as_in_the_naive_twin(
    ours: np.ndarray, naive: np.ndarray
) -> None:
    assert (ours.sum(1) > 1).any()
    assert same_distribution(ours.sum(1).ravel(), naive.sum(1).ravel())


def test_micro_batch_sizes_are_distributed_as_the_naive_twins(
    ours: np.ndarray, naive: np.ndarray
) -> None:
    assert same_distribution(ours.sum(2).ravel(), naive.sum(2).ravel())


def test_steps_are_independent(ours: np.ndarray) -> None:
    """A record that was in one step is in the next one no more often than any other."""
    seen = ours[:, 0, 0]
    table = [[np.sum((seen[:-1] == a) & (seen[1:] == b)) for a in (0, 1)] for b in (0, 1)]
    assert stats.chi2_contingency(table).pvalue > ALPHA


def test_dense_samples_are_exact_too() -> None:
    """numpy chooses another algorithm where most cells are taken; it must not show."""
    sampler = PoissonSampler(4000, 3, 0.9, seed=3)
    hits = grids([sampler.draw_cells(step) for step in range(50)], 4000, 3).sum((0, 1))
    naive = np.random.default_rng(4).binomial(150, 0.9, 4000)
    assert same_distribution(hits, naive)


def test_rows_are_the_cells_records() -> None:
    sampler = PoissonSampler(5, 4, 0.5, seed=1)
    cells = sampler.draw_cells(0)
    assert sampler.draw(0).tolist() == [cell % 5 for cell in cells.tolist()]
    assert cells.tolist() == sorted(cells.tolist())


def test_empty_draws_happen_and_are_empty_arrays() -> None:
    sampler = PoissonSampler(10, 1, 0.02, seed=1)
    sizes = [len(sampler.draw(step)) for step in range(100)]
    assert 0 in sizes
    assert max(sizes) > 0
    assert sampler.draw(sizes.index(0)).dtype == np.int64


def test_p_of_one_takes_every_cell() -> None:
    assert PoissonSampler(6, 2, 1.0, seed=1).draw(3).tolist() == [*range(6), *range(6)]


def test_a_hundred_million_records_cost_no_memory() -> None:
    records, micro_batches = 10**8, 32
    sampler = PoissonSampler(records, micro_batches, 1024 / (micro_batches * records), seed=1)
    sampler.draw(0)
    tracemalloc.start()
    rows = sampler.draw(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert abs(len(rows) - 1024) < 5 * 32
    assert rows.max() > 0.9 * records
    assert peak < 2**20


def test_a_draw_is_a_function_of_seed_and_step_alone() -> None:
    forwards = PoissonSampler(50, 2, 0.1, seed=9)
    backwards = PoissonSampler(50, 2, 0.1, seed=9)
    there = [forwards.draw(step).tolist() for step in range(20)]
    back = [backwards.draw(step).tolist() for step in reversed(range(20))]
    assert there == back[::-1]


@pytest.mark.parametrize("other", [("seed", 2, 0), ("step", 1, 1)])
def test_other_seeds_and_steps_draw_other_records(other: tuple[str, int, int]) -> None:
    _, seed, step = other
    drawn = PoissonSampler(1000, 2, 0.1, seed=1).draw(0)
    assert drawn.tolist() != PoissonSampler(1000, 2, 0.1, seed=seed).draw(step).tolist()


def test_purposes_have_streams_of_their_own() -> None:
    names = ("sample", "noise", "shuffle")
    numbers = {float(keyed_generator(1, purpose, 0).random()) for purpose in names}
    assert len(numbers) == 3


@pytest.mark.parametrize("bit", range(128))
def test_every_bit_of_a_seed_matters(bit: int) -> None:
    seed = 0x0123456789ABCDEF_0123456789ABCDEF
    assert keyed_integer(seed, "noise") != keyed_integer(seed ^ (1 << bit), "noise")


def test_keys_are_hashed_as_documented() -> None:
    """Pins the stream: another one would make a resumed run draw something else."""
    digest = hashlib.blake2b(b"5 noise 7", digest_size=16).digest()
    philox = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64))
    expected = np.random.Generator(philox).random(3)
    assert keyed_generator(5, "noise", 7).random(3).tolist() == expected.tolist()


def test_keyed_integers_suit_torch() -> None:
    values = [keyed_integer(1, "dropout", step) for step in range(200)]
    assert all(0 <= value < 2**63 for value in values)
    assert len(set(values)) == 200
    assert max(values) > 2**62


def test_fresh_seeds_have_128_bits_and_differ() -> None:
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert 2**120 < max(seeds) < 2**128


def test_derived_seeds_differ_by_seed_and_purpose() -> None:
    derived = {derived_seed(seed, name) for seed in (1, 2) for name in ("a", "b")}
    assert len(derived) == 4
    assert derived_seed(1, "a") in derived


# ShuffleSampler ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("records", "batch"), [(10, 3), (10, 10), (7, 1), (12, 4), (5, 4)])
def test_each_pass_covers_every_record_once(records: int, batch: int) -> None:
    sampler = ShuffleSampler(records, batch, seed=1)
    stream = np.concatenate([sampler.draw(step) for step in range(records * 3)])
    for start in range(0, len(stream) - records + 1, records):
        assert sorted(stream[start : start + records].tolist()) == list(range(records))


@pytest.mark.parametrize(("records", "batch"), [(10, 3), (5, 4), (3, 8)])
def test_batches_have_exactly_b_rows_across_the_ends_of_passes(records: int, batch: int) -> None:
    sampler = ShuffleSampler(records, batch, seed=1)
    assert {len(sampler.draw(step)) for step in range(20)} == {batch}


def test_passes_are_shuffled_differently() -> None:
    sampler = ShuffleSampler(20, 20, seed=1)
    assert sampler.draw(0).tolist() != sampler.draw(1).tolist()
    assert sampler.draw(0).tolist() != list(range(20))
    assert sampler.draw(0).tolist() != ShuffleSampler(20, 20, seed=2).draw(0).tolist()


def test_draws_do_not_depend_on_the_order_of_calls() -> None:
    """Going back a pass once found an empty pass in the cache and never ended."""
    expected = [ShuffleSampler(10, 4, seed=1).draw(step).tolist() for step in range(12)]
    sampler = ShuffleSampler(10, 4, seed=1)
    for step in [7, 2, 11, 0, 5, 4, 10, 1]:
        assert sampler.draw(step).tolist() == expected[step]


def test_changing_a_drawn_batch_changes_no_later_one() -> None:
    sampler = ShuffleSampler(10, 4, seed=1)
    before = sampler.draw(0).tolist()
    sampler.draw(0)[:] = 99
    assert sampler.draw(0).tolist() == before


# make_sampler ------------------------------------------------------------------------------------


def test_private_plans_get_the_poisson_sampler_that_the_accounting_assumes() -> None:
    plan = Plan(method="dpfp", batch_size=8, micro_batches=4, records=100)
    sampler = make_sampler(plan, seed=5)
    assert isinstance(sampler, PoissonSampler)
    facts = (sampler.cells, sampler.records, sampler.p, sampler.seed)
    assert facts == (400, 100, 8 / (4 * 100), 5)


def test_the_expected_number_of_rows_is_b() -> None:
    plan = Plan(method="dpfp", batch_size=8, micro_batches=4, records=100)
    sampler = make_sampler(plan, seed=5)
    mean = np.mean([len(sampler.draw(step)) for step in range(2000)])
    assert abs(mean - 8) < 4 * np.sqrt(8 / 2000)


def test_non_private_plans_get_ordinary_batches() -> None:
    sampler = make_sampler(Plan(method="non_private", batch_size=8, records=100), seed=5)
    assert isinstance(sampler, ShuffleSampler)
    assert len(sampler.draw(0)) == 8


# Noise against a slow twin of its formula, its distribution, and what it depends on


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


def test_std_zero_changes_nothing() -> None:
    assert not noised((100,), std=0.0)[0].any()


def test_other_seeds_shuffle_differently() -> None:
    assert ShuffleSampler(20, 20, 1).draw(0).tolist() != ShuffleSampler(20, 20, 2).draw(0).tolist()
