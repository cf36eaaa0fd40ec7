import json

import pytest

from dpfp_ray.results.power import (
    Spread,
    power_of,
    seeds_needed,
    smallest_difference,
)
from dpfp_ray.system.errors import UserError


def smallest(**plan: int) -> float:
    found = smallest_difference(**{"rows": 872, "seeds": 5, "methods": 2, **plan})
    assert found.smallest_difference is not None
    return found.smallest_difference


def test_the_smallest_difference_has_the_power_announced() -> None:
    assert power_of(smallest(methods=3), rows=872, seeds=5, methods=3) == pytest.approx(
        0.8, abs=1e-3
    )


def test_seeds_rows_and_fewer_methods_each_show_smaller_differences() -> None:
    assert smallest(seeds=10) < smallest() < smallest(seeds=3)
    assert smallest(rows=9_815) < smallest() < smallest(rows=300)
    assert smallest() < smallest(methods=4)


def test_one_seed_speaks_of_these_models() -> None:
    assert smallest_difference(rows=872, seeds=1).scope == "these models"
    assert smallest_difference(rows=872, seeds=2).scope == "methods"


def test_what_cannot_be_shown_at_all_is_none() -> None:
    plan = smallest_difference(rows=50, seeds=2, methods=5)

    assert plan.smallest_difference is None
    assert json.loads(json.dumps(plan.as_json()))["smallest_difference"] is None


def test_the_power_of_no_difference_is_below_the_level() -> None:
    assert power_of(0.0, rows=872, seeds=5) <= 0.05


def test_the_seeds_needed_are_the_fewest() -> None:
    seeds = seeds_needed(0.032, rows=872)

    assert seeds is not None
    assert power_of(0.032, rows=872, seeds=seeds) >= 0.8
    assert power_of(0.032, rows=872, seeds=seeds - 1) < 0.8


def test_no_number_of_seeds_makes_up_for_too_few_rows() -> None:
    assert seeds_needed(0.005, rows=872) is None


def test_a_difference_in_points_is_refused() -> None:
    with pytest.raises(UserError, match="one point"):
        seeds_needed(2, rows=872)


def test_a_spread_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(UserError, match="seed_disagreement"):
        Spread(disagreement=0.05, seed_disagreement=0.2)
