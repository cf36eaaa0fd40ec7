"""The promise of every table, checked on methods whose true accuracy is known."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from dpfp_ray.results import paired
from dpfp_ray.results.power import Spread, smallest_difference
from dpfp_ray.results.statistics import compare_methods
from tests.results.simulated_methods import World, simulate

TABLES = 1_000
QUIET = World()
RESTLESS = World(seed=0.5)  # accuracies of one method spread by about 4 points over seeds
OWN_VIEWS = World(view=3.0, seed=0.0)
UNLIKE_ROWS = World(difficulty=8.0, view=0.5, seed=0.3)

# 5% of 1,000 tables, and what chance adds to a true 5% in all but one run of a thousand.
AT_MOST = stats.binom.isf(0.001, TABLES, 0.05) / TABLES


def adjusted(methods: list[np.ndarray]) -> np.ndarray:
    pairs = combinations(methods, 2)
    return paired.holm(
        np.stack([paired.p_value(paired.parts(one, other)) for one, other in pairs], axis=-1)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "methods", "seeds", "rows", "accuracy"),
    [
        (QUIET, 2, 2, 50, 0.8),
        (QUIET, 5, 5, 100, 0.7),
        (RESTLESS, 2, 2, 872, 0.8),
        (RESTLESS, 2, 3, 300, 0.5),
        (RESTLESS, 3, 5, 872, 0.9),
        (OWN_VIEWS, 2, 5, 900, 0.8),
        (OWN_VIEWS, 4, 3, 200, 0.7),
        (UNLIKE_ROWS, 2, 4, 500, 0.97),
    ],
)
def test_equal_methods_have_a_winner_in_at_most_five_of_a_hundred_tables(
    world: World, methods: int, seeds: int, rows: int, accuracy: float
) -> None:
    rng = np.random.default_rng(16)
    runs = simulate(rng, world, (accuracy,) * methods, tables=TABLES, seeds=seeds, rows=rows)

    false_wins = (adjusted(runs) <= 0.05).any(axis=-1).mean()

    assert false_wins <= AT_MOST


@pytest.mark.slow
def test_a_restless_method_does_not_beat_a_steady_equal_one() -> None:
    """Seed spreads that differ between methods: nothing may be pooled."""
    rng = np.random.default_rng(17)
    steady = simulate(rng, World(seed=0.0), (0.8,), tables=TABLES, seeds=5, rows=600)[0]
    restless = simulate(rng, World(seed=1.0), (0.8,), tables=TABLES, seeds=3, rows=600)[0]

    assert (adjusted([steady, restless]) <= 0.05).mean() <= AT_MOST


@pytest.mark.slow
def test_a_real_model_as_good_as_a_one_class_model_is_tied_with_it() -> None:
    """The one-class model is right on the rows of its class, whatever the seed."""
    rng = np.random.default_rng(18)
    runs = simulate(rng, QUIET, (0.6,), tables=TABLES, seeds=3, rows=200)[0]
    constant = np.repeat(rng.random((TABLES, 1, 200)) < 0.6, 3, axis=1)

    assert (adjusted([runs, constant]) <= 0.05).mean() <= AT_MOST


@pytest.mark.slow
def test_methods_without_seed_spread_hold_the_level_with_few_rows_that_differ() -> None:
    """Each seed gives the same model: the test is McNemar's, on sparse disagreements."""
    rng = np.random.default_rng(19)
    for share in (0.1, 0.3):
        differs = rng.random((TABLES, 1, 200)) < share
        first = (rng.random((TABLES, 1, 200)) < 0.5) & differs
        runs = [np.repeat(one, 3, axis=1) for one in (first, differs & ~first)]

        assert (adjusted(runs) <= 0.05).mean() <= AT_MOST


@pytest.mark.slow
def test_one_seed_tables_of_equal_methods_never_name_a_winner_although_models_differ() -> None:
    rng = np.random.default_rng(20)
    runs = simulate(rng, RESTLESS, (0.8, 0.8, 0.8), tables=200, seeds=1, rows=872)
    labels = np.ones(872, dtype=int)
    told_apart = 0

    for table in range(200):
        comparison = compare_methods(
            {str(index): method[table].astype(int) for index, method in enumerate(runs)},
            labels,
            classes=2,
        )
        told_apart += any(pair.p_holm <= 0.05 for pair in comparison.pairs)
        assert comparison.winner is None
        assert {pair.call for pair in comparison.pairs} == {"these models only"}

    assert told_apart > 60  # what a table without seeds would have called wins


def true_spread(world: World, accuracies: tuple[float, float]) -> Spread:
    """The spread of methods with these accuracies, from far more rows than a table has."""
    rng = np.random.default_rng(21)
    runs = simulate(rng, world, accuracies, tables=1_000, seeds=2, rows=500)
    luck = stats.norm.ppf((np.arange(2_000) + 0.5) / 2_000)
    rest = np.sqrt(world.total**2 - world.seed**2)
    over_seeds = [
        stats.norm.cdf((world.total * stats.norm.ppf(accuracy) + world.seed * luck) / rest)
        for accuracy in accuracies
    ]
    return Spread(
        disagreement=float((runs[0] != runs[1]).mean()),
        seed_disagreement=float(np.mean([one[:, 0] != one[:, 1] for one in runs])),
        seed_sd=float(np.sqrt(np.mean([one.var() for one in over_seeds]))),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "methods", "seeds", "rows"),
    [
        (QUIET, 2, 5, 872),
        (QUIET, 3, 3, 400),
        (OWN_VIEWS, 2, 3, 872),
        (OWN_VIEWS, 4, 5, 300),
        (World(seed=0.3), 2, 5, 500),
        (QUIET, 2, 2, 872),
    ],
)
def test_the_smallest_difference_announced_is_called_in_eighty_of_a_hundred_tables(
    world: World, methods: int, seeds: int, rows: int
) -> None:
    difference, middle = 0.05, 0.7
    for _ in range(3):  # the spread of two methods depends a little on how far they are apart
        pair = (middle + difference / 2, middle - difference / 2)
        spread = true_spread(world, pair)
        announced = smallest_difference(rows=rows, seeds=seeds, methods=methods, spread=spread)
        assert announced.smallest_difference is not None
        difference = announced.smallest_difference
    pair = (middle + difference / 2, middle - difference / 2)
    rng = np.random.default_rng(22)
    runs = simulate(rng, world, pair, tables=TABLES, seeds=seeds, rows=rows)

    p = paired.p_value(paired.parts(runs[0], runs[1]))
    called = (p <= 0.05 / (methods * (methods - 1) // 2)).mean()

    assert called == pytest.approx(0.8, abs=0.05)
