import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpfp_ray.data import Task, public_order
from dpfp_ray.data.columns import GLUE
from dpfp_ray.data.tasks import load_task, task_from_hub
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"


def load(**fields: Any) -> Task:
    return load_task(Plan(method="non_private", **fields))


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def sst2(folder: Path, train: tuple[str, ...] = ("bad\t0", "good\t1")) -> Path:
    write(folder / "train.tsv", "sentence\tlabel", *train)
    write(folder / "dev.tsv", "sentence\tlabel", "fine\t1")
    return folder


# Names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["SST-2", "sst-2", "sst2", "SST2", "sst_2"])
def test_task_names_are_forgiving(tmp_path: Path, spelling: str) -> None:
    assert load(task=spelling, data_dir=str(sst2(tmp_path))).name == "sst2"


def test_unknown_task_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown task 'mnlli'; did you mean 'mnli'"):
        load(task="mnlli")


# Folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "SST-2", "SST2", "sst2", "sst-2"])
def test_folder_of_the_task_or_its_parent(tmp_path: Path, inner: str) -> None:
    sst2(tmp_path / inner)
    task = load(task="sst2", data_dir=str(tmp_path))
    assert task.train.texts == ["bad", "good"]
    assert task.train.labels.tolist() == [0, 1]
    assert task.train.labels.dtype == np.int64
    assert list(task.dev) == ["dev"]


@pytest.mark.parametrize(
    ("name", "header", "rows"),
    [
        ("mnli", "sentence1\tsentence2\tgold_label", ("entailment", "neutral", "contradiction")),
        ("mnli", "index\tpremise\thypothesis\tlabel\tlabel1", ("0\tx", "1\tx", "2.0\tx")),
        ("qqp", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", ("0", "1", "1")),
        ("qnli", "index\tquestion\tsentence\tlabel", ("entailment", "not_entailment", "1")),
        ("rte", "index\tsentence1\tsentence2\tlabel", ("entailment", "not entailment", "1")),
        ("mrpc", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ()),
    ],
)
def test_header_names_and_labels_of_pair_tasks(
    tmp_path: Path, name: str, header: str, rows: tuple[str, ...]
) -> None:
    columns = header.split("\t")
    if name == "mrpc":
        lines = ["0\ti\tj\tleft\tright", "1\ti\tj\tleft\tright"]
        expected = [0, 1]
    else:
        last = rows[0].count("\t") + 1
        before = ["i"] * (len(columns) - 2 - last) + ["left", "right"]
        lines = ["\t".join([*before, row]) for row in rows]
        expected = [0, 1, 2] if name == "mnli" else [0, 1, 1]
    for stem in ("train", "dev", "dev_matched"):
        write(tmp_path / f"{stem}.tsv", header, *lines)
    task = load(task=name, data_dir=str(tmp_path))
    assert task.train.labels.tolist() == expected
    assert set(task.train.texts) == {"left"}
    assert task.train.pairs == ["right"] * len(lines)


def test_gold_label_wins_over_single_annotations(tmp_path: Path) -> None:
    rows = [f"a\tb\tneutral\t{gold}" for gold in GLUE["mnli"].labels]
    for stem in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path / f"{stem}.tsv", "sentence1\tsentence2\tlabel\tgold_label", *rows)
    task = load(task="mnli", data_dir=str(tmp_path))
    assert task.train.labels.tolist() == [0, 1, 2]
    assert list(task.dev) == ["matched", "mismatched"]


def test_mnli_needs_matched_but_not_mismatched(tmp_path: Path) -> None:
    rows = [f"a\tb\t{label}" for label in GLUE["mnli"].labels]
    header = "sentence1\tsentence2\tlabel"
    write(tmp_path / "train.tsv", header, *rows)
    write(tmp_path / "dev_mismatched.tsv", header, *rows)
    with pytest.raises(UserError, match=r"no dev_matched\.tsv"):
        load(task="mnli", data_dir=str(tmp_path))
    write(tmp_path / "dev_matched.tsv", header, *rows)
    (tmp_path / "dev_mismatched.tsv").unlink()
    assert list(load(task="mnli", data_dir=str(tmp_path)).dev) == ["matched"]


