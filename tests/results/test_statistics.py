import json
import subprocess
import sys

import numpy as np
import pytest

from dpfp_ray.results.statistics import Comparison, compare_methods, compare_predictions
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.dev_scores import DevPredictions

ROWS = 400
LABELS = np.tile([0, 1, 1, 0, 1], ROWS // 5)  # class 1 is the majority with 0.6


def answers(accuracy: float, seeds: int, seed: int = 0) -> np.ndarray:
    """Runs with exactly this accuracy, up to one row a run."""
    rng = np.random.default_rng(seed)
    runs = np.tile(LABELS, (seeds, 1))
    for index, run in enumerate(runs):
        wrong = rng.permutation(ROWS)[: round(ROWS * (1 - accuracy)) + index % 2]
        run[wrong] = 1 - run[wrong]
    return runs


def table(**methods: np.ndarray) -> Comparison:
    return compare_methods(methods, LABELS, classes=2)


def test_a_clearly_better_method_wins() -> None:
    comparison = table(good=answers(0.95, 5), fair=answers(0.7, 5, 1), poor=answers(0.69, 5, 2))

    assert comparison.call("good", "fair") == "better"
    assert comparison.call("poor", "good") == "worse"
    assert comparison.call("fair", "poor") == "tie"
    assert comparison.winner == "good"


def test_one_seed_names_no_winner_however_large_the_difference() -> None:
    comparison = table(good=answers(0.95, 1), poor=answers(0.5, 1, 1))
    (pair,) = comparison.pairs

    assert (pair.call, pair.scope) == ("these models only", "these models")
    assert pair.p < 1e-6
    assert comparison.winner is None


def test_equal_answers_are_a_tie() -> None:
    runs = answers(0.8, 3)
    (pair,) = table(one=runs, other=runs).pairs

    assert (pair.difference, pair.p, pair.call) == (0.0, 1.0, "tie")


def test_a_method_that_answers_one_class_is_called_that_and_never_wins() -> None:
    constant = np.ones((5, ROWS), dtype=int)
    comparison = table(constant=constant, bad=answers(0.2, 5))

    assert comparison.methods[0].one_class
    assert comparison.pairs[0].p_holm < 0.05
    assert comparison.pairs[0].call == "tie"
    assert "one class" in comparison.pairs[0].reason
    assert comparison.winner is None


def test_a_method_that_answers_one_class_may_lose() -> None:
    comparison = table(constant=np.ones((5, ROWS), dtype=int), good=answers(0.95, 5))

    assert comparison.call("good", "constant") == "better"


def test_single_runs_that_answer_one_class_are_counted() -> None:
    runs = answers(0.9, 4)
    runs[2] = 0

    score = table(method=runs).methods[0]

    assert (score.one_class_runs, score.one_class) == (1, False)


def test_a_score_is_the_mean_over_all_runs() -> None:
    runs = np.concatenate([answers(0.9, 1), answers(0.5, 1)])

    assert table(method=runs).methods[0].accuracy == pytest.approx(0.7)


def test_methods_are_set_against_the_majority_class() -> None:
    comparison = table(good=answers(0.9, 5), chance=answers(0.6, 5), once=answers(0.9, 1))

    assert (comparison.majority_class, comparison.majority_accuracy) == (1, pytest.approx(0.6))
    assert [score.above_majority for score in comparison.methods] == [True, False, None]


def test_more_methods_make_the_same_pair_harder_to_call() -> None:
    pair = {"one": answers(0.8, 5), "two": answers(0.7, 5, 1)}
    others = {f"tied {index}": answers(0.75, 5, 9) for index in range(3)}

    alone, among = table(**pair).pairs[0], table(**pair, **others).pairs[0]

    assert among.p == alone.p
    assert among.p_holm > alone.p_holm
    assert among.simultaneous[0] < alone.simultaneous[0] == alone.interval[0]


def test_json_keeps_everything() -> None:
    comparison = table(good=answers(0.95, 5), poor=answers(0.5, 1, 1))
    kept = json.loads(json.dumps(comparison.as_json(), allow_nan=False))

    assert kept["pairs"][0]["call"] == "these models only"
    assert kept["methods"][1]["seed_sd"] is None


def test_predictions_for_other_rows_are_refused() -> None:
    with pytest.raises(UserError, match="same dev rows"):
        table(one=answers(0.9, 2), other=answers(0.9, 2)[:, :-1])


def kept(runs: np.ndarray, fingerprint: str = "rows") -> list[DevPredictions]:
    return [DevPredictions.of(run, LABELS, classes=2, fingerprint=fingerprint) for run in runs]


def test_records_compare_as_their_answers_do() -> None:
    one, other = answers(0.9, 3), answers(0.7, 3, 1)

    assert compare_predictions({"one": kept(one), "other": kept(other)}) == table(
        one=one, other=other
    )


@pytest.mark.slow
def test_tables_do_not_wait_for_scikit_learn() -> None:
    """A second of start-up that only `metrics` needs."""
    code = "import sys, dpfp_ray.results.power; sys.exit('sklearn' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
