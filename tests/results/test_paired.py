from math import comb

import numpy as np
import pytest
from scipy import stats

from dpfp_ray.results import paired
from tests.results.simulated_methods import World, simulate


def some_runs(seed: int, seeds: int = 3, rows: int = 200) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    methods = simulate(rng, World(), (0.8, 0.72), tables=1, seeds=seeds, rows=rows)
    return [runs[0] for runs in methods]


def slow_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """The same test, one number at a time."""
    rows = first.shape[1]
    d = [
        sum(map(int, first[:, row])) / len(first) - sum(map(int, second[:, row])) / len(second)
        for row in range(rows)
    ]
    d = [value for value in d if abs(value) > 1e-9]
    squares = sum(value**2 for value in d)
    df = max(squares**2 / sum(value**4 for value in d) - 1, 1)
    distance = max(abs(sum(d)) / rows - min(map(abs, d)) / rows, 0)

    def excess(level: float) -> float:
        bound = stats.t.isf(level / 2, df) ** 2 * squares / rows**2
        for runs in (first, second):
            variance = np.var([run.mean() for run in runs], ddof=1) / len(runs)
            bound += stats.t.isf(level / 2, len(runs) - 1) ** 2 * variance
        return bound - distance**2

    low, high = 1e-12, 1.0
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


@pytest.mark.parametrize("seed", range(5))
def test_the_p_value_equals_its_slow_twin(seed: int) -> None:
    first, second = some_runs(seed)

    fast = float(paired.p_value(paired.parts(first, second)))

    assert fast == pytest.approx(slow_p_value(first, second), rel=1e-6)


def test_many_tables_at_once_give_what_each_gives_alone() -> None:
    tables = simulate(np.random.default_rng(0), World(), (0.8, 0.7), tables=20, seeds=3, rows=90)

    together = paired.p_value(paired.parts(*tables))
    alone = [
        float(paired.p_value(paired.parts(one, two))) for one, two in zip(*tables, strict=True)
    ]

    assert together.tolist() == pytest.approx(alone)


@pytest.mark.parametrize("level", [0.05, 0.01, 0.001])
@pytest.mark.parametrize("seed", range(8))
def test_the_interval_leaves_out_zero_exactly_when_p_is_below_the_level(
    seed: int, level: float
) -> None:
    pair = paired.parts(*some_runs(seed, rows=500))

    outside = abs(float(pair.difference)) > float(paired.half_width(pair, level))

    assert outside == (float(paired.p_value(pair)) < level)


def test_swapping_the_methods_changes_only_the_sign() -> None:
    first, second = some_runs(1)
    there, back = paired.parts(first, second), paired.parts(second, first)

    assert float(there.difference) == -float(back.difference)
    assert float(paired.p_value(there)) == pytest.approx(float(paired.p_value(back)))


def test_identical_methods_have_p_one_and_an_interval_that_is_not_a_point() -> None:
    runs = some_runs(2)[0][:1].repeat(3, axis=0)
    pair = paired.parts(runs, runs)

    assert float(paired.p_value(pair)) == 1.0
    assert float(paired.half_width(pair, 0.05)) == pytest.approx(3 / 200, rel=0.01)


@pytest.mark.parametrize("level", [0.05, 0.05 / 3, 0.005])
def test_methods_without_seed_spread_hold_the_level_for_every_number_of_rows_that_differ(
    level: float,
) -> None:
    """Exactly, by the binomial law of the rows that only the first has right."""
    rows = 1_000
    for differing in (*range(1, 60), 64, 100, 121, 143, 300, 900):
        wins = np.arange(differing + 1)
        difference = (2 * wins - differing) / rows
        pair = paired.Parts(
            difference=difference,
            step=np.full(len(wins), 1 / rows),
            spread=differing / rows - difference**2,
            rows=rows,
            rows_df=np.full(len(wins), max(differing - 1, 1.0)),
            seed_variances=(),
        )
        chance = stats.binom.pmf(wins, differing, 0.5)
        assert chance[paired.p_value(pair) <= level].sum() <= level


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (6, 0), (9, 3), (5, 5), (2, 17)])
def test_mcnemar_counts_the_splits_that_are_at_least_as_uneven(
    only_first: int, only_second: int
) -> None:
    first = np.array([True] * only_first + [False] * only_second + [True] * 10)
    second = np.array([False] * only_first + [True] * only_second + [True] * 10)
    differing = only_first + only_second
    uneven = sum(
        comb(differing, wins)
        for wins in range(differing + 1)
        if abs(2 * wins - differing) >= abs(only_first - only_second)
    )

    assert paired.mcnemar(first, second) == pytest.approx(uneven / 2**differing)


@pytest.mark.parametrize("right", [0, 3, 40, 50])
def test_the_interval_of_one_run_is_wilsons(right: int) -> None:
    correct = np.arange(50)[None] < right
    expected = stats.binomtest(right, 50).proportion_ci(method="wilson")

    assert paired.accuracy_interval(correct, 0.05) == pytest.approx(
        (expected.low, expected.high), abs=1e-9
    )


def test_the_interval_of_an_accuracy_covers_the_true_one() -> None:
    tables = simulate(
        np.random.default_rng(3), World(seed=0.3), (0.8,), tables=400, seeds=3, rows=150
    )[0]

    ends = np.array([paired.accuracy_interval(runs, 0.05) for runs in tables])
    covered = ((ends[:, 0] <= 0.8) & (ends[:, 1] >= 0.8)).mean()

    assert covered >= stats.binom.ppf(0.001, 400, 0.95) / 400


def test_the_interval_of_a_difference_covers_the_true_one() -> None:
    tables = simulate(
        np.random.default_rng(4), World(seed=0.3), (0.9, 0.6), tables=400, seeds=3, rows=150
    )
    pair = paired.parts(*tables)

    covered = (np.abs(pair.difference - 0.3) <= paired.half_width(pair, 0.05)).mean()

    assert covered >= stats.binom.ppf(0.001, 400, 0.95) / 400


def test_holm_steps_down_from_the_smallest() -> None:
    assert paired.holm(np.array([0.04, 0.01, 0.03, 0.9])).tolist() == pytest.approx(
        [0.09, 0.04, 0.09, 0.9]
    )
