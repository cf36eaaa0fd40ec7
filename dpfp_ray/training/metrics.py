"""What accuracy hides: scores by class, agreement beyond chance, calibration, constant answers.

Formulas are scikit-learn's. Private training fails on small classes first, hence recall by class.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, recall_score

from dpfp_ray.training.predictions import majority_class, one_class_runs

CALIBRATION_BINS = 15


@dataclass(frozen=True)
class Metrics:
    """Scores of one model on the dev rows.

    `f1` is of class 1 with two classes (as GLUE scores QQP), else the mean over classes. `recall`
    has None for a class without dev rows. `calibration_error` needs probabilities, else it is None.
    """

    accuracy: float
    f1: float
    matthews: float
    recall: tuple[float | None, ...]
    one_class: bool
    majority_accuracy: float
    calibration_error: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    predicted: ArrayLike, labels: ArrayLike, *, classes: int, probabilities: ArrayLike | None = None
) -> Metrics:
    """All metrics of one model; `probabilities` are (rows, classes)."""
    answers, truth = np.asarray(predicted), np.asarray(labels)
    every = list(range(classes))
    recall = recall_score(truth, answers, labels=every, average=None, zero_division=np.nan)
    average = {"average": "binary"} if classes == 2 else {"average": "macro", "labels": every}
    return Metrics(
        accuracy=float(accuracy_score(truth, answers)),
        f1=float(f1_score(truth, answers, zero_division=0.0, **average)),
        matthews=float(matthews_corrcoef(truth, answers)),
        recall=tuple(None if np.isnan(value) else float(value) for value in recall),
        one_class=one_class_runs(answers[None]) == 1,
        majority_accuracy=float((truth == majority_class(truth)).mean()),
        calibration_error=(
            None if probabilities is None else calibration_error(probabilities, truth)
        ),
    )


def calibration_error(
    probabilities: ArrayLike, labels: ArrayLike, bins: int = CALIBRATION_BINS
) -> float:
    """Expected calibration error: |share right − mean confidence| in each bin, weighted by rows.

    Confidence is the probability of the class answered; bins have equal widths from 0 to 1.
    """
    shares, truth = np.asarray(probabilities, dtype=float), np.asarray(labels)
    # Sums of float32 probabilities may end a hair above 1, which scikit-learn refuses.
    confidence = np.clip(shares.max(axis=1), 0.0, 1.0)
    right = shares.argmax(axis=1) == truth
    true, stated = calibration_curve(right, confidence, n_bins=bins, pos_label=True)
    # The same edges and sides as calibration_curve, whose empty bins are left out.
    members = np.searchsorted(np.linspace(0.0, 1.0, bins + 1)[1:-1], confidence)
    counts = np.bincount(members, minlength=bins)
    return float(np.abs(true - stated) @ counts[counts > 0] / len(truth))
