"""One file, its shards and the same rows in memory are the same data, read without holding it."""

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

from dpfp_ray.data import Task, texts
from dpfp_ray.data.readers import files_of
from dpfp_ray.data.tasks import in_memory, load_task
from dpfp_ray.data.tokens import tokenise
from dpfp_ray.models.pretrained import load_tokenizer
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.train import train
from tests.support.tiny_runs import tiny_split

KINDS = ("csv", "tsv", "parquet", "jsonl")
CUTS = (0, 7, 8, 90, 120)


def frame(rows: int = 120) -> pandas.DataFrame:
    split = tiny_split(rows)
    return pandas.DataFrame(
        {
            "text": split.texts,
            "label": np.array(["bad", "good"])[split.labels],
            "title": [f"a title of some length, {n}" for n in range(rows)],
            "who": [f"person {n % 31}" for n in range(rows)],
        }
    )


def write(table: pandas.DataFrame, path: Path) -> None:
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")


def write_shards(table: pandas.DataFrame, folder: Path, kind: str) -> str:
    folder.mkdir()
    for number, (start, stop) in enumerate(pairwise(CUTS), start=8):
        write(table[start:stop], folder / f"part-{number}.{kind}")  # 8, 9, 10, 11
    return str(folder / f"part-*.{kind}")


def facts(task: Task, folder: Path) -> dict[str, Any]:
    """All that anything later is made from."""
    train = task.train
    people = Ledger(folder / "ledger").register(train.all_texts(), task.dev["dev"].all_texts())
    return {
        "texts": list(train.texts),
        "labels": train.labels.tolist(),
        "beside": [list(column) for column in train.beside],
        "users": None if train.users is None else list(train.users),
        "dev": list(task.dev["dev"].texts),
        "classes": task.label_names,
        "people": (people.id, people.texts),
    }


