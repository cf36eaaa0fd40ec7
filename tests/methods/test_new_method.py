"""docs/new_method.md: its one file is all that a method needs."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpfp_ray.methods
from dpfp_ray.auditing.audit import Settings, set_up
from dpfp_ray.plan.method_spec import METHODS, all_specs, labels
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import variant
from dpfp_ray.privacy.statement import one_line, render
from dpfp_ray.sweeps.compare import plan_cells, space_name
from dpfp_ray.sweeps.space import read_search_space
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.prepare import prepare
from tests.support.tiny_runs import Listener, audit_with, run_with, tiny_world, write_csv

ROOT = Path(__file__).parents[2]
NAME = "head_sgd"


def block(title: str) -> str:
    """The code block below the page's heading for a file."""
    page = (ROOT / "docs/new_method.md").read_text(encoding="utf-8")
    found = re.search(rf"^## .*`{re.escape(title)}`.*?^```\w+\n(.*?)^```", page, re.S | re.M)
    assert found, title
    return found[1]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(block(f"dpfp_ray/methods/{NAME}.py"), encoding="utf-8")
    monkeypatch.setattr(dpfp_ray.methods, "__path__", [*dpfp_ray.methods.__path__, str(folder)])
    yield
    sys.modules.pop(f"dpfp_ray.methods.{NAME}", None)
    vars(dpfp_ray.methods).pop(NAME, None)


@pytest.fixture
def plan(installed: None, tmp_path: Path) -> Iterator[Plan]:
    train, dev = (write_csv(tmp_path / f"{n}.csv", rows, rows) for n, rows in (("t", 40), ("d", 9)))
    with tiny_world(tmp_path) as model:
        facts: dict[str, Any] = {"model": model, "representation": "mean", "batch_size": 20}
        yield Plan(method=NAME, train_file=train, dev_file=dev, epochs=1, **facts)


def test_without_its_file_there_is_no_such_method() -> None:
    assert NAME not in METHODS
    with pytest.raises(UserError, match="unknown method 'head_sgd'"):
        Plan(method=NAME)


@pytest.mark.usefixtures("installed")
def test_it_is_listed_last_and_labelled() -> None:
    assert METHODS[-1] == NAME
    assert labels()[NAME] == "Head SGD"
    assert list(all_specs())[-1] == NAME


@pytest.mark.usefixtures("installed")
def test_its_plan_has_its_defaults_and_refuses_what_it_does_not_use() -> None:
    plan = Plan(method=NAME, records=1000)
    assert (plan.scope, plan.B, plan.epochs, plan.adjacency) == ("head", 250, 20, "add_remove")
    with pytest.raises(UserError, match="head_sgd freezes the encoder"):
        Plan(method=NAME, scope="all")
    with pytest.raises(UserError, match=r"ridge is 1\.0, but head_sgd does not use it"):
        Plan(method=NAME, ridge=1.0)


@pytest.mark.usefixtures("installed")
def test_compare_knows_it_and_that_it_has_no_variants() -> None:
    assert variant(NAME) == {"method": NAME}
    with pytest.raises(UserError, match="head_sgd has no variants"):
        variant(f"{NAME}:head")
    cells = plan_cells([NAME], [3.0], {"ridge": 1.0, "clip": 2.0}, None)
    assert cells == [{"method": NAME, "clip": 2.0, "epsilon": 3.0}]


@pytest.mark.usefixtures("installed")
def test_its_search_space_is_found_by_its_name_and_makes_plans(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.yaml"
    path.write_text(block(f"search_spaces/{NAME}.yaml"), encoding="utf-8")
    assert space_name({"method": NAME}) == path.stem
    space = read_search_space(path, {})
    chosen = next(space.choices(np.random.default_rng(0)))
    assert Plan(**space.plan_values(chosen)).method == NAME


@pytest.mark.slow
def test_it_trains_on_real_records_and_its_statement_says_proved(plan: Plan) -> None:
    listener = Listener()
    record, _ = run_with(prepare(plan), listener, seed=5)
    assert listener.steps == [1, 2]
    assert record["privacy"]["guarantee"] == record["statement"]["guarantee"] == "proved"
    assert record["privacy"]["epsilon"]["pld"] == pytest.approx(3, abs=0.01)
    assert "Privacy statement for head_sgd, scope head" in render(record["statement"])
    assert one_line(record["statement"]).startswith("proved, ε = 3, add_remove")


@pytest.mark.slow
def test_it_can_be_audited(plan: Plan) -> None:
    audit = set_up(plan, Settings(canaries=16), membership_seed=3)
    record, scores = audit_with(audit, seed=5)
    assert record["audit"]["score"] == "alignment"
    assert np.isfinite(scores).all()


@pytest.mark.usefixtures("installed")
def test_its_own_test_passes() -> None:
    space: dict[str, Any] = {}
    exec(block(f"tests/methods/test_{NAME}.py"), space)
    space["test_the_gradient_is_the_sum_of_each_records_clipped_gradient"]()


def test_reading_the_specs_does_not_import_torch() -> None:
    code = (
        "import sys; from dpfp_ray.plan import Plan; Plan(method='rgp'); sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
