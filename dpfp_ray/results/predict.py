"""Ask a finished run: `predict("runs/one", ["a warm film"])`, `evaluate("runs/one", dev=True)`; and
how right its answers are: accuracy, F1, scores by class and the confusion matrix.

Intervals are Wilson's, at 95%, over rows. F1 = 2q / (1 + q) rises with q = TP / (TP + FP + FN),
which is a share of rows, so the ends of q's interval are those of F1's (Flores et al. 2022).
"""

import dataclasses
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest

from dpfp_ray.data.columns import GLUE, open_split, read_asked
from dpfp_ray.data.readers import CSV, TSV
from dpfp_ray.data.tasks import load_task, rows_in_memory
from dpfp_ray.data.texts import pack
from dpfp_ray.models.export import Predictor, Text
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.ledger import Ledger, open_ledger
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import counted
from dpfp_ray.training.dev_scores import measure
from dpfp_ray.training.load_model import load_model, record_of
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.record import plan_of

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

    def __str__(self) -> str:
        """For people: the scores, one line for each class, and the confusion matrix."""
        names = [score.label for score in self.classes]
        kind = f"F1 of {names[1]}" if len(names) == 2 else "mean F1"
        lines = [
            f"{self.rows:,} rows; intervals at {100 * self.confidence:g}% (Wilson, over rows)",
            f"accuracy  {_shown(self.accuracy, self.accuracy_interval)}",
            f"{kind}  {_shown(self.f1, self.f1_interval)}",
        ]
        wide = max(5, *(len(name) for name in names))
        lines.append(f"\n{'class':<{wide}}  {'rows':>7}  {'recall':<23}  precision")
        for score in self.classes:
            recall = _shown(score.recall, score.recall_interval)
            precision = _shown(score.precision, score.precision_interval)
            lines.append(f"{score.label:<{wide}}  {score.rows:>7,}  {recall:<23}  {precision}")
        columns = [max(7, len(name)) for name in names]
        heads = "  ".join(f"{name:>{size}}" for name, size in zip(names, columns, strict=True))
        lines.append(f"\nrows: the right class; columns: the answer\n{'':<{wide}}  {heads}")
        for name, counts in zip(names, self.confusion, strict=True):
            cells = "  ".join(f"{c:>{size},}" for c, size in zip(counts, columns, strict=True))
            lines.append(f"{name:<{wide}}  {cells}")
        return "\n".join(lines)


def wilson(right: int, rows: int) -> Interval | None:
    """The interval of a share; None of no rows."""
    if not rows:
        return None
    interval = binomtest(right, rows).proportion_ci(CONFIDENCE, "wilson")
    return float(interval.low), float(interval.high)


def evaluate_answers(predicted: ArrayLike, labels: ArrayLike, names: Sequence[str]) -> Evaluation:
    """Scores of answers against the right ones, both as class numbers; at least one row."""
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
        accuracy=scores["accuracy"],
        accuracy_interval=accuracy,
        f1=scores["f1"],
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


def _shown(value: float | None, interval: Interval | None) -> str:
    if value is None:
        return "—"
    ends = "" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]"
    return f"{value:.4f}{ends}"


Row = tuple[tuple[str, ...], int | None]  # one text or two, and the class if it is known


@dataclass(frozen=True)
class Answer:
    """One row's texts, the likeliest class, its probability and those of all classes."""

    texts: tuple[str, ...]
    label: str
    score: float
    probabilities: dict[str, float]
    right_label: str | None = None

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = dict(zip(("text", "pair"), self.texts, strict=False))
        fields |= {"label": self.label, "score": self.score, "probabilities": self.probabilities}
        return fields if self.right_label is None else fields | {"right_label": self.right_label}


class Answers:
    """Answers in the order of the rows, made as they are read, so once.

    `labelled` says whether the rows have labels; `evaluation()` then scores what was read so far.
    """

    def __init__(self, model: Predictor, rows: Iterator[Row], labelled: bool, batch: int) -> None:
        self.model, self.labelled = model, labelled
        self._rows, self._batch = rows, batch
        self._found: list[int] = []
        self._right: list[int] = []

    def __iter__(self) -> Iterator[Answer]:
        return chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Answer]]:
        # No bar where answers scroll by on the same screen.
        for part in counted(self._parts(), len, "predicting", bar=not sys.stdout.isatty()):
            texts: list[Text] = [t[0] if len(t) == 1 else (t[0], t[1]) for t, _ in part]
            shares = self.model.probabilities(texts)
            self._found += shares.argmax(1).tolist()
            self._right += [label for _, label in part if label is not None]
            yield [
                self._answer(row, self.model.answer(found))
                for row, found in zip(part, shares, strict=True)
            ]
        if not self._found:
            raise UserError("there are no rows to predict; give a file with rows, or texts")

    def evaluation(self) -> Evaluation:
        if not self.labelled:
            raise UserError(
                "these rows have no labels to evaluate by; name their column (--label-column)"
            )
        return evaluate_answers(self._found, self._right, self.model.labels)

    def _parts(self) -> Iterator[list[Row]]:
        while part := list(islice(self._rows, self._batch)):
            yield part

    def _answer(self, row: Row, found: Any) -> Answer:
        texts, label = row
        right = None if label is None else self.model.labels[label]
        return Answer(texts, found.label, found.score, found.probabilities, right)


