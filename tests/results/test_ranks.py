import numpy as np
import pytest

from dpfp_ray.plan.errors import UserError
from dpfp_ray.results.ranks import critical_difference, friedman, rank_methods, wins_ties_losses
from dpfp_ray.results.statistics import compare_methods


def scores(*rows: tuple[float, ...]) -> dict[str, dict[str, float]]:
    return {f"task {index}": dict(zip("abcd", row, strict=False)) for index, row in enumerate(rows)}


def test_average_ranks_put_the_best_first_and_share_ties() -> None:
    ranking = rank_methods(scores((0.7, 0.9, 0.8), (0.8, 0.9, 0.8)))

    assert ranking.methods == ("b", "c", "a")
    assert ranking.average_ranks == (1.0, 2.25, 2.75)


@pytest.mark.parametrize(("methods", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_the_critical_difference_agrees_with_demsars_table(methods: int, q: float) -> None:
    expected = q * np.sqrt(methods * (methods + 1) / (6 * 12))

    assert critical_difference(methods, 12) == pytest.approx(expected, rel=1e-3)


def test_friedmans_p_value_agrees_with_shuffled_ranks() -> None:
    rng = np.random.default_rng(0)
    ranks = np.array([rng.permutation(4) + 1 for _ in range(12)])
    ranks[:5] = [1, 2, 3, 4]
    shuffled = rng.permuted(np.broadcast_to(ranks, (20_000, 12, 4)), axis=2).mean(axis=1)
    above = ((shuffled - 2.5) ** 2).sum(axis=1) >= ((ranks.mean(axis=0) - 2.5) ** 2).sum() - 1e-9

    assert friedman(ranks) == pytest.approx(above.mean(), abs=0.02)


def test_two_methods_are_compared_by_the_sign_test() -> None:
    assert friedman(np.array([[1, 2]] * 6)) == pytest.approx(2 / 2**6)


def test_methods_equal_on_every_task_are_not_told_apart() -> None:
    ranking = rank_methods(scores((0.8, 0.8, 0.8), (0.7, 0.7, 0.7)))

    assert (ranking.friedman_p, ranking.groups) == (1.0, (("a", "b", "c"),))


def test_methods_further_apart_than_the_critical_difference_share_no_group() -> None:
    ranking = rank_methods(scores(*[(0.9, 0.8, 0.7, 0.6)] * 8))

    assert ranking.friedman_p < 0.05
    assert ranking.groups == (("a", "b"), ("b", "c"), ("c", "d"))


def test_methods_without_a_score_on_every_task_are_left_out() -> None:
    ranking = rank_methods(scores((0.9, 0.8, 0.7), (0.9, 0.8)))

    assert ranking.methods == ("a", "b")


def test_one_task_has_no_ranking() -> None:
    with pytest.raises(UserError, match="two tasks"):
        rank_methods(scores((0.9, 0.8)))


def test_wins_ties_and_losses_come_from_each_tasks_own_tests() -> None:
    labels = np.zeros(300, dtype=int)
    right, half = np.zeros((5, 300), dtype=int), np.tile([0, 1], (5, 150))
    tasks = {
        "won": {"new": right, "base": half},
        "tied": {"new": half, "base": half},
        "lost": {"new": half, "base": right ^ np.eye(5, 300, dtype=int)},
        "once": {"new": right[:1], "base": half[:1]},
        "without": {"new": right},
    }
    comparisons = {
        task: compare_methods(methods, labels, classes=2) for task, methods in tasks.items()
    }

    (record,) = wins_ties_losses(comparisons, ["base"])

    # On "won" the new method answers one class, so it may not win.
    assert (record.wins, record.ties, record.losses, record.undecided) == (0, 2, 1, 1)
