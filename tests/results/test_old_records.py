"""Records that the code of version 0.1.0 wrote still load, keep their hash and are reported."""

import json
from pathlib import Path

import pytest

from dpfp_ray import load_results, report
from dpfp_ray.plan.values import make_plan

OLD = Path(__file__).parents[1] / "support" / "records_0.1.0"
NAMES = sorted(path.parent.name for path in OLD.glob("*/result.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_keeps_its_hash(name: str) -> None:
    record = json.loads((OLD / name / "result.json").read_text())
    assert make_plan(record["plan"]).hash == record["plan_hash"]


def test_all_of_them_are_rows() -> None:
    rows = load_results(OLD).set_index("plan_hash")
    assert len(rows) == len(NAMES) == 7
    assert set(rows["status"]) == {"finished"}
    assert rows["accuracy"].notna().all()
    guarantees = rows.groupby(rows["method"] + " " + rows["mode"].fillna(""))["guarantee"]
    assert {name: set(found) for name, found in guarantees} == {
        "dpfp moments": {"proved"},
        "dpfp paper": {"nominal"},
        "dpfp release_once": {"proved"},
        "dpsgd ": {"nominal"},
        "non_private ": {"none"},
        "rgp ": {"nominal"},
    }
    assert list(rows["verdict"].dropna()) == ["consistent"]


@pytest.mark.slow
def test_they_make_a_report(tmp_path: Path) -> None:
    made = report(OLD, output=tmp_path)
    assert "0.1.0" not in made.headline
    assert "2 comparisons" in made.headline
