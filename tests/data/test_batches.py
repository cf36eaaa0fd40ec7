"""The split of a step into parts: complete, within the limit, and as cheap as any can be."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from dpfp_ray.data.batches import parts_in_order, split_rows


def cost(lengths: np.ndarray, parts: list[np.ndarray], part_cost: int) -> int:
    return sum(len(part) * int(lengths[part].max()) + part_cost for part in parts)


def cheapest(lengths: np.ndarray, max_rows: int, part_cost: int, max_tokens: int = 10**9) -> int:
    """The naive twin: every way to split the sorted rows. A row alone may be of any length."""
    ordered, rows = np.sort(lengths), len(lengths)
    found = []
    for splits in range(rows):
        for places in combinations(range(1, rows), splits):
            edges = [0, *places, rows]
            spans = list(pairwise(edges))
            if all(
                end - start == 1
                or (end - start <= max_rows and (end - start) * ordered[end - 1] <= max_tokens)
                for start, end in spans
            ):
                padded = sum((end - start) * int(ordered[end - 1]) for start, end in spans)
                found.append(padded + part_cost * len(spans))
    return min(found)


@pytest.mark.parametrize("max_rows", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 300])
def test_every_row_is_in_one_part_within_the_limit(rows: int, max_rows: int) -> None:
    lengths = np.random.default_rng(rows).integers(3, 60, rows)
    parts = split_rows(lengths, max_rows)
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    assert max(len(part) for part in parts) <= max_rows


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_is_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, int(rng.integers(3, 14)), int(rng.integers(1, 11)))
    max_rows, part_cost = int(rng.integers(1, 8)), int(rng.integers(0, 25))
    parts = split_rows(lengths, max_rows, part_cost)
    assert cost(lengths, parts, part_cost) == cheapest(lengths, max_rows, part_cost)


@pytest.mark.parametrize("seed", range(60))
def test_no_split_within_a_budget_of_tokens_is_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, int(rng.integers(3, 14)), int(rng.integers(1, 11)))
    max_rows, part_cost = int(rng.integers(2, 12)), int(rng.integers(0, 25))
    budget = int(rng.integers(1, 60))
    parts = split_rows(lengths, max_rows, part_cost, max_tokens=budget)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert cost(lengths, parts, part_cost) == cheapest(lengths, max_rows, part_cost, budget)


@pytest.mark.parametrize("budget", [None, 1, 7, 30])
def test_packed_rows_are_taken_as_they_come(budget: int | None) -> None:
    lengths = np.random.default_rng(0).integers(1, 10, 50)
    parts = parts_in_order(lengths, 8, budget)
    assert np.concatenate(parts).tolist() == list(range(50))
    for part, following in pairwise(parts):
        more = [*part, following[0]]
        assert len(part) == 8 or (budget is not None and lengths[more].sum() > budget)
    for part in parts:
        assert len(part) <= 8
        assert budget is None or len(part) == 1 or lengths[part].sum() <= budget


def test_a_person_with_more_tokens_than_the_budget_is_a_part_alone() -> None:
    owners = np.array([0, 0, 0, 1, 2])
    parts = split_rows(np.array([5, 4, 5, 5, 5]), 8, 0, owners, max_tokens=10)
    assert sorted(sorted(part.tolist()) for part in parts) == [[0, 1, 2], [3, 4]]


def test_a_full_part_may_start_at_any_change_of_length() -> None:
    """Splits only at changes and at multiples of the limit need four parts here."""
    lengths = np.array([1, 10, 10, 10, 10, 10, 10, 11, 11])
    assert cost(lengths, split_rows(lengths, 4, 5), 5) == 1 + 40 + 44 + 3 * 5


def test_no_rows_make_no_part() -> None:
    assert split_rows(np.array([], dtype=np.int64), 8) == []
