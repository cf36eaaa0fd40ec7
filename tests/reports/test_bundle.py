"""A replication bundle: what is in it, what is not, and that its cells can be run again."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpfp_ray import UserError, report, reproduce
from dpfp_ray.reports import portable
from dpfp_ray.reports.reproduce import Bundle, Bundled
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


def test_it_holds_plans_records_tables_figures_versions_and_commands(bundle: Path) -> None:
    files = contents(bundle)
    folders = {name.partition("/")[0] for name in files if "/" in name}
    assert folders == {"plans", "records", "report"}
    assert any(name.startswith("report/tables/") for name in files)
    assert any(name.startswith("report/figures/") for name in files)
    assert b"\ntorch==" in files["requirements.txt"]
    assert json.loads(files["environment.json"])["python"]
    assert b"dpfp train --method dpfp --train-file train.csv" in files["commands.txt"]


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
    kept = {record["plan"]["task"] for record in records if "predictions" in record}
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


def test_a_cell_runs_again_and_lands_in_its_spread(
    bundle: Path, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    name = next(cell.name for cell in Bundle(bundle).cells if "moments" in cell.name)
    for field in ("train_file", "dev_file", "model"):
        path = Path(tiny_task[field])
        (tmp_path / path.name).symlink_to(path)
    [found] = reproduce(bundle, only=name, files=tmp_path, seed=6, threads=1, reporter="silent")
    assert found.cell == name
    assert found.outcome == "within"
    assert found.remarks == ()


def test_a_bundle_without_its_files_says_which_are_missing(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs 'train.csv' \(train_file\).*--files FOLDER"):
        reproduce(bundle, files=tmp_path)


def test_an_unknown_cell_is_refused(bundle: Path) -> None:
    with pytest.raises(UserError, match="unknown cell 'nothing'"):
        reproduce(bundle, only="nothing")


def changed(bundle: Path, copy: Path, **changes: Any) -> Path:
    """The bundle with other fields in every plan: what somebody else may send."""
    with zipfile.ZipFile(copy, "w") as file:
        for name, content in contents(bundle).items():
            if name.startswith("plans/"):
                content = yaml.safe_dump(yaml.safe_load(content) | changes).encode()
            file.writestr(name, content)
        file.writestr("../../escaped.txt", "x")
    return copy


@pytest.mark.parametrize("path", ["/etc/passwd", "../../etc/passwd", "..", "~/secret.csv"])
def test_a_plan_cannot_reach_out_of_the_folder_of_files(
    bundle: Path, tmp_path: Path, path: str
) -> None:
    bad = changed(bundle, tmp_path / "bad.zip", train_file=path)
    with pytest.raises(UserError, match="give --files"):
        reproduce(bad, files=tmp_path / "files")
    assert not list(tmp_path.parent.glob("**/escaped.txt"))


@pytest.mark.parametrize("content", [b"no zip", b""])
def test_what_is_no_bundle_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(UserError, match="is no bundle"):
        Bundle(tmp_path / "x.zip")


def cell(*accuracy: float) -> Bundled:
    return Bundled("c", {}, (), accuracy, 1000, None, None, "", 1)


def test_the_spread_of_several_runs_is_that_over_seeds() -> None:
    low, high = cell(0.80, 0.81, 0.82).interval  # mean 0.81, s = 0.01, t = 4.303, √(4/3)
    assert (low, high) == pytest.approx((0.81 - 0.04968, 0.81 + 0.04968), abs=1e-4)


def test_equal_runs_leave_room_for_one_row() -> None:
    assert cell(0.8, 0.8).interval == pytest.approx((0.799, 0.801))


def test_one_run_is_given_the_spread_over_rows() -> None:
    low, high = cell(0.8).interval  # 1.96 √(2 · 0.8 · 0.2 / 1000)
    assert (low, high) == pytest.approx((0.8 - 0.03506, 0.8 + 0.03506), abs=1e-4)


def test_a_token_of_this_machine_stops_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "abcdefgh12345678")
    with pytest.raises(UserError, match=r"value of \$SOME_TOKEN"):
        portable.refuse_secrets({"a.txt": b"it is abcdefgh12345678"})


@pytest.mark.parametrize(
    "folder", ["/home/ann/thesis", "/Users/ann/thesis", str(Path.home() / "x")]
)
def test_a_home_folder_stops_a_bundle(folder: str) -> None:
    with pytest.raises(UserError, match="would show the folder"):
        portable.refuse_secrets({"a.txt": f"title: {folder}".encode()})
