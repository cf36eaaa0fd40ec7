"""Files without a header, and columns that were guessed."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from dpfp_ray.data import Task
from dpfp_ray.data.tasks import load_task
from dpfp_ray.plan.plan import DATA_FIELDS, FIELDS, Plan
from dpfp_ray.system.errors import Guess, UserError

ROWS = [("a great film", "good"), ("a dull plot", "bad"), ("so boring", "bad"), ("fine", "good")]


def write(path: Path, header: str = "", separator: str = "\t") -> str:
    lines = [separator.join(row) for row in ROWS]
    path.write_text("\n".join([header, *lines] if header else lines) + "\n")
    return str(path)


def load(train: str, **fields: Any) -> Task:
    return load_task(Plan(train_file=train, dev_file=train, **fields))


@pytest.mark.parametrize(("name", "separator"), [("a.tsv", "\t"), ("a.csv", ",")])
def test_without_a_header_columns_have_numbers(tmp_path: Path, name: str, separator: str) -> None:
    path = write(tmp_path / name, separator=separator)
    task = load(path, header="none", text_column="1", label_column="2")
    assert task.train.texts == [text for text, _ in ROWS]
    assert task.label_names == ("bad", "good")


def test_a_number_without_no_header_says_which_flag_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="numbers with --no-header only"):
        load(write(tmp_path / "a.tsv"), text_column="1", label_column="2")


def test_files_that_name_their_columns_have_a_header(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": "y"}\n')
    with pytest.raises(UserError, match="drop --no-header"):
        load(str(tmp_path / "a.jsonl"), header="none", text_column="1", label_column="2")


def test_guessed_columns_are_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "review\tsentiment")
    said = r"text from column 'review', label from column 'sentiment' \(by its name; --text-column"
    with pytest.warns(Guess, match=said):
        load(path)


def test_columns_that_were_named_are_not_said_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "review\tsentiment")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path, text_column="review", label_column="sentiment")


def test_the_columns_that_were_read_are_kept_and_which_were_guessed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "review\tsentiment")
    split = load(path, label_column="sentiment", max_train=2).train
    assert split.columns == {"text": "review", "label": "sentiment", "guessed": ["text"]}


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_texts_of_other_columns_stay_with_their_rows(tmp_path: Path, kind: str) -> None:
    """Not labels, dates or numbers: those are shared by people who have nothing in common."""
    titles = [f"the long title of film {i}" for i in range(4)]
    frame = pandas.DataFrame(ROWS, columns=["text", "label"]).assign(
        title=titles, day="2026-11-17", number=range(4)
    )
    path = tmp_path / f"a.{kind}"
    frame.to_parquet(path) if kind == "parquet" else frame.to_csv(path, index=False)
    train = load(str(path)).train
    assert train.beside == (titles,)
    assert list(train.take(np.array([2])).all_texts()) == ["so boring", titles[2]]


SCRIPTS = {
    "Chinese": "好看的电影",
    "Japanese": "とても良い映画",
    "Thai": "หนังดีมาก",
    "Arabic": "فيلم",
    "English": "good",
    "emoji": "😀",
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("task", ["custom", "sst2"])
def test_two_columns_of_a_file_have_the_same_texts_in_any_script(
    tmp_path: Path, script: str, task: str
) -> None:
    titles = [f"{SCRIPTS[script]}{i}" for i in range(40)]
    frame = pandas.DataFrame({"title": titles, "body": [f"b {i}" for i in range(40)]})
    frame.assign(label=["0", "1"] * 20).to_csv(tmp_path / "a.csv", index=False)
    first, second = (
        load(str(tmp_path / "a.csv"), task=task, text_column=name, label_column="label").train
        for name in ("title", "body")
    )
    assert set(first.all_texts()) == set(second.all_texts()) == {*frame.title, *frame.body}


def test_other_columns_of_a_glue_folder_count_too(tmp_path: Path) -> None:
    rows = "".join(f"a film {i}\t{i % 2}\tโน้ต{i}\n" for i in range(20))
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\tnote\n" + rows)
    train = load_task(Plan(task="sst2", data_dir=str(tmp_path))).train
    assert train.beside == ([f"โน้ต{i}" for i in range(20)],)


def test_values_that_repeat_often_in_their_column_join_nobody(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": [f"a film {i}" for i in range(200)]})
    frame["label"] = ["0", "1"] * 100
    frame["country"] = ["France", "Japan", "日本", "a country whose name is quite long"] * 50
    frame["title"] = ["common title"] * 11 + [f"title {i // 10}" for i in range(189)]
    frame.to_csv(tmp_path / "a.csv", index=False)
    (titles,) = load(str(tmp_path / "a.csv")).train.beside
    assert set(titles) == {"", *(f"title {i}" for i in range(19))}


def test_whatever_decides_which_records_are_read_is_a_data_field(tmp_path: Path) -> None:
    asked = set()

    class Watched(Plan):
        def __getattribute__(self, name: str) -> Any:
            asked.add(name)
            return super().__getattribute__(name)

    plan = Watched(train_file=write(tmp_path / "a.tsv", "text\tlabel"))
    asked.clear()
    load_task(plan)
    assert {"header", "bad_rows", "max_train"} <= asked & set(FIELDS) <= set(DATA_FIELDS)


def test_a_column_that_may_say_whose_a_row_is_gets_a_hint(tmp_path: Path) -> None:
    frame = pandas.DataFrame(ROWS * 3, columns=["text", "label"])
    frame["author_id"] = [number // 2 for number in range(len(frame))]
    frame["id"] = range(len(frame))
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.warns(Guess, match="'author_id' has 6 values in 12 rows.*--user-column author_id"):
        load(str(tmp_path / "a.csv"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_task(Plan(train_file=str(tmp_path / "a.csv"), user_column="author_id"))


def test_labels_that_look_like_ids_are_questioned(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": [f"text {n}" for n in range(600)]})
    frame["label"] = [f"class {n % 100}" for n in range(600)]
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.warns(Guess, match="'label' has 100 different values in 600 rows; is it an id"):
        load(str(tmp_path / "a.csv"))