@pytest.mark.parametrize("header", [(), ("idx\tlabel\tstar\tsentence",)])
def test_cola_is_read_with_and_without_a_header(tmp_path: Path, header: tuple[str, ...]) -> None:
    for stem in ("train", "dev"):
        rows = ("gj04\t1\t\tOur friends won.", "gj04\t0\t*\tThem won.")
        write(tmp_path / f"{stem}.tsv", *header, *rows)
    task = load(task="cola", data_dir=str(tmp_path))
    assert task.train.texts == ["Our friends won.", "Them won."]
    assert task.train.labels.tolist() == [1, 0]


def test_folder_of_the_hub_with_parquet_files(tmp_path: Path) -> None:
    table = pa.table({"sentence": ["a", "b"], "label": [0, 1], "idx": [0, 1]})
    (tmp_path / "sst2").mkdir()
    for split in ("train", "validation"):
        pq.write_table(table, tmp_path / "sst2" / f"{split}-00000-of-00001.parquet")
    assert load(task="sst2", data_dir=str(tmp_path)).dev["dev"].labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("files", "fields", "says"),
    [
        ([], {"data_dir": "nowhere"}, "no such folder"),
        ([], {}, "neither a folder SST-2 nor a train"),
        ([], {"task": "demo"}, "name the task"),
        (["train.tsv"], {}, r"no dev\.tsv"),
        (["CoLA/train.tsv"], {"data_dir": "CoLA"}, "is a folder of cola, not of sst2"),
        (["SST-2/train.tsv", "sst_2/train.tsv"], {}, "both SST-2 and sst_2 look like sst2"),
    ],
)
def test_folders_that_are_not_the_tasks_say_why(
    tmp_path: Path, files: list[str], fields: dict[str, str], says: str
) -> None:
    for name in files:
        write(tmp_path / name, "sentence\tlabel", "a\t0", "b\t1")
    folder = tmp_path / fields.get("data_dir", "")
    with pytest.raises(UserError, match=says):
        load(**{"task": "sst2", **fields, "data_dir": str(folder)})


# Bad rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("worse\t2", "line 3: 'label' is '2', expected one of 'negative', 'positive'"),
        ("worse\t-1", "line 3: 'label' is '-1'"),
        ("worse\t-", "line 3: 'label' is '-'"),
        ("worse\t", "line 3: no 'label'"),
        (" \t1", "line 3: empty 'sentence'"),
        ("worse", "line 3: 1 fields, expected 2"),
        ("worse\t1\t1", "line 3: 3 fields, expected 2"),
    ],
)
def test_malformed_row_names_file_and_line(tmp_path: Path, row: str, problem: str) -> None:
    sst2(tmp_path, ("bad\t0", row, "good\t1"))
    with pytest.raises(UserError) as caught:
        load(task="sst2", data_dir=str(tmp_path))
    assert f"train.tsv: {problem}" in str(caught.value)
    with pytest.warns(UserWarning, match="1 of 3 rows skipped"):
        task = load(task="sst2", data_dir=str(tmp_path), bad_rows="skip")
    assert task.train.texts == ["bad", "good"]


def test_long_values_are_shortened_in_messages(tmp_path: Path) -> None:
    sst2(tmp_path, ("bad\t" + "x" * 5_000,))
    with pytest.raises(UserError) as caught:
        load(task="sst2", data_dir=str(tmp_path))
    assert len(str(caught.value)) < len(str(tmp_path)) + 250
    assert "\n" not in str(caught.value)


# The user's own files ------------------------------------------------------------------------


