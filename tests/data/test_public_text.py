"""Public text: what is taken, and what is refused."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray.data import Split, Task, public_text
from dpfp_ray.data.public_text import public_texts, sentences
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from tests.support.tiny_runs import tiny_split

PUBLIC = [f"public text number {n}" for n in range(200)]


def a_task(private: list[str] | None = None, dev: list[str] | None = None) -> Task:
    def split(texts: list[str] | None, seed: int) -> Split:
        return Split(texts, None, np.arange(len(texts)) % 2) if texts else tiny_split(8, seed)

    return Task("custom", ("bad", "good"), split(private, 1), {"dev": split(dev, 2)})


def a_plan(path: Path, lines: list[str], **changes: Any) -> Plan:
    path.write_text("\n".join([*lines, ""]))
    values = {"train_file": "private.csv", "public_file": str(path)}
    return Plan(method="distil", **values, **changes)


def test_a_text_file_has_a_text_a_line(tmp_path: Path) -> None:
    plan = a_plan(tmp_path / "public.txt", [*PUBLIC, "", PUBLIC[0]])
    assert public_texts(plan, a_task()).texts == PUBLIC


def test_a_table_s_texts_are_found_by_the_column_s_name(tmp_path: Path) -> None:
    rows = ["label,text", *(f"unknown,{text}" for text in PUBLIC)]
    assert public_texts(a_plan(tmp_path / "public.csv", rows), a_task()).texts == PUBLIC


def test_a_smaller_subset_is_inside_a_larger_one(tmp_path: Path) -> None:
    few, more = (
        public_texts(a_plan(tmp_path / "public.txt", PUBLIC, max_public=n), a_task()).texts
        for n in (10, 20)
    )
    assert len(few) == 10
    assert set(few) < set(more)


def test_dev_texts_are_left_out_however_they_are_spelt(tmp_path: Path) -> None:
    plan = a_plan(tmp_path / "public.txt", PUBLIC)
    with pytest.warns(UserWarning, match="1 texts are dev texts and left out"):
        texts = public_texts(plan, a_task(dev=["Public text  number 7 !", "another"])).texts
    assert texts == [text for text in PUBLIC if text != PUBLIC[7]]


@pytest.mark.parametrize("where", ["private", "dev"])
def test_a_file_with_many_texts_of_the_data_is_no_public_text(tmp_path: Path, where: str) -> None:
    plan = a_plan(tmp_path / "public.txt", PUBLIC)
    with pytest.raises(UserError, match=f"more than 1% of its 200 texts are {where} texts"):
        public_texts(plan, a_task(**{where: [*PUBLIC[:3], "another"]}))


def test_what_is_used_does_not_depend_on_the_private_records(tmp_path: Path) -> None:
    """A private text that is public by chance stays: leaving it out would tell that it is there."""
    plan = a_plan(tmp_path / "public.txt", PUBLIC)
    with_one = public_texts(plan, a_task(private=[PUBLIC[5], "another"]))
    assert with_one.texts == public_texts(plan, a_task()).texts == PUBLIC


def test_tasks_without_public_text_of_their_own_ask_for_it() -> None:
    plan = Plan(method="distil", train_file="private.csv")
    with pytest.raises(UserError, match="give --public-file FILE"):
        public_texts(plan, a_task())


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text in it"):
        public_texts(a_plan(tmp_path / "public.txt", [""]), a_task())


def test_a_review_is_cut_into_sentences_of_some_words() -> None:
    review = 'A fine film, I thought. "Not at all!" she said at once.<br /><br />No. ' + "w " * 31
    assert list(sentences(review)) == ["A fine film, I thought.", "she said at once."]


def test_of_the_reviews_only_those_of_imdb_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other source has SST-2's dev sentences."""
    rows = "text,label,source\nfrom imdb it is,1,imdb\nfrom tomatoes it is,1,rotten_tomatoes\n"
    with zipfile.ZipFile(tmp_path / "wheel", "w") as wheel:
        wheel.writestr(public_text.MEMBER, rows)
    monkeypatch.setattr(public_text, "reviews_wheel", lambda: tmp_path / "wheel")
    assert list(public_text.review_sentences()) == ["from imdb it is"]
