"""Scores of answers, against scikit-learn and the project's own Wilson interval."""

from pathlib import Path

import numpy as np
import pandas
import pytest
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support

from dpfp_ray import Plan, UserError, evaluate, predict, train
from dpfp_ray.results.paired import accuracy_interval
from dpfp_ray.results.predict import evaluate_answers, wilson

RNG = np.random.default_rng(3)
TRUTH = RNG.integers(0, 3, 200)
ANSWERS = np.where(RNG.random(200) < 0.7, TRUTH, RNG.integers(0, 3, 200))
NAMES = ("no", "maybe", "yes")


def test_the_interval_is_that_of_comparisons() -> None:
    right = np.array([[1.0] * 41 + [0.0] * 9])
    assert wilson(41, 50) == pytest.approx(accuracy_interval(right, 0.05))


def test_scores_by_class_are_scikit_learns() -> None:
    found = evaluate_answers(ANSWERS, TRUTH, NAMES)
    precision, recall, f1, rows = precision_recall_fscore_support(TRUTH, ANSWERS)
    assert [score.precision for score in found.classes] == pytest.approx(precision.tolist())
    assert [score.recall for score in found.classes] == pytest.approx(recall.tolist())
    assert [score.f1 for score in found.classes] == pytest.approx(f1.tolist())
    assert [score.rows for score in found.classes] == rows.tolist()
    assert found.f1 == pytest.approx(f1_score(TRUTH, ANSWERS, average="macro"))


def test_the_confusion_matrix_is_scikit_learns() -> None:
    found = evaluate_answers(ANSWERS, TRUTH, NAMES)
    assert np.array_equal(found.confusion, confusion_matrix(TRUTH, ANSWERS))


@pytest.mark.slow
def test_the_interval_of_f1_holds_it_as_often_as_it_says() -> None:
    """Two classes, 20% wrong answers: the true F1 is a number, and 95% of intervals hold it."""
    flip, share = 0.2, 0.4
    hits, false = share * (1 - flip), (1 - share) * flip
    true_f1 = 2 * hits / (2 * hits + false + share * flip)
    held = 0
    for _ in range(400):
        truth = (RNG.random(150) < share).astype(int)
        answers = np.where(RNG.random(150) < flip, 1 - truth, truth)
        low, high = evaluate_answers(answers, truth, ("no", "yes")).f1_interval or (0, 0)
        held += low <= true_f1 <= high
    assert 0.91 <= held / 400 <= 0.99


def test_a_class_without_rows_has_no_recall() -> None:
    found = evaluate_answers([0, 0], [0, 0], ("no", "yes"))
    assert found.classes[1].recall is None
    assert "—" in str(found)


@pytest.mark.slow
def test_a_frame_is_predicted_and_evaluated(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {"review": ["good film", "bad film"] * 20, "stars": ["yes", "no"] * 20}
    )
    plan = Plan(method="non_private", scope="head", epochs=1)
    named = {"text": "review", "label": "stars"}
    run = train(plan, data=frame, dev=frame, **named, reporter="silent", threads=1)
    answers = list(predict(run, data=frame[["review"]], text="review"))
    assert [answer.texts[0] for answer in answers] == list(frame["review"])
    scores = evaluate(run, data=frame, text="review", label="stars")
    assert scores.rows == 40
    with pytest.raises(UserError, match="no labels to evaluate by; name their column"):
        evaluate(run, data=frame[["review"]], text="review")
