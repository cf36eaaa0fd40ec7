"""How right a model's answers are: accuracy, F1, scores by class and the confusion matrix.

Intervals are Wilson's, at 95%, over rows. F1 = 2q / (1 + q) rises with q = TP / (TP + FP + FN),
which is a share of rows, so the ends of q's interval are those of F1's (Flores et al. 2022).
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest

from dpfp_ray.training.metrics import measure

CONFIDENCE = 0.95
Interval = tuple[float, float]


@dataclass(frozen=True)
class ClassScore:
    """One class against all others. None where no row decides it."""

    label: str
    rows: int
    recall: float | None
    recall_interval: Interval | None
    precision: float | None
    precision_interval: Interval | None
    f1: float | None
    f1_interval: Interval | None


@dataclass(frozen=True)
class Evaluation:
    """`confusion[i][j]` rows of class i got the answer j. `f1` is of the second class with two
    classes (as GLUE scores QQP), else the mean over classes, of which no interval is known."""

    rows: int
    accuracy: float
    accuracy_interval: Interval
    f1: float
    f1_interval: Interval | None
    classes: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...]
    confidence: float = CONFIDENCE

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def wilson(right: int, rows: int) -> Interval | None:
    """The interval of a share; None of no rows."""
    if not rows:
        return None
    found = binomtest(right, rows).proportion_ci(CONFIDENCE, "wilson")
    return float(found.low), float(found.high)


def evaluate_answers(predicted: ArrayLike, labels: ArrayLike, names: Sequence[str]) -> Evaluation:
    """Of class numbers and the right ones; at least one row."""
    answers, truth = np.asarray(predicted, np.int64), np.asarray(labels, np.int64)
    table: NDArray[np.int64] = np.zeros((len(names), len(names)), np.int64)
    np.add.at(table, (truth, answers), 1)
    with warnings.catch_warnings():  # scikit-learn's, where all rows are of one class
        warnings.simplefilter("ignore")
        scores = measure(answers, truth, classes=len(names))
    classes = tuple(_class_score(table, i, name) for i, name in enumerate(names))
    accuracy = wilson(int(np.trace(table)), len(truth))
    assert accuracy is not None
    return Evaluation(
        rows=len(truth),
        accuracy=scores.accuracy,
        accuracy_interval=accuracy,
        f1=scores.f1,
        f1_interval=classes[1].f1_interval if len(names) == 2 else None,
        classes=classes,
        confusion=tuple(tuple(int(count) for count in row) for row in table),
    )


def _class_score(table: NDArray[np.int64], i: int, name: str) -> ClassScore:
    hits, rows, answers = int(table[i, i]), int(table[i].sum()), int(table[:, i].sum())
    either = rows + answers - hits
    jaccard = wilson(hits, either)
    return ClassScore(
        label=name,
        rows=rows,
        recall=hits / rows if rows else None,
        recall_interval=wilson(hits, rows),
        precision=hits / answers if answers else None,
        precision_interval=wilson(hits, answers),
        f1=2 * hits / (rows + answers) if either else None,
        f1_interval=None if jaccard is None else (_f1(jaccard[0]), _f1(jaccard[1])),
    )


def _f1(jaccard: float) -> float:
    return 2 * jaccard / (1 + jaccard)


def evaluation_text(found: Evaluation) -> str:
    """For people: the scores, one line for each class, and the confusion matrix."""
    names = [score.label for score in found.classes]
    kind = f"F1 of {names[1]}" if len(names) == 2 else "mean F1"
    lines = [
        f"{found.rows:,} rows; intervals at {100 * found.confidence:g}% (Wilson, over rows)",
        f"accuracy  {_shown(found.accuracy, found.accuracy_interval)}",
        f"{kind}  {_shown(found.f1, found.f1_interval)}",
    ]
    wide = max(5, *(len(name) for name in names))
    lines.append(f"\n{'class':<{wide}}  {'rows':>7}  {'recall':<23}  precision")
    for score in found.classes:
        recall = _shown(score.recall, score.recall_interval)
        precision = _shown(score.precision, score.precision_interval)
        lines.append(f"{score.label:<{wide}}  {score.rows:>7,}  {recall:<23}  {precision}")
    columns = [max(7, len(name)) for name in names]
    heads = "  ".join(f"{name:>{size}}" for name, size in zip(names, columns, strict=True))
    lines.append(f"\nrows: the right class; columns: the answer\n{'':<{wide}}  {heads}")
    for name, counts in zip(names, found.confusion, strict=True):
        cells = "  ".join(f"{c:>{size},}" for c, size in zip(counts, columns, strict=True))
        lines.append(f"{name:<{wide}}  {cells}")
    return "\n".join(lines)


def _shown(value: float | None, interval: Interval | None) -> str:
    if value is None:
        return "—"
    ends = "" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]"
    return f"{value:.4f}{ends}"
