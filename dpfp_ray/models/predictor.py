"""A trained model with all that it needs to answer: its tokenizer, class names, and row length.

Answers are those of training's own evaluation: texts truncated to the same `max_length`, the same
precision, rows bounded where the head was made for bounded rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpfp_ray.data import Split, Table
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.data.pair_tokens import tokenise_sides
from dpfp_ray.data.tokens import tokenise_once
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.system.errors import UserError

ROWS = 256  # in memory at once
Text = str | tuple[str, str]  # a text, or a pair of them


@dataclass(frozen=True)
class Prediction:
    """One row's answer: the likeliest class, its probability, and those of all classes."""

    label: str
    score: float
    probabilities: dict[str, float]


class Predictor:
    """`predict(texts)` for people, `probabilities(texts)` for arithmetic.

    `build` gives the classifier; it is called when the first row comes, so that a run that nobody
    asks anything of costs no encoder.
    """

    def __init__(
        self,
        build: Callable[[], Classifier],
        tokenizer: Any,
        labels: Sequence[str],
        *,
        max_length: int,
        precision: str = "fp32",
    ) -> None:
        self._build = build
        self.tokenizer = tokenizer
        self.labels = tuple(labels)
        self.max_length, self.precision = max_length, precision

    @cached_property
    def classifier(self) -> Classifier:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return self._build().to(device).eval()

    def predict(self, texts: str | Sequence[Text]) -> list[Prediction]:
        """One answer for each text (or pair of texts), in order.

        >>> model.predict(["a warm film", "a dull one"])[0].label  # doctest: +SKIP
        'positive'
        """
        return [self.answer(row) for row in self.probabilities(texts)]

    def answer(self, probabilities: NDArray[np.float64]) -> Prediction:
        best = int(probabilities.argmax())
        shares = dict(zip(self.labels, map(float, probabilities), strict=True))
        return Prediction(self.labels[best], float(probabilities[best]), shares)

    @torch.inference_mode()
    def probabilities(self, texts: str | Sequence[Text]) -> NDArray[np.float64]:
        """Of every class for every row: shape (rows, classes)."""
        split = rows_of([texts] if isinstance(texts, str) else texts)
        model = self.classifier
        if model.representation != "pair":
            table: Table = tokenise_once(split, self.tokenizer, self.max_length)
        elif split.pairs is not None:
            table = tokenise_sides(split, self.tokenizer, self.max_length, keep=False)
        else:
            raise UserError("this model was trained on pairs of texts; give two texts a row")
        device = next(model.parameters()).device
        found = np.empty((len(table), len(self.labels)))
        for part in split_rows(table.lengths, ROWS, PART_COST[device.type]):
            batch = {name: tensor.to(device) for name, tensor in table.collate(part).items()}
            with torch.autocast(device.type, torch.bfloat16, self.precision == "bf16"):
                h = model.represent(batch)
            found[part] = model.classify(h.float()).double().softmax(1).cpu().numpy()
        return found


def rows_of(texts: Sequence[Text]) -> Split:
    """Texts or pairs as the rows of a table, without labels."""
    paired = {not isinstance(text, str) for text in texts}
    if len(paired) > 1:
        raise UserError("some rows are one text and others are pairs; give all of them alike")
    pairs = [(text, "") if isinstance(text, str) else (text[0], text[1]) for text in texts]
    for number, row in enumerate(pairs):
        for text in row:
            if not isinstance(text, str):
                raise UserError(f"row {number} is {text!r:.60}; give text")
    seconds = [second for _, second in pairs] if True in paired else None
    return Split([first for first, _ in pairs], seconds, np.zeros(len(pairs), np.int64))
