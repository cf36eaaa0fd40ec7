import numpy as np
import pytest

from dpfp_ray.training.dev_scores import calibration_error, measure


def test_scores_of_two_classes_follow_from_the_four_counts() -> None:
    labels = [1] * 6 + [0] * 4
    predicted = [1, 1, 1, 1, 0, 0, 0, 0, 0, 1]
    right_1, wrong_1, missed_1, right_0 = 4, 1, 2, 3

    scores = measure(predicted, labels, classes=2)

    assert scores.accuracy == pytest.approx(0.7)
    assert scores.f1 == pytest.approx(2 * right_1 / (2 * right_1 + wrong_1 + missed_1))
    assert scores.matthews == pytest.approx(
        (right_1 * right_0 - wrong_1 * missed_1) / np.sqrt(5 * 6 * 4 * 5)
    )
    assert scores.recall == pytest.approx((3 / 4, 4 / 6))
    assert scores.majority_accuracy == pytest.approx(0.6)


def test_f1_of_more_classes_is_the_mean_over_classes() -> None:
    scores = measure([0, 0, 1, 1], [0, 0, 1, 2], classes=3)

    assert scores.f1 == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_a_class_without_rows_has_no_recall() -> None:
    assert measure([0, 1], [0, 0], classes=3).recall == (0.5, None, None)


def test_a_model_that_answers_one_class_is_detected() -> None:
    scores = measure([1, 1, 1, 1], [0, 1, 1, 1], classes=2)

    assert (scores.one_class, scores.matthews) == (True, 0.0)
    assert not measure([1, 1, 1, 0], [0, 1, 1, 1], classes=2).one_class


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


def test_certainty_that_is_right_is_calibrated_and_certainty_that_is_wrong_is_not() -> None:
    certain = np.array([[0.0, 1.0], [0.0, 1.0000001]])

    assert calibration_error(certain, [1, 1]) == 0.0
    assert measure([1, 1], [0, 0], classes=2, probabilities=certain).calibration_error == 1.0


@pytest.mark.filterwarnings("error")
def test_rows_of_one_class_have_a_matthews_of_zero_and_no_warning() -> None:
    assert measure([1, 1, 1], [1, 1, 1], classes=2).matthews == 0.0
    assert measure([0, 1, 1], [1, 1, 1], classes=2).matthews == 0.0