def predict(
    run: Any,
    texts: str | Iterable[Text] | None = None,
    *,
    data: Any = None,
    file: str | Path | None = None,
    dev: bool = False,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    header: str | None = None,
    bad_rows: str | None = None,
    batch: int = 256,
    threads: int | None = None,
    encoder: Any = None,
    tokenizer: Any = None,
    ledger: str | Path | Ledger | None = None,
) -> Answers:
    """Labels and probabilities from a finished run, of any method and scope.

    run      what `train` gave, or the folder that it wrote
    texts    texts, or pairs of them; any number, they are read as they are needed
    data     in place of texts: a DataFrame, a datasets.Dataset or a dict of columns; text, pair and
             label name its columns, as in `train`
    file     in place of texts: any file that training reads, with the columns that the run was
             trained with unless text_column, pair_column, label_column, header or bad_rows differ
    dev      in place of texts: the run's own dev rows
    batch    rows at a time
    encoder  the module that the run was given, with its tokenizer, if it was given one
    ledger   where private records are known by their texts. Rows of a file with labels are scored
             exactly: those that are private records are entered there as used without privacy,
             and refused under a total
    """
    if [texts is not None, data is not None, file is not None, dev].count(True) != 1:
        raise UserError("give one of: texts, data=, file=, dev=True")
    if batch < 1:
        raise UserError(f"--batch is {batch}; give 1 or more")
    model = load_model(run, encoder=encoder, tokenizer=tokenizer)
    use_threads(threads)
    labelled = False
    rows: Iterator[Row]
    if texts is not None:
        rows = (((t,) if isinstance(t, str) else tuple(t), None) for t in _each(texts))
    else:
        given: dict[str, Any] = {
            "text_column": text or text_column,
            "pair_column": pair or pair_column,
            "label_column": label or label_column,
            "header": header,
            "bad_rows": bad_rows,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        plan = dataclasses.replace(plan_of(record_of(run)), **asked)

        def read() -> tuple[bool, Iterator[Row]]:
            if data is not None:
                return rows_in_memory(data, plan, model.labels)
            return _file_rows(file, plan, model.labels)

        labelled, rows = (True, _dev_rows(plan)) if dev else read()
        if labelled and not dev:
            _enter_private_rows(open_ledger(ledger), rows, plan)
            labelled, rows = read()
    return Answers(model, rows, labelled, batch)


def evaluate(run: Any, **options: Any) -> Evaluation:
    """How right a run is on rows with labels: `data=`, `file=` or `dev=True`, else as `predict`."""
    answers = predict(run, **options)
    if not answers.labelled:
        answers.evaluation()  # refuses
    for _ in answers.batches():
        pass
    return answers.evaluation()


def _each(texts: str | Iterable[Text]) -> Iterable[Text]:
    return [texts] if isinstance(texts, str) else texts


def _file_rows(file: Any, plan: Plan, labels: tuple[str, ...]) -> tuple[bool, Iterator[Row]]:
    """Whether they have labels, and the rows, read as they are needed."""
    glue = GLUE.get(plan.task)
    path = Path(file).expanduser()
    own = path.suffix.lower() in (*TSV, *CSV)  # others name their columns, whatever training read
    table = open_split(path, glue, plan.header if own else "first_line")
    return read_asked(table, plan, glue, labels)


def _enter_private_rows(ledger: Ledger, rows: Iterator[Row], plan: Plan) -> None:
    """Warn of rows that are private records, and enter them; a total refuses them."""
    if not ledger.people.links():
        return
    with warnings.catch_warnings():  # about bad rows, said when the rows are read again
        warnings.simplefilter("ignore")
        texts = pack(text for row, _ in rows for text in row)
    private = ledger.show_without_privacy(texts, plan.spec.title, plan.hash)
    if private:
        warnings.warn(
            f"{private:,} of these {len(texts):,} texts are private records of the ledger "
            f"{ledger.files.name}; their exact scores have no privacy (ε = ∞), and the ledger "
            f"says so from now on",
            stacklevel=3,
        )


def _dev_rows(plan: Plan) -> Iterator[Row]:
    split = next(iter(load_task(plan).dev.values()))  # the one that a run's score is quoted from
    for number, text in enumerate(split.texts):
        pair = () if split.pairs is None else (split.pairs[number],)
        yield (text, *pair), int(split.labels[number])
