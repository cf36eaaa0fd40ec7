"""Scores on dev: the metrics, the epoch that a run quotes, and the answers that its record keeps.

One rule for every row of a table: the last epoch, when a private run's budget is spent; or, for
those who ask for it, the best on dev, which flatters: a reader must be told.

Formulas are scikit-learn's. Private training fails on small classes first, hence recall by class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dpfp_ray.training.predictions import DevPredictions, majority_class, one_class_runs, unpack
from dpfp_ray.training.record import Record, Select

RULES: dict[Select, str] = {"last": "last epoch", "best": "best epoch on dev"}
CALIBRATION_BINS = 15
ANSWERS = "predicted"  # an epoch's packed answers; moved out of the history into `predictions`

Epoch = Mapping[str, Any]  # an entry of the history


def quote(history: Sequence[Any], select: Select = "last") -> dict[str, Any]:
    """The scores to quote: those of the task's first dev set, and every dev set's accuracy."""
    if not history:
        return {}
    chosen = history[-1] if select == "last" else best_epoch(history)
    scores = next(iter(chosen["dev"].values()))
    return {
        "accuracy": scores["accuracy"],
        "accuracy_last": next(iter(history[-1]["dev"].values()))["accuracy"],
        "epoch": chosen["epoch"],
        "rule": RULES[select],
        **{f"accuracy_{name}": dev["accuracy"] for name, dev in chosen["dev"].items()},
        **{name: scores[name] for name in scores if name not in ("accuracy", "loss", ANSWERS)},
    }


def best_epoch(history: Sequence[Epoch]) -> Epoch:
    """The first of those with the best accuracy on the first dev set."""
    return max(history, key=lambda entry: float(next(iter(entry["dev"].values()))["accuracy"]))


def saved_epoch(record: Record) -> Epoch:
    """The epoch whose weights a run has saved."""
    history: Sequence[Any] = record["history"]
    return best_epoch(history) if record["select"] == "best" else history[-1]


def kept_predictions(
    history: Sequence[Epoch],
    labels: Mapping[str, ArrayLike],
    fingerprints: Mapping[str, str],
    classes: int,
) -> list[dict[str, Any]]:
    """Answers on every dev set of the last epoch, and of the best one if that is another.

    Epochs that an older version has trained have none, and dev rows without a fingerprint could
    not be told from others: nothing is kept then.
    """
    if not history:
        return []

    def predictions(name: str, packed: str) -> dict[str, Any]:
        truth, fingerprint = np.asarray(labels[name]), fingerprints[name]
        answers = unpack(packed, len(truth), classes)
        made = DevPredictions.of(answers, truth, classes=classes, fingerprint=fingerprint)
        return made.as_json()

    epochs = {entry["epoch"]: entry for entry in (history[-1], best_epoch(history))}
    kept = []
    for number, entry in epochs.items():
        packed = {name: scores.get(ANSWERS) for name, scores in entry["dev"].items()}
        if all(name in fingerprints and answers for name, answers in packed.items()):
            dev = {name: predictions(name, answers) for name, answers in packed.items()}
            kept.append({"epoch": number, "dev": dev})
    return kept


def without_answers(history: Sequence[Epoch]) -> list[dict[str, Any]]:
    """The history as a record shows it."""

    def shown(scores: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in scores.items() if key != ANSWERS}

    return [
        {**entry, "dev": {name: shown(scores) for name, scores in entry["dev"].items()}}
        for entry in history
    ]


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
    # Imported here: scikit-learn takes a second.
    from sklearn.metrics import matthews_corrcoef, precision_recall_fscore_support

    answers, truth = np.asarray(predicted), np.asarray(labels)
    # Once for all that it tells: most of its time goes into checks of what it is given.
    _, recall, f1, _ = precision_recall_fscore_support(
        truth, answers, labels=list(range(classes)), zero_division=np.nan
    )
    f1 = np.nan_to_num(f1)  # of a class that is neither there nor answered
    return Metrics(
        accuracy=float((truth == answers).mean()),
        f1=float(f1[1] if classes == 2 else f1.mean()),
        # 0 where all rows are of one class: there is nothing to tell apart.
        matthews=float(matthews_corrcoef(truth, answers)) if np.ptp(truth) else 0.0,
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
    from sklearn.calibration import calibration_curve

    shares, truth = np.asarray(probabilities, dtype=float), np.asarray(labels)
    # Sums of float32 probabilities may end slightly above 1, which scikit-learn refuses.
    confidence = np.clip(shares.max(axis=1), 0.0, 1.0)
    right = shares.argmax(axis=1) == truth
    true, stated = calibration_curve(right, confidence, n_bins=bins, pos_label=True)
    # The same edges and sides as calibration_curve, whose empty bins are left out.
    members = np.searchsorted(np.linspace(0.0, 1.0, bins + 1)[1:-1], confidence)
    counts = np.bincount(members, minlength=bins)
    return float(np.abs(true - stated) @ counts[counts > 0] / len(truth))