def own(path: Path, rows: list[tuple[str, Any]]) -> str:
    if path.suffix == ".parquet":
        texts, labels = zip(*rows, strict=True)
        pq.write_table(pa.table({"Review": texts, "Stars": labels}), path)
    elif path.suffix == ".jsonl":
        write(path, *(json.dumps({"Review": text, "Stars": label}) for text, label in rows))
    else:
        mark = "," if path.suffix == ".csv" else "\t"
        write(path, f"Review{mark}Stars", *(f"{text}{mark}{label}" for text, label in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_own_files_of_every_format(tmp_path: Path, suffix: str) -> None:
    train = own(tmp_path / f"a{suffix}", [("x", 10), ("y", 2), ("z", 10)])
    dev = own(tmp_path / f"b{suffix}", [("w", 2)])
    task = load(train_file=train, dev_file=dev, label_column="stars")
    assert task.name == "custom"
    assert task.label_names == ("2", "10")
    assert task.train.labels.tolist() == [1, 0, 1]
    assert task.dev["dev"].labels.tolist() == [0]
    assert task.train.pairs is None


@pytest.mark.parametrize(
    ("labels", "fields", "names", "numbers"),
    [
        (["sport", "art", "sport"], {}, ("art", "sport"), [1, 0, 1]),
        (["sport", "art", "Art"], {"labels": ("sport", "art")}, ("sport", "art"), [0, 1, 1]),
        (["-1", "1.0", "1"], {}, ("-1", "1"), [0, 1, 1]),
    ],
    ids=["sorted words", "given in order", "minus one"],
)
def test_classes_of_own_files(
    tmp_path: Path, labels: list[str], fields: Any, names: tuple[str, ...], numbers: list[int]
) -> None:
    path = own(tmp_path / "a.csv", list(zip("xyz", labels, strict=True)))
    task = load(train_file=path, dev_file=path, label_column="Stars", **fields)
    assert task.label_names == names
    assert task.train.labels.tolist() == numbers


PAIRED = "premise,hypothesis,sentence2,label"


@pytest.mark.parametrize(
    ("header", "rows", "fields", "says"),
    [
        ("text,label", [], {}, r"a\.csv: a header but no rows"),
        ("text,label", ["x,0", "y,1"], {}, "give --dev-file"),
        ("text,label", ["x,p", "y,p"], {}, "'label' is always 'p'"),
        ("text,label", [f"x{i},{i / 7}" for i in range(40)], {}, "it is not a class label"),
        ("text,label", ["x,0", "y,0"], {"task": "sst2"}, "no row has the label 'positive'"),
        ("text,label", ["x,p", "y,q"], {"labels": ("p", "q", "r")}, "no row has the label 'r'"),
        ("words,label", ["x,0"], {}, r"line 1: no column .* the text; .*'words', 'label'"),
        ("text,review,label", ["x,y,0"], {}, r"several columns .* the text; .*--text-column"),
        (PAIRED, ["x,y,z,0"], {}, "several columns could be the pair"),
        ("sentence1,sentence2,label", ["a,,0"], {"task": "rte"}, "line 2: empty 'sentence2'"),
    ],
)
def test_files_that_make_no_task_say_why(
    tmp_path: Path, header: str, rows: list[str], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        load(train_file=str(write(tmp_path / "a.csv", header, *rows)), **fields)


def test_a_dev_label_that_training_does_not_have_is_a_bad_row(tmp_path: Path) -> None:
    train = own(tmp_path / "a.csv", [("x", "p"), ("y", "q")])
    dev = own(tmp_path / "b.csv", [("x", "r")])
    says = r"b\.csv: line 2: 'Stars' is 'r', expected one of 'p', 'q'"
    with pytest.raises(UserError, match=says):
        load(train_file=train, dev_file=dev, label_column="Stars")


@pytest.mark.parametrize(
    ("header", "fields", "pairs"),
    [
        ("premise,hypothesis,label", {}, ["y", "z"]),
        ("text,other,label", {"pair_column": "other"}, ["y", "z"]),
        ("text,review,label", {"text_column": "text"}, None),
    ],
)
def test_columns_of_texts_and_pairs_are_found(
    tmp_path: Path, header: str, fields: dict[str, str], pairs: list[str] | None
) -> None:
    path = str(write(tmp_path / "a.csv", header, "x,y,0", "x,z,1"))
    train = load(train_file=path, dev_file=path, **fields).train
    assert train.texts == ["x", "x"]
    assert train.pairs == pairs


def test_registered_task_from_own_files_keeps_its_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "sentence,label", "x,positive", "y,negative")
    task = load(task="sst2", train_file=str(path), dev_file=str(path))
    assert task.label_names == ("negative", "positive")
    assert task.train.labels.tolist() == [1, 0]


def test_a_tenth_is_held_out_without_dev_file(tmp_path: Path) -> None:
    path = own(tmp_path / "a.csv", [(f"text {i}", i % 2) for i in range(100)])
    task = load(train_file=path, label_column="Stars")
    assert len(task.train) + len(task.dev["dev"]) == 100
    assert 3 <= len(task.dev["dev"]) <= 20
    assert not set(task.train.texts) & set(task.dev["dev"].texts)


# The hub -------------------------------------------------------------------------------------


def hub_mnli() -> dict[str, datasets.Dataset]:
    classes = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])
    features = datasets.Features(
        {"premise": datasets.Value("string"), "hypothesis": datasets.Value("string")}
        | {"label": classes, "idx": datasets.Value("int32")}
    )
    rows = {
        "premise": ["a", "b", "c"],
        "hypothesis": ["d", "e", "f"],
        "label": [2, 0, 1],
        "idx": [0, 1, 2],
    }
    split = datasets.Dataset.from_dict(rows, features=features)
    return {"train": split, "validation_matched": split, "validation_mismatched": split}


