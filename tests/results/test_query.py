"""The query language: what it means, and that nothing outside it means anything."""

import math
import threading
from typing import Any

import pytest

from dpfp_ray.results import query
from dpfp_ray.system.errors import UserError

ROWS: list[dict[str, Any]] = [
    {"id": "a", "method": "dpfp", "task": "sst2", "epsilon": 3.0, "accuracy": 0.81, "error": None},
    {"id": "b", "method": "dpfp", "task": "demo", "epsilon": 8.0, "accuracy": 0.85, "error": None},
    {"id": "c", "method": "dpsgd", "task": "sst2", "epsilon": 3.0, "accuracy": 0.7, "error": None},
    {
        "id": "d",
        "method": "dpsgd",
        "task": "qnli",
        "epsilon": 1.0,
        "accuracy": None,
        "error": "OOM",
    },
    {
        "id": "e",
        "method": "non_private",
        "task": "demo",
        "epsilon": None,
        "accuracy": 0.9,
        "error": None,
        "batch_size": 32,
    },
]


def ids(where: str) -> str:
    return "".join(row["id"] for row in query.filter_rows(ROWS, where))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("method == 'dpfp' and epsilon <= 3", "a"),
        ('task in ["sst2", "demo"]', "abce"),
        ("task in ('sst2',)", "ac"),
        ("task not in ['sst2', 'demo']", "d"),
        ('not (accuracy > 0.8 or method == "dpsgd")', ""),
        ("accuracy >= 0.5 and error is None", "abce"),
        ("error is not None", "d"),
        ("error == None", "abce"),
        ("0.7 < accuracy <= 0.85", "ab"),
        ("epsilon > -1", "abcd"),
        ("epsilon in [1, 8]", "bd"),
        ("epsilon < 1e999", "abcd"),
        ("'st' in task", "ac"),
        ("'OO' in error", "d"),
        ("method != 'dpfp'", "cde"),
        ("epsilon == 3 or epsilon == 8 and task == 'demo'", "abc"),
        ("(method == 'dpfp'\n and task == 'demo')", "b"),
        ("  id == 'a'  ", "a"),
        ("B == 32", "e"),
        ("batch_size is None", "abcd"),
        ("True == True", "abcde"),
    ],
)
def test_a_condition_keeps_the_rows_for_which_it_holds(where: str, expected: str) -> None:
    assert ids(where) == expected


@pytest.mark.parametrize(
    "where",
    ["accuracy > 'x'", "'x' > accuracy", "task < 3", "error < 3", "None < 3", "error >= None"],
)
def test_an_order_that_makes_no_sense_matches_nothing(where: str) -> None:
    assert ids(where) == ""


def test_a_missing_value_is_in_no_order() -> None:
    assert "d" not in ids("accuracy > 0") + ids("accuracy <= 0")


def test_no_condition_keeps_all_rows() -> None:
    assert query.filter_rows(ROWS, None) == ROWS


HOSTILE = {
    "__import__('os').system('true')": "__import__('os').system('true')",
    "accuracy.__class__ == 1": "accuracy.__class__",
    "task[0] == 's'": "task[0]",
    "len(task) == 4": "len(task)",
    "(lambda: 1)() == 1": "(lambda: 1)()",
    "lambda: accuracy": "lambda: accuracy",
    "f'{task}' == 'x'": "f'{task}'",
    "(x := 3) == 3": "x := 3",
    "[t for t in task] == 1": "[t for t in task]",
    "accuracy in [t for t in task]": "[t for t in task]",
    "task in [method]": "method",
    "task in [[1]]": "[1]",
    "task in {'sst2'}": "{'sst2'}",
    "task in 'sst2'": "'sst2'",
    "task in ('sst2')": "'sst2'",
    "[1] == [1]": "[1]",
    "{} == {}": "{}",
    "9**9**9 > 1": "9**9**9",
    "accuracy + 1 > 1": "accuracy + 1",
    "'a' * 10**9 == task": "'a' * 10**9",
    "(method == 'dpfp') & (epsilon < 3)": "(method == 'dpfp') & (epsilon < 3)",
    "-accuracy < 0": "-accuracy",
    "- -1 < 0": "- -1",
    "-True < 0": "-True",
    "+1 < 2": "+1",
    "~1 < 2": "~1",
    "accuracy > 1j": "1j",
    "task == b'x'": "b'x'",
    "task == ...": "...",
    "error is 3": "3",
    "None is error": "error",
    "task if accuracy else task": "task if accuracy else task",
    "(task == 'a') == True": "task == 'a'",
    "*task == 1": "*task",
    "(yield) == 1": "yield",
    "accuracy": "accuracy",
    "True": "True",
    "not accuracy": "accuracy",
    "accuracy > 0.5 and 'x'": "x",
}


