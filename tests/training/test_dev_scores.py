"""Scores on dev, and the answers that a record keeps."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from dpfp_ray.data import Split
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.dev_scores import (
    DevPredictions,
    calibration_error,
    fingerprint_rows,
    measure,
    pack,
    stack,
    unpack,
)


def test_scores_of_two_classes_follow_from_the_four_counts() -> None:
    labels = [1] * 6 + [0] * 4
    predicted = [1, 1, 1, 1, 0, 0, 0, 0, 0, 1]
    right_1, wrong_1, missed_1, right_0 = 4, 1, 2, 3

    scores = measure(predicted, labels, classes=2)

    assert scores["accuracy"] == pytest.approx(0.7)
    assert scores["f1"] == pytest.approx(2 * right_1 / (2 * right_1 + wrong_1 + missed_1))
    assert scores["matthews"] == pytest.approx(
        (right_1 * right_0 - wrong_1 * missed_1) / np.sqrt(5 * 6 * 4 * 5)
    )
    assert scores["recall"] == pytest.approx((3 / 4, 4 / 6))
    assert scores["majority_accuracy"] == pytest.approx(0.6)


def test_f1_of_more_classes_is_the_mean_over_classes() -> None:
    scores = measure([0, 0, 1, 1], [0, 0, 1, 2], classes=3)

    assert scores["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_a_class_without_rows_has_no_recall() -> None:
    assert measure([0, 1], [0, 0], classes=3)["recall"] == [0.5, None, None]


def test_a_model_that_answers_one_class_is_detected() -> None:
    scores = measure([1, 1, 1, 1], [0, 1, 1, 1], classes=2)

    assert (scores["one_class"], scores["matthews"]) == (True, 0.0)
    assert not measure([1, 1, 1, 0], [0, 1, 1, 1], classes=2)["one_class"]


@pytest.mark.parametrize("classes", [2, 3])
def test_calibration_error_equals_its_slow_twin(classes: int) -> None:
    rng = np.random.default_rng(classes)
    probabilities = rng.dirichlet(np.ones(classes), size=500)
    labels = rng.integers(classes, size=500)
    total = 0.0
    for low in range(10):
        bin_rows = [
            row for row in range(500) if low / 10 < probabilities[row].max() <= (low + 1) / 10
        ]
        if bin_rows:
            right = np.mean([probabilities[row].argmax() == labels[row] for row in bin_rows])
            total += len(bin_rows) * abs(right - np.mean(probabilities[bin_rows].max(axis=1)))

    assert calibration_error(probabilities, labels, bins=10) == pytest.approx(total / 500)


@pytest.mark.filterwarnings("error")
def test_rows_of_one_class_have_a_matthews_of_zero_and_no_warning() -> None:
    assert measure([1, 1, 1], [1, 1, 1], classes=2)["matthews"] == 0.0
    assert measure([0, 1, 1], [1, 1, 1], classes=2)["matthews"] == 0.0


@pytest.mark.parametrize("classes", [1, 2, 3, 4, 5, 77, 256, 257])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 872])
def test_unpacking_gives_back_what_was_packed(classes: int, rows: int) -> None:
    indices = np.random.default_rng(classes).integers(classes, size=rows)

    assert unpack(pack(indices, classes), rows, classes).tolist() == indices.tolist()


def test_an_index_outside_the_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        pack([0, 2], classes=2)


@pytest.mark.parametrize(
    ("packed", "rows", "classes"),
    [("not base64!", 8, 2), ("aA==", 9, 2), ("/w==", 4, 3), ("aA==", -1, 2), ("aA==", 10**12, 2)],
)
def test_broken_text_is_an_error_of_one_line(packed: str, rows: int, classes: int) -> None:
    with pytest.raises(UserError, match="run it again"):
        unpack(packed, rows, classes)


def test_a_fingerprint_depends_on_texts_labels_order_and_where_fields_end() -> None:
    rows = [
        (["a", "b"], None, [0, 1]),
        (["b", "a"], None, [0, 1]),
        (["a", "b"], None, [1, 0]),
        (["a"], ["b"], [0]),
        (["ab"], [""], [0]),
        (["ab"], None, [0]),
    ]

    assert len({fingerprint_rows(Split(*row)) for row in rows}) == len(rows)


def test_a_fingerprint_is_the_same_on_every_machine() -> None:
    assert fingerprint_rows(Split(["good", "é"], ["a", "x"], [1, 0])) == "f8af1471084d6925"


def predictions(answers: list[int], fingerprint: str = "f") -> DevPredictions:
    return DevPredictions.of(answers, [0, 1, 1], classes=2, fingerprint=fingerprint)


def test_predictions_survive_a_record() -> None:
    kept = DevPredictions(**json.loads(json.dumps(asdict(predictions([1, 0, 1])))))

    assert kept.answers().tolist() == [1, 0, 1]
    assert kept.truth().tolist() == [0, 1, 1]


def test_runs_on_the_same_rows_are_stacked() -> None:
    assert stack([predictions([0, 0, 1]), predictions([1, 1, 1])]).tolist() == [
        [0, 0, 1],
        [1, 1, 1],
    ]


def test_runs_on_different_rows_are_not() -> None:
    with pytest.raises(UserError, match="same dev rows"):
        stack([predictions([0, 0, 1]), predictions([0, 0, 1], "g")])
