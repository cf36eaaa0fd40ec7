"""docs/new_contestant.md: its one file is all that another library needs."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dpfp_ray.methods
from dpfp_ray.auditing.referee import check, faults
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.statement import first_line
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.prepare import prepare
from tests.support import faulty
from tests.support.tiny_runs import Killed, Listener, run_with, tiny_world, write_csv

PAGE = Path(__file__).parents[2] / "docs/new_contestant.md"
NAME = "numpy_sgd"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert found
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(found[1], encoding="utf-8")
    monkeypatch.setattr(dpfp_ray.methods, "__path__", [*dpfp_ray.methods.__path__, str(folder)])
    yield
    sys.modules.pop(f"dpfp_ray.methods.{NAME}", None)
    vars(dpfp_ray.methods).pop(NAME, None)


@pytest.fixture
def plan(installed: None, tmp_path: Path) -> Iterator[Plan]:
    train, dev = (write_csv(tmp_path / f"{n}.csv", rows, rows) for n, rows in (("t", 40), ("d", 9)))
    with tiny_world(tmp_path) as model:
        facts: dict[str, Any] = {"model": model, "representation": "mean", "batch_size": 10}
        yield Plan(method=NAME, train_file=train, dev_file=dev, epochs=2, **facts)


@pytest.mark.usefixtures("installed")
def test_the_referee_finds_no_fault_in_the_page() -> None:
    assert faults(check(NAME)) == []


def test_a_run_is_recorded_with_what_is_claimed(plan: Plan) -> None:
    record, _ = run_with(prepare(plan), seed=3)
    assert record["privacy"]["guarantee"] == "claimed"
    assert record["privacy"]["claim"]["library"] == "numpy"
    assert first_line(record["statement"]).startswith("CLAIMED, not proved: ε = 3")


def test_a_run_that_cannot_be_continued_is_refused_in_words(plan: Plan) -> None:
    listener = Listener(kill_after=3)
    with pytest.raises(Killed):
        run_with(prepare(plan), listener, seed=3)
    with pytest.raises(UserError, match="cannot continue an unfinished run"):
        run_with(prepare(plan), seed=3, state=listener.state())


def test_the_page_says_how_many_faults_the_referee_finds() -> None:
    assert f"the {len(faulty.FAULTY)} faults" in PAGE.read_text(encoding="utf-8").replace("\n", " ")