def test_hub_splits_become_a_task() -> None:
    task = task_from_hub("mnli", hub_mnli(), Plan(task="mnli"))
    assert task.train.texts == ["a", "b", "c"]
    assert task.train.pairs == ["d", "e", "f"]
    assert task.train.labels.tolist() == [2, 0, 1]
    assert list(task.dev) == ["matched", "mismatched"]


def test_published_rows_without_text_are_skipped() -> None:
    rows = {"question1": ["a", "b", "c"], "question2": ["d", "", "f"], "label": [0, 1, 1]}
    split = datasets.Dataset.from_dict(rows)
    with pytest.warns(UserWarning, match="1 of 3 rows skipped"):
        task = task_from_hub("qqp", {"train": split, "validation": split}, Plan(task="qqp"))
    assert task.train.texts == ["a", "c"]


def test_hub_out_of_reach_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"Couldn't reach the Hub.*--data-dir FOLDER with SST-2"):
        load(task="sst2")


# Public choices of rows ----------------------------------------------------------------------


def test_public_order_is_fixed_for_ever() -> None:
    assert public_order(10, "subset").tolist() == [6, 3, 2, 0, 8, 4, 5, 9, 1, 7]


def test_limits_of_the_plan_apply_to_train_and_dev(tmp_path: Path) -> None:
    path = own(tmp_path / "a.csv", [(f"text {i}", i % 2) for i in range(100)])
    task = load(train_file=path, label_column="Stars", max_train=7, max_dev=3)
    assert (len(task.train), len(task.dev["dev"])) == (7, 3)


# Real data, where they are -------------------------------------------------------------------


@pytest.mark.skipif(not (REAL_DATA / "SST-2").is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize(
    ("name", "classes", "dev"),
    [("sst2", [29_780, 37_569], 872), ("mnli", [4_179, 4_297, 4_335], 9_815)],
)
def test_real_data(name: str, classes: list[int], dev: int) -> None:
    task = load(task=name, data_dir=str(REAL_DATA))
    assert np.bincount(task.train.labels).tolist() == classes
    assert len(next(iter(task.dev.values()))) == dev
