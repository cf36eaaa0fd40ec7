"""Scores on dev: the metrics, the epoch that a run quotes, and the answers that its record keeps.

One rule for every row of a table: the last epoch, when a private run's budget is spent; or, for
those who ask for it, the best on dev, which flatters: a reader must be told. Formulas are
scikit-learn's. Private training fails on small classes first, hence recall by class.

With packed answers, the right labels and a fingerprint of the rows, two records can be compared
without the data. Dev rows are public (docs/privacy.md): nothing here is about a training record.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpfp_ray.data import Split
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.record import Record, Select

Classes = NDArray[np.int64]


def pack(indices: ArrayLike, classes: int) -> str:
    """Class indices as base64 text, most significant bit first.

    >>> pack([0, 1, 1, 0, 1], classes=2)
    'aA=='
    """
    values = np.asarray(indices, dtype=np.int64)
    if values.ndim != 1 or (len(values) and not 0 <= values.min() <= values.max() < classes):
        raise ValueError(f"class indices must be one row of numbers from 0 to {classes - 1}")
    shifts = np.arange(_bits(classes))[::-1]
    bits = (values[:, None] >> shifts) & 1
    return base64.b64encode(np.packbits(bits.astype(np.uint8).ravel()).tobytes()).decode()


def unpack(packed: str, rows: int, classes: int) -> Classes:
    """The class indices that `pack` was given.

    >>> unpack("aA==", rows=5, classes=2).tolist()
    [0, 1, 1, 0, 1]
    """
    width = _bits(classes)
    try:
        octets = np.frombuffer(base64.b64decode(packed, validate=True), dtype=np.uint8)
        if len(octets) != -(-rows * width // 8):
            raise ValueError(f"{len(octets)} bytes")
        bits = np.unpackbits(octets, count=rows * width).reshape(rows, width).astype(np.int64)
        indices: Classes = bits @ (1 << np.arange(width)[::-1])
        if rows and indices.max() >= classes:
            raise ValueError(f"class {indices.max()}")
    except ValueError as error:
        raise UserError(
            f"packed predictions are not those of {rows} rows and {classes} classes ({error}); "
            f"run it again"
        ) from None
    return indices


def fingerprint_rows(split: Split) -> str:
    """64 bits that tell dev sets apart: every text (or pair of texts) and label, in order."""
    digest = hashlib.sha256()
    texts = [split.texts] if split.pairs is None else [split.texts, split.pairs]
    for *parts, label in zip(*texts, split.labels, strict=True):
        # Lengths first: ("ab", "c") and ("a", "bc") are different rows.
        for field in (str(len(parts)), *parts, str(int(label))):
            encoded = field.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class DevPredictions:
    """One model's answers on the dev rows, with the right ones, as the record keeps them."""

    rows: int
    classes: int
    fingerprint: str
    predicted: str
    labels: str

    @classmethod
    def of(
        cls, predicted: ArrayLike, labels: ArrayLike, *, classes: int, fingerprint: str
    ) -> "DevPredictions":
        rows = len(np.asarray(labels))
        return cls(rows, classes, fingerprint, pack(predicted, classes), pack(labels, classes))

    def answers(self) -> Classes:
        return unpack(self.predicted, self.rows, self.classes)

    def truth(self) -> Classes:
        return unpack(self.labels, self.rows, self.classes)


def stack(runs: Sequence[DevPredictions]) -> Classes:
    """Answers of several runs, one row of the array a run; only if their dev rows are equal."""
    if not runs:
        raise UserError("no run with dev predictions; run at least one")
    first = runs[0]
    for run in runs[1:]:
        if replace(run, predicted=first.predicted) != first:
            raise UserError(
                f"dev rows {run.fingerprint} and {first.fingerprint} differ; "
                "compare only runs with the same dev rows"
            )
    return np.stack([run.answers() for run in runs])


def majority_class(labels: ArrayLike) -> int:
    """The most frequent class of the dev rows; of several, the first."""
    return int(np.bincount(np.asarray(labels)).argmax())


def one_class_runs(answers: ArrayLike) -> int:
    """How many runs, of (runs, rows), answer one class whatever the row."""
    runs = np.asarray(answers)
    return int((runs == runs[:, :1]).all(axis=1).sum())


def _bits(classes: int) -> int:
    return max(1, (classes - 1).bit_length())


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
    return max(history, key=lambda entry: float(next(iter(entry["dev"].values()))["accuracy"]))


def saved_epoch(record: Record) -> Epoch:
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
        truth = np.asarray(labels[name])
        return asdict(
            DevPredictions(len(truth), classes, fingerprints[name], packed, pack(truth, classes))
        )

    epochs = {entry["epoch"]: entry for entry in (history[-1], best_epoch(history))}
    kept = []
    for number, entry in epochs.items():
        packed = {name: scores.get(ANSWERS) for name, scores in entry["dev"].items()}
        if all(name in fingerprints and answers for name, answers in packed.items()):
            dev = {name: predictions(name, answers) for name, answers in packed.items()}
            kept.append({"epoch": number, "dev": dev})
    return kept


def without_answers(history: Sequence[Epoch]) -> list[dict[str, Any]]:
    return [
        {
            **entry,
            "dev": {
                name: {key: value for key, value in scores.items() if key != ANSWERS}
                for name, scores in entry["dev"].items()
            },
        }
        for entry in history
    ]


def measure(
    predicted: ArrayLike, labels: ArrayLike, *, classes: int, probabilities: ArrayLike | None = None
) -> dict[str, Any]:
    """`record.Scores` of one model but the loss; `probabilities` are (rows, classes)."""
    # Imported here: scikit-learn takes a second.
    from sklearn.metrics import matthews_corrcoef, precision_recall_fscore_support

    answers, truth = np.asarray(predicted), np.asarray(labels)
    # Once for all that it tells: most of its time goes into checks of what it is given.
    _, recall, f1, _ = precision_recall_fscore_support(
        truth, answers, labels=list(range(classes)), zero_division=np.nan
    )
    f1 = np.nan_to_num(f1)  # of a class that is neither there nor answered
    return {
        "accuracy": float((truth == answers).mean()),
        "f1": float(f1[1] if classes == 2 else f1.mean()),
        # 0 where all rows are of one class: there is nothing to tell apart.
        "matthews": float(matthews_corrcoef(truth, answers)) if np.ptp(truth) else 0.0,
        "recall": [None if np.isnan(value) else float(value) for value in recall],
        "one_class": one_class_runs(answers[None]) == 1,
        "majority_accuracy": float((truth == majority_class(truth)).mean()),
        "calibration_error": (
            None if probabilities is None else calibration_error(probabilities, truth)
        ),
    }


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
