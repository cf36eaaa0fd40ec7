"""A replication bundle: what is in it, what is not, and that its plans run again."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpfp_ray import UserError, report, train
from dpfp_ray.plan.values import make_plan
from dpfp_ray.reports.bundle import expected_interval, refuse_secrets
from dpfp_ray.results.store import Store
from tests.support.finished_runs import finished
from tests.support.samples import sample


@pytest.fixture(scope="module")
def runs(tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on files of one's own, and a trial that failed on a row of them."""
    folder = tmp_path_factory.mktemp("runs")
    finished(tiny_task, "moments", folder / "moments")
    finished(tiny_task, "non_private head", folder / "plain")
    failed = sample("t1", method="dpsgd")
    failed["trial"] |= {"status": "failed", "error": "row 3: 'a private text'", "node": "10.1.2.3"}
    failed["trial"]["seed"] = 1234567
    Store(folder / "sweep").put(failed)
    return folder


@pytest.fixture(scope="module")
def bundle(runs: Path) -> Path:
    return report([runs], bundle=runs.parent / "bundle.zip").bundle


def contents(bundle: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(bundle) as file:
        return {name: file.read(name) for name in file.namelist()}


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from keys(item)


def test_it_holds_plans_records_tables_figures_and_versions(bundle: Path) -> None:
    files = contents(bundle)
    folders = {name.partition("/")[0] for name in files if "/" in name}
    assert folders == {"plans", "records", "report"}
    assert any(name.startswith("report/tables/") for name in files)
    assert any(name.startswith("report/figures/") for name in files)
    assert b"\ntorch==" in files["requirements.txt"]
    assert json.loads(files["environment.json"])["python"]


def test_it_holds_no_seed_no_folder_no_text_of_a_record(
    bundle: Path, tiny_task: dict[str, Any]
) -> None:
    import csv

    files = contents(bundle)
    everything = b"\n".join(files.values()).decode(errors="replace")
    with open(tiny_task["train_file"], newline="") as train:
        texts = {row[0] for row in csv.reader(train)} - {"text"}
    assert len(texts) > 50
    assert not [text for text in texts if text in everything]
    for absent in (str(Path(tiny_task["train_file"]).parent), "a private text", "10.1.2.3"):
        assert absent not in everything
    named = {key for n, c in files.items() if n.endswith(".json") for key in keys(json.loads(c))}
    assert {key for key in named if "seed" in key} <= {"seed_index"}
    records = [json.loads(c) for name, c in files.items() if name.startswith("records/")]
    kept = {record["plan"]["task"] for record in records if record["predictions"]}
    assert kept == {"demo"}  # dev labels of files of one's own are data
    assert "error" not in named


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(runs: Path, bundle: Path, tmp_path: Path) -> None:
    again = report([runs], bundle=tmp_path / "bundle.zip").bundle
    assert again is not None
    assert again.read_bytes() == bundle.read_bytes()


def test_its_records_make_its_report_again(bundle: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(bundle) as file:
        file.extractall(tmp_path)
    report([tmp_path], output=tmp_path / "again")
    for name in ("accounting.csv", "runs.csv"):
        again = (tmp_path / "again" / "tables" / name).read_bytes()
        assert again == (tmp_path / "report" / "tables" / name).read_bytes()


def test_the_plan_of_a_cell_runs_again_within_its_spread(
    bundle: Path, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    files = contents(bundle)
    cells = json.loads(files["bundle.json"])["cells"]
    [cell] = [cell for cell in cells if "moments" in cell["cell"]]
    places = {name: tiny_task[name] for name in ("train_file", "dev_file", "model")}
    plan = make_plan(yaml.safe_load(files[cell["plan_file"]]) | places)
    low, high = cell["expected"]
    assert low <= train(plan, seed=6, threads=1, reporter="silent").accuracy <= high
    assert cell["cell"].encode() in files["README.md"]


@pytest.mark.parametrize(
    ("scores", "half_width"),
    [
        ((0.80, 0.81, 0.82), 0.04968),  # mean 0.81, s = 0.01, t = 4.303, √(4/3)
        ((0.81, 0.81), 0.001),  # room for one row
        ((0.81,), 1.96 * (2 * 0.81 * 0.19 / 1000) ** 0.5),  # over rows
    ],
)
def test_one_more_run_is_expected_within_the_spread(
    scores: tuple[float, ...], half_width: float
) -> None:
    expected = (0.81 - half_width, 0.81 + half_width)
    assert expected_interval(scores, 1000) == pytest.approx(expected, abs=1e-4)


def test_a_token_of_this_machine_stops_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "abcdefgh12345678")
    with pytest.raises(UserError, match=r"value of \$SOME_TOKEN"):
        refuse_secrets({"a.txt": b"it is abcdefgh12345678"})


@pytest.mark.parametrize(
    "folder", ["/home/ann/thesis", "/Users/ann/thesis", str(Path.home() / "x")]
)
def test_a_home_folder_stops_a_bundle(folder: str) -> None:
    with pytest.raises(UserError, match="would show the folder"):
        refuse_secrets({"a.txt": f"title: {folder}".encode()})
