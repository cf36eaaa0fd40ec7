"""Choices among rows follow from each row's own text: one record moves one record."""

import numpy as np
import pytest

from dpfp_ray.data import Split
from dpfp_ray.data.split import hold_out, places, subset


def numbered(count: int) -> Split:
    return Split([str(i) for i in range(count)], None, np.arange(count) % 2)


def without(split: Split, row: int) -> Split:
    return split.take(np.delete(np.arange(len(split)), row))


def test_places_are_fixed_for_ever() -> None:
    found = places(Split(["a", "b"], ["", "c"], np.array([0, 1])), "subset")
    assert found.tolist() == [9102423101519449619, 6228585569697440750]


def test_places_look_uniform() -> None:
    found = places(numbered(10_000), "subset") / 2.0**64
    # The mean of 10,000 uniform numbers has a standard deviation of 0.0029.
    assert abs(found.mean() - 0.5) < 4 * 0.0029


def test_places_for_different_purposes_have_nothing_in_common() -> None:
    first, second = (places(numbered(10_000), purpose) / 2.0**64 for purpose in ("a", "b"))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_a_subset_keeps_the_order_and_contains_smaller_ones() -> None:
    small, large = (subset(numbered(1_000), n).texts for n in (10, 20))
    assert set(small) < set(large)
    assert large == sorted(large, key=int)


def test_a_subset_larger_than_the_data_is_all_of_it() -> None:
    assert len(subset(numbered(5), 6)) == 5


@pytest.mark.parametrize("row", [0, 17, 499])
def test_a_record_that_leaves_a_subset_is_replaced_by_one(row: int) -> None:
    whole = numbered(500)
    before, after = set(subset(whole, 100).texts), set(subset(without(whole, row), 100).texts)
    assert len(before - after) == len(after - before) == (str(row) in before)


@pytest.mark.parametrize("row", [0, 17, 4_999])
def test_a_removed_record_moves_no_other_between_train_and_dev(row: int) -> None:
    whole = numbered(5_000)
    train, dev = hold_out(whole, 0.1)
    smaller_train, smaller_dev = hold_out(without(whole, row), 0.1)
    assert set(train.texts) - set(smaller_train.texts) <= {str(row)}
    assert set(dev.texts) - set(smaller_dev.texts) <= {str(row)}
    assert len(smaller_train) + len(smaller_dev) == 4_999


def test_a_duplicate_does_not_change_who_is_chosen() -> None:
    whole = numbered(2_000)
    doubled = Split([*whole.texts, "7"], None, np.append(whole.labels, 1))
    assert set(hold_out(whole, 0.1)[1].texts) == set(hold_out(doubled, 0.1)[1].texts)


def test_about_the_share_is_held_out() -> None:
    _, dev = hold_out(numbered(5_000), 0.1)
    assert abs(len(dev) - 500) < 4 * np.sqrt(5_000 * 0.1 * 0.9)


def test_equal_records_are_on_one_side() -> None:
    split = Split(["same"] * 50 + [f"t{i}" for i in range(50)], None, np.arange(100) % 2)
    train, dev = hold_out(split, 0.2)
    assert not set(train.texts) & set(dev.texts)


def test_no_class_leaves_train() -> None:
    split = Split([str(i) for i in range(30)], None, np.array([1] + [0] * 29))
    train, _ = hold_out(split, 0.97)
    assert set(train.labels) == {0, 1}


def test_a_few_rows_still_give_a_dev_set() -> None:
    train, dev = hold_out(numbered(8), 0.01)
    assert len(train) == 7
    assert len(dev) == 1
