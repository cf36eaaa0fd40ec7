"""The split of a step into parts: complete, within the limit, and as cheap as any can be."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from dpfp_ray.data.batches import split_rows


def cost(lengths: np.ndarray, parts: list[np.ndarray], part_cost: int) -> int:
    return sum(len(part) * int(lengths[part].max()) + part_cost for part in parts)


def cheapest(lengths: np.ndarray, max_rows: int, part_cost: int) -> int:
    """The naive twin: every way to split the sorted rows."""
    ordered, rows = np.sort(lengths), len(lengths)
    found = []
    for splits in range(rows):
        for places in combinations(range(1, rows), splits):
            edges = [0, *places, rows]
            spans = list(pairwise(edges))
            if all(end - start <= max_rows for start, end in spans):
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


def test_a_full_part_may_start_at_any_change_of_length() -> None:
    """Splits only at changes and at multiples of the limit need four parts here."""
    lengths = np.array([1, 10, 10, 10, 10, 10, 10, 11, 11])
    assert cost(lengths, split_rows(lengths, 4, 5), 5) == 1 + 40 + 44 + 3 * 5


def test_no_rows_make_no_part() -> None:
    assert split_rows(np.array([], dtype=np.int64), 8) == []
