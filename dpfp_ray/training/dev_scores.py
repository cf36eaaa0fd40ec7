"""Which epoch's scores a run quotes, and the answers that its record keeps beside them.

One rule for every row of a table. "last": the epoch whose weights are saved, when a private run's
budget is spent. "best": the best on dev, for those who ask for it; being picked by its dev score it
flatters, and a reader must be told.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from numpy.typing import ArrayLike

from dpfp_ray.training.predictions import DevPredictions, unpack

Select = Literal["last", "best"]
RULES: dict[Select, str] = {"last": "last epoch", "best": "best epoch on dev"}
ANSWERS = "predicted"  # an epoch's packed answers; moved out of the history into `predictions`

Epoch = Mapping[str, Any]  # an entry of the history


def quote(history: Sequence[Epoch], select: Select = "last") -> dict[str, Any]:
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


def saved_epoch(record: Mapping[str, Any]) -> Epoch:
    """The epoch whose weights a run has saved; records say so where it is not the last."""
    history: Sequence[Epoch] = record["history"]
    return best_epoch(history) if record.get("select") == "best" else history[-1]


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
    epochs = {entry["epoch"]: entry for entry in (history[-1], best_epoch(history))}
    kept = []
    for number, entry in epochs.items():
        packed = {name: scores.get(ANSWERS) for name, scores in entry["dev"].items()}
        if all(name in fingerprints and answers for name, answers in packed.items()):
            kept.append(
                {
                    "epoch": number,
                    "dev": {
                        name: DevPredictions.of(
                            unpack(answers, len(labels[name]), classes),  # type: ignore[arg-type]
                            labels[name],
                            classes=classes,
                            fingerprint=fingerprints[name],
                        ).as_json()
                        for name, answers in packed.items()
                    },
                }
            )
    return kept


def without_answers(history: Sequence[Epoch]) -> list[dict[str, Any]]:
    """The history as a record shows it."""
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