@pytest.mark.parametrize(("where", "piece"), HOSTILE.items(), ids=list(HOSTILE))
def test_all_else_is_refused_in_one_line_that_names_the_piece(where: str, piece: str) -> None:
    with pytest.raises(UserError) as error:
        query.filter_rows(ROWS, where)
    message = str(error.value)
    assert "\n" not in message
    assert piece in message


def test_an_unknown_column_gets_the_nearest_one() -> None:
    with pytest.raises(UserError, match="unknown column 'acuracy'; did you mean 'accuracy'"):
        query.filter_rows(ROWS, "acuracy > 1")


def test_text_without_quotes_gets_the_hint() -> None:
    with pytest.raises(UserError, match="'xyz'; text needs quotes"):
        query.filter_rows(ROWS, "method == xyz")


def test_columns_are_checked_even_without_rows() -> None:
    with pytest.raises(UserError, match="unknown column"):
        query.filter_rows([], "acuracy > 1", ["accuracy"])


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("method = 'dpfp'", "compare with =="),
        ("method == 'dpfp' && epsilon < 3", "and, or, not"),
        ("method ==", "cannot be read"),
        ("import os", "cannot be read"),
        ("x; y", "cannot be read"),
        ("task == 'a\x00b'", "where"),
        ("task == '\udc80'", "no text"),
        ("\x1b[2J", "where"),
    ],
)
def test_what_cannot_be_read_is_refused(where: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as error:
        query.filter_rows(ROWS, where)
    assert str(error.value).isprintable()


DEEP = {
    "parentheses": "(" * 100_000 + "id" + ")" * 100_000,
    "short parentheses": "(" * 900 + "id" + ")" * 900,
    "not": "not " * 490 + "id == 'a'",
    "minus": "-" * 1_990 + "1 == 1",
    "power": "9**" * 600 + "9 == 1",
    "lambda": "lambda:" * 280 + "1",
    "list": "id in " + "[" * 190 + "]" * 190,
    "attribute": "id" + ".a" * 900,
    "call": "id" + "()" * 900,
    "if-else": "id if id else " * 140 + "id",
    "and": " and ".join(["(id == 'a'"] * 99) + ")" * 99,
}


@pytest.mark.parametrize("where", DEEP.values(), ids=list(DEEP))
def test_deep_input_is_an_error_and_no_crash(where: str) -> None:
    """On a small stack too, such as a server's thread may have."""
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            query.filter_rows(ROWS, where)
        except BaseException as error:
            caught.append(error)

    before = threading.stack_size(1024 * 1024)
    try:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert [type(error) for error in caught] == [UserError]
    assert len(str(caught[0])) < 500


def test_a_long_flat_condition_works() -> None:
    assert ids(" or ".join(["id == 'a'"] * 150)) == "a"


def test_a_number_of_two_thousand_digits_compares() -> None:
    assert ids("accuracy < " + "9" * 1_900) == "abce"


def test_length_is_bounded() -> None:
    with pytest.raises(UserError, match="at most 2,000"):
        query.filter_rows(ROWS, "id == '" + "x" * 2_000 + "'")


def order(sort: str) -> str:
    return "".join(row["id"] for row in query.sort_rows(ROWS, sort))


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("accuracy", "ebacd"),
        ("-accuracy", "ebacd"),
        ("+accuracy", "cabed"),
        ("epsilon", "dacbe"),
        ("-epsilon", "bacde"),
        ("epsilon,-accuracy", "dacbe"),
        ("epsilon, +accuracy", "dcabe"),
        ("task,accuracy", "ebdac"),
        ("error", "dabce"),
    ],
)
def test_the_order_of_rows(sort: str, expected: str) -> None:
    assert order(sort) == expected


def test_nan_is_sorted_last() -> None:
    rows = [{"x": math.nan}, {"x": 1.0}, {"x": None}, {"x": -1.0}]
    assert [row["x"] for row in query.sort_rows(rows, "-x")[:2]] == [1.0, -1.0]


def test_mixed_types_can_be_sorted() -> None:
    rows = [{"x": "b"}, {"x": 2}, {"x": "a"}, {"x": 1}]
    assert [row["x"] for row in query.sort_rows(rows, "x")] == [1, 2, "a", "b"]


@pytest.mark.parametrize(
    "sort",
    ["", ",", "accuracy,", "-", "acuracy", "id; drop", "x" * 3_000, ",".join(["id"] * 17)],
)
def test_a_sort_that_makes_no_sense_is_refused(sort: str) -> None:
    with pytest.raises(UserError):
        query.sort_rows(ROWS, sort)


def test_columns_keep_the_order_asked_for() -> None:
    found = query.select_columns("accuracy, B, id,accuracy", list(ROWS[4]))
    assert found == ["accuracy", "batch_size", "id"]
