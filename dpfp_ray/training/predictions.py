"""What a model answered on the dev rows, small enough to keep in its record.

A class index takes as many bits as the number of classes needs: SST-2's 872 dev rows are 109 bytes.
With the right labels and a fingerprint of the rows beside the answers, two records can be compared
without the data. Dev rows are public (docs/privacy.md): nothing here is about a training record.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpfp_ray.system.errors import UserError

Classes = NDArray[np.int64]

MAX_ROWS = 10_000_000  # a record that claims more is broken, and would fill the memory


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
    if not 0 <= rows <= MAX_ROWS or classes < 1:
        raise UserError(f"packed predictions of {rows} rows and {classes} classes; run it again")
    width = _bits(classes)
    try:
        octets = np.frombuffer(base64.b64decode(packed, validate=True), dtype=np.uint8)
    except (binascii.Error, ValueError):
        raise UserError("packed predictions are not base64 text; run it again") from None
    if len(octets) != -(-rows * width // 8):
        raise UserError(
            f"packed predictions have {len(octets)} bytes, not those of {rows} rows; run it again"
        )
    bits = np.unpackbits(octets, count=rows * width).reshape(rows, width).astype(np.int64)
    indices: Classes = bits @ (1 << np.arange(width)[::-1])
    if rows and indices.max() >= classes:
        raise UserError(f"packed predictions name class {indices.max()} of {classes}; run it again")
    return indices


def fingerprint_rows(texts: Iterable[str | Sequence[str]], labels: Iterable[int]) -> str:
    """64 bits that tell dev sets apart: every text (or pair of texts) and label, in order."""
    digest = hashlib.sha256()
    for text, label in zip(texts, labels, strict=True):
        parts = (text,) if isinstance(text, str) else tuple(text)
        # Lengths first: ("ab", "c") and ("a", "bc") are different rows.
        for field in (str(len(parts)), *parts, str(int(label))):
            encoded = field.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class DevPredictions:
    """One model's answers on the dev rows, with the right ones; `as_json` is for the record."""

    rows: int
    classes: int
    fingerprint: str
    predicted: str
    labels: str

    @classmethod
    def of(
        cls, predicted: ArrayLike, labels: ArrayLike, *, classes: int, fingerprint: str
    ) -> "DevPredictions":
        answers, truth = np.asarray(predicted), np.asarray(labels)
        if answers.shape != truth.shape:
            raise ValueError(f"{len(answers)} predictions for {len(truth)} labels")
        return cls(len(truth), classes, fingerprint, pack(answers, classes), pack(truth, classes))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

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
    """Bits that hold the indices of so many classes; one class still takes a bit."""
    return max(1, (classes - 1).bit_length())
