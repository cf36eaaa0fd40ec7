"""Data in memory: every form gives the records that a file would, and the same refusals."""

from typing import Any

import datasets
import numpy as np
import pandas
import pytest

from dpfp_ray.data.tasks import in_memory, load_task
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError

TEXTS = [f"text number {number}" for number in range(20)]
LABELS = ["bad", "good"] * 10
COLUMNS = {"text": TEXTS, "label": LABELS}
FORMS: dict[str, Any] = {
    "frame": pandas.DataFrame(COLUMNS),
    "dataset": datasets.Dataset.from_dict(COLUMNS),
    "lists": (TEXTS, LABELS),
    "arrays": (np.array(TEXTS), np.array(LABELS)),
    "columns": COLUMNS,
    "splits": {"train": pandas.DataFrame(COLUMNS)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_records_of_a_file(form: str, tmp_path: Any) -> None:
    pandas.DataFrame(COLUMNS).to_csv(tmp_path / "file.csv", index=False)
    expected = load_task(Plan(train_file=str(tmp_path / "file.csv")))
    _, task = in_memory(Plan(), FORMS[form])
    assert task.label_names == expected.label_names == ("bad", "good")
    assert task.train.texts == expected.train.texts
    assert task.train.labels.tolist() == expected.train.labels.tolist()
    assert task.dev["dev"].texts == expected.dev["dev"].texts


def test_the_plan_says_memory_and_nothing_of_the_content() -> None:
    plan, _ = in_memory(Plan(), FORMS["lists"])
    assert (plan.task, plan.train_file, plan.dev_file) == ("custom", "memory:data", None)
    other, _ = in_memory(Plan(), ([t.upper() for t in TEXTS], LABELS))
    assert other.hash == plan.hash


def test_the_caller_may_name_the_data() -> None:
    plan, _ = in_memory(Plan(train_file="memory:reviews"), FORMS["frame"])
    assert plan.train_file == "memory:reviews"


def test_a_dev_set_is_given_or_found_among_the_splits() -> None:
    small = {"text": ["one", "two"], "label": ["good", "bad"]}
    for data, dev in ((COLUMNS, small), ({"train": COLUMNS, "validation": small}, None)):
        plan, task = in_memory(Plan(), data, dev=dev)
        assert plan.dev_file == "memory:dev"
        assert len(task.train.texts) == 20
        assert task.dev["dev"].texts == ["one", "two"]


def test_columns_are_named_by_the_call() -> None:
    frame = pandas.DataFrame({"a": TEXTS, "b": TEXTS, "stars": LABELS})
    plan, task = in_memory(Plan(), frame, text="a", pair="b", label="stars")
    assert (plan.text_column, plan.pair_column, plan.label_column) == ("a", "b", "stars")
    assert task.train.pairs == task.train.texts


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        (3, {}, "data is a int; give a DataFrame"),
        ((TEXTS, LABELS[:-1]), {}, "the columns differ in length .text 20, label 19."),
        ({"words": TEXTS, "label": LABELS}, {}, "give text= NAME"),
        (COLUMNS, {"label": "stars"}, "no column 'stars'.*give another label="),
        ({"train": COLUMNS, "val": COLUMNS}, {"dev": COLUMNS}, "validation split and dev="),
    ],
)
def test_what_cannot_be_used_is_refused_in_the_words_of_a_call(
    data: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        in_memory(Plan(), data, **options)


def test_a_plan_of_data_in_memory_cannot_be_loaded_without_them() -> None:
    with pytest.raises(UserError, match="give them as data="):
        load_task(Plan(train_file="memory:data"))
    with pytest.raises(UserError, match="both given"):
        in_memory(Plan(train_file="mine.csv"), COLUMNS)