@pytest.mark.parametrize("more", [{}, {"user_column": "who", "max_per_user": 2, "max_train": 20}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_its_shards_and_memory_are_the_same_records(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    whole = tmp_path / f"whole.{kind}"
    write(frame(), whole)
    expected = facts(load_task(Plan(train_file=str(whole), **more)), tmp_path)
    pattern = write_shards(frame(), tmp_path / "shards", kind)
    assert facts(load_task(Plan(train_file=pattern, **more)), tmp_path) == expected
    for data in (frame(), datasets.Dataset.from_pandas(frame())):
        found = facts(in_memory(Plan(**more), data)[1], tmp_path)
        # Files have texts for numbers and names; so the title's column is the same everywhere.
        assert found == expected


@pytest.mark.parametrize("named", [True, False], ids=["with features", "without"])
def test_a_dataset_in_streaming_mode_is_the_same_records(named: bool, tmp_path: Path) -> None:
    rows = frame().to_dict("records")
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    if named:
        stream = datasets.Dataset.from_pandas(frame()).to_iterable_dataset(num_shards=3)
    _, task = in_memory(Plan(), {"train": stream})
    assert facts(task, tmp_path) == facts(in_memory(Plan(), frame())[1], tmp_path)


def test_one_piece_or_shards_give_one_plan_hash_the_same_tokens_and_the_same_record(
    tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    """The same pattern, for one file and then for four."""
    tokenizer, found = load_tokenizer(tiny_task["model"]), []
    given = {key: tiny_task[key] for key in ("dev_file", "model", "representation", "epsilon")}
    for cuts in ((0, 120), CUTS):
        for old in tmp_path.glob("part-*"):
            old.unlink()
        for number, (start, stop) in enumerate(pairwise(cuts)):
            write(frame()[["text", "label"]][start:stop], tmp_path / f"part-{number}.csv")
        named = {**given, "labels": ("bad", "good"), "train_file": str(tmp_path / "part-*.csv")}
        dev = tmp_path / "dev.csv"
        write(frame(40)[["text", "label"]], dev)
        plan = Plan(method="dpfp", mode="moments", **{**named, "dev_file": str(dev)})
        tokens = tokenise(load_task(plan).train, tokenizer, 32)
        record = train(plan, seed=3, threads=1, reporter="silent").record
        same = {key: record[key] for key in ("plan", "plan_hash", "metrics", "privacy", "labels")}
        found.append((tokens.content(), json.dumps(same)))
    assert found[0] == found[1]


def test_files_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        (tmp_path / f"part-{number}.csv").touch()
    (tmp_path / "part-2.csv").mkdir()
    assert [path.name for path in files_of(tmp_path / "part-*.csv")] == [
        *("part-1.csv", "part-9.csv", "part-10.csv")
    ]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").touch()
    assert files_of(tmp_path / "a[1].csv") == [tmp_path / "a[1].csv"]


def test_keys_that_a_shard_of_json_lines_leaves_out_are_missing(tmp_path: Path) -> None:
    (tmp_path / "a-1.jsonl").write_text('{"text": "one", "label": 0}\n{"text": "two", "label": 1}')
    (tmp_path / "a-2.jsonl").write_text('{"label": 1, "more": "x"}\n{"label": 0, "text": "three"}')
    files = {"train_file": str(tmp_path / "a-*.jsonl"), "dev_file": str(tmp_path / "a-1.jsonl")}
    with pytest.raises(UserError, match=r"a-2\.jsonl: line 1: no 'text'"):
        load_task(Plan(**files))
    with pytest.warns(UserWarning, match=r"1 of 4 rows skipped; the first: .*a-2\.jsonl: line 1"):
        skipped = load_task(Plan(**files, bad_rows="skip"))
    assert skipped.train.texts == ["one", "two", "three"]


def test_columns_in_another_order_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "a-1.csv").write_text("text,label\none,0\ntwo,1\n")
    (tmp_path / "a-2.csv").write_text("label,text\n1,three\n")
    plan = Plan(train_file=str(tmp_path / "a-*.csv"), dev_file=str(tmp_path / "a-1.csv"))
    train_set = load_task(plan).train
    assert train_set.texts == ["one", "two", "three"]
    assert train_set.labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("b-*.csv", "no file has such a name; check the pattern"),
        ("a-*", "end the pattern in the files' type"),
        ("a-*.csv", r"a-2\.csv: the columns are not those of .*a-1\.csv \('label' is in one"),
    ],
)
def test_patterns_that_cannot_be_read_say_why(tmp_path: Path, pattern: str, said: str) -> None:
    (tmp_path / "a-1.csv").write_text("text,label\none,0\n")
    (tmp_path / "a-2.csv").write_text("text,rating\ntwo,1\n")
    with pytest.raises(UserError, match=said):
        load_task(Plan(train_file=str(tmp_path / pattern)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_reading_does_not_hold_the_texts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB of texts; what is in memory at any time is much less."""
    monkeypatch.setattr(texts, "IN_MEMORY", 2**16)
    rows = 8_000
    table = pandas.DataFrame(
        {"text": [f"{n} " + "word " * 200 for n in range(rows)], "label": [0, 1] * (rows // 2)}
    )
    monkeypatch.setattr(texts, "CHUNK", 256)
    monkeypatch.setattr("dpfp_ray.data.readers.BATCH", 256)
    if kind == "parquet":
        table.to_parquet(tmp_path / "a.parquet", row_group_size=500)
    else:
        write(table, tmp_path / f"a.{kind}")
    del table
    load_task(Plan(train_file=str(tmp_path / f"a.{kind}"), max_train=10))  # what is imported late
    tracemalloc.start()
    task = load_task(Plan(train_file=str(tmp_path / f"a.{kind}")))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(task.train) + len(task.dev["dev"]) == rows
    assert peak < 3e6


def test_a_stream_has_its_persons_in_a_column() -> None:
    stream = datasets.Dataset.from_pandas(frame()).to_iterable_dataset()
    assert in_memory(Plan(), stream, users="who")[1].train.users is not None
    with pytest.raises(UserError, match="name the column"):
        in_memory(Plan(), stream, users=["ann"] * 120)
