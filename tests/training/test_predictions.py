import json

import numpy as np
import pytest

from dpfp_ray.system.errors import UserError
from dpfp_ray.training.predictions import (
    DevPredictions,
    fingerprint_rows,
    majority_class,
    pack,
    stack,
    unpack,
)


@pytest.mark.parametrize("classes", [1, 2, 3, 4, 5, 77, 256, 257])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 872])
def test_unpacking_gives_back_what_was_packed(classes: int, rows: int) -> None:
    indices = np.random.default_rng(classes).integers(classes, size=rows)

    assert unpack(pack(indices, classes), rows, classes).tolist() == indices.tolist()


def test_packing_equals_writing_the_bits_one_by_one() -> None:
    import base64

    indices = [2, 0, 1, 2, 2, 1]
    digits = "".join(f"{index:02b}" for index in indices).ljust(16, "0")
    by_hand = base64.b64encode(int(digits, 2).to_bytes(2, "big")).decode()

    assert pack(indices, classes=3) == by_hand


def test_two_classes_take_a_bit_a_row() -> None:
    assert len(pack(np.zeros(872, dtype=int), classes=2)) == 148  # 109 bytes in base64


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
        (["a", "b"], [0, 1]),
        (["b", "a"], [0, 1]),
        (["a", "b"], [1, 0]),
        ([("a", "b")], [0]),
        ([("ab", "")], [0]),
        (["ab"], [0]),
    ]

    assert len({fingerprint_rows(texts, labels) for texts, labels in rows}) == len(rows)


def test_a_fingerprint_is_the_same_on_every_machine() -> None:
    assert fingerprint_rows(["good", ("é", "x")], [1, 0]) == "a189761e2ca984c3"


def predictions(answers: list[int], fingerprint: str = "f") -> DevPredictions:
    return DevPredictions.of(answers, [0, 1, 1], classes=2, fingerprint=fingerprint)


def test_predictions_survive_a_record() -> None:
    kept = DevPredictions(**json.loads(json.dumps(predictions([1, 0, 1]).as_json())))

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


def test_of_equally_frequent_classes_the_first_is_the_majority() -> None:
    assert majority_class([2, 1, 2, 1]) == 1
