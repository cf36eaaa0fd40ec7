"""The study's plans can be read, and its runner goes on where it was."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray import UserError
from dpfp_ray.plan.values import make_plan, read_plan_file
from tests.support.tiny_runs import tiny_world, write_csv

STUDY = Path(__file__).parents[2] / "benchmarks" / "study"
PLAN = """
seeds: 2
plan: {{train_file: {train}, dev_file: {dev}, model: {model}, batch_size: 8, epochs: 1}}
methods: [non_private:head, dpfp:moments]
epsilon: [3]
"""


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(STUDY))
    return importlib.import_module("run")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[list[str]]:
    """The arguments of a study of four cells, which train in a moment."""
    with tiny_world(tmp_path) as model:
        facts = {
            "train": write_csv(tmp_path / "train.csv", 40),
            "dev": write_csv(tmp_path / "dev.csv", 10, seed=2),
        }
        (tmp_path / "plans").mkdir()
        (tmp_path / "plans" / "tiny.yaml").write_text(PLAN.format(model=model, **facts))
        yield ["--plans", str(tmp_path / "plans"), "--records", str(tmp_path / "records")]


def test_the_committed_plans_are_valid_and_cheap_ones_come_first(study: Any) -> None:
    cells = study.all_cells(Path("data"))
    assert [cell.priority for cell in cells] == sorted(cell.priority for cell in cells)
    assert cells[0].name.startswith("sst2-public/")


def test_finished_cells_are_kept_and_missing_ones_run(
    study: Any, tiny: list[str], tmp_path: Path
) -> None:
    assert study.main(tiny) == 0
    results = sorted((tmp_path / "records").glob("tiny/*/result.json"))
    assert len(results) == 4
    written = {path: path.stat().st_mtime_ns for path in results}
    results[0].unlink()
    assert study.main(tiny) == 0
    changed = [path for path in results if path.stat().st_mtime_ns != written[path]]
    assert changed == [results[0]]


def test_a_cell_of_another_process_is_left_alone(
    study: Any, tiny: list[str], tmp_path: Path
) -> None:
    records = tmp_path / "records"
    cells = study.all_cells(Path("data"), tmp_path / "plans")
    with study.claimed(cells[0], records) as mine:
        assert mine
        assert study.main(tiny) == 0
    states = [study.state(cell, records) for cell in cells]
    assert states[1:] == ["finished"] * 3
    assert not (records / cells[0].name / "result.json").exists()


def test_a_changed_plan_does_not_take_the_old_record_for_its_own(
    study: Any, tiny: list[str], tmp_path: Path
) -> None:
    cell = study.all_cells(Path("data"), tmp_path / "plans")[0]
    folder = tmp_path / "records" / cell.name
    folder.mkdir(parents=True)
    plan = {**cell.plan.to_dict(), "epochs": 2.0}
    (folder / "result.json").write_text(json.dumps({"plan": plan, "finished": True}))
    with pytest.raises(UserError, match=r"epochs 2\.0, the plan says 1\.0"):
        cell.record(tmp_path / "records")


def test_missing_data_are_said_at_once(study: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"MNLI/train\.tsv; give --data"):
        study.main(["--records", str(tmp_path / "records"), "--data", str(tmp_path / "none")])


def test_a_cell_run_once_more_stands_beside_the_interval_it_should_hit(
    study: Any, tiny: list[str], tmp_path: Path
) -> None:
    tables = importlib.import_module("tables")
    again = tmp_path / "again"
    assert study.main(tiny) == 0
    assert study.main([*tiny[:2], "--records", str(again), "--max-seeds", "1"]) == 0
    known = tables.cells_of(tables.read_runs(tables.Store(tmp_path / "records").records()))
    _, _, *rows = tables.again_table(known, again).splitlines()
    assert len(rows) == 2
    for row, cell in zip(rows, known, strict=True):
        fields = [field.strip() for field in row.strip("|").split("|")]
        low, high = cell.interval
        inside = 100 * low - 0.05 <= float(fields[5]) <= 100 * high + 0.05
        assert fields[4] == tables.score(cell)
        assert fields[6] == ("inside" if inside else "outside")


@pytest.mark.slow
@pytest.mark.parametrize("plan", sorted(path.name for path in (STUDY / "records").glob("*/")))
def test_a_record_is_a_plan_file_of_the_same_run(plan: str) -> None:
    record = min((STUDY / "records" / plan).glob("*/result.json"))
    again = make_plan(read_plan_file(record))
    assert again.hash == json.loads(record.read_text())["plan_hash"]


@pytest.mark.slow
def test_the_documents_say_what_the_records_say(study: Any) -> None:
    tables = importlib.import_module("tables")
    made = tables.study_tables(STUDY / "records", STUDY / "report")
    found = set()
    for document in tables.DOCUMENTS:
        text = document.read_text()
        assert tables.filled(text, made) == text, "run benchmarks/study/write_report.py"
        found |= {name for _, name, _ in tables.BLOCK.findall(text)}
    assert found == set(made)
