"""The dashboard's queries, asked of a real Prometheus that watches a real sweep."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dashboards.check import (
    DASHBOARD,
    Prometheus,
    Query,
    check,
    main,
    private_prometheus,
    read_queries,
)
from dpfp_ray.sweeps.progress import GAUGES, TRIAL_TAGS
from dpfp_ray.system.errors import UserError
from tests.support.ray_runs import PATIENCE, run_script, wait_for, write_space

needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus here")
# Tags that Ray adds by itself; all are bounded by the number of processes and nodes.
RAYS_OWN = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId", "JobId"}


@pytest.fixture(scope="module")
def seen(
    ray_turn: None, tmp_path_factory: pytest.TempPathFactory, tiny_task: dict[str, Any]
) -> dict[str, Any]:
    """What `dpfp dashboard check` and Ray's metrics page say during a small sweep."""
    folder = tmp_path_factory.mktemp("metrics")
    # The ledger's filter knows no ε for mode paper at these settings: a total would refuse it.
    task = {k: v for k, v in tiny_task.items() if k != "micro_batches"}
    task |= {"method": "dpsgd", "epsilon": 3.0, "accountant": "pld"}
    rates = {"learning_rate": {"values": [1e-3, 3e-3]}}
    space = write_space(folder / "space.yaml", task, method="grid", parameters=rates)
    words = ("metrics_session", str(folder), str(space))
    return dict(run_script(*words, patience=3 * PATIENCE))


@needs_prometheus
def test_every_query_finds_data_during_a_sweep(seen: dict[str, Any]) -> None:
    empty = [answer for answer in seen["answers"] if not answer["series"]]
    assert (seen["code"], empty) == (0, [])


@needs_prometheus
def test_prometheus_gets_our_tags_and_none_that_grow(seen: dict[str, Any]) -> None:
    trials = [line for line in seen["exported"] if "trial=" in line]
    tags = {part.split("=")[0] for part in trials[0].partition("{")[2].split('",')}
    ours = {tag for tag in tags if tag not in RAYS_OWN and not tag.startswith("otel_")}
    assert set(TRIAL_TAGS) <= ours <= {*TRIAL_TAGS, "accountant"}


@pytest.fixture(scope="module")
def empty_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    nodes = tmp_path_factory.mktemp("nodes") / "nodes.json"
    nodes.write_text("[]")
    with private_prometheus(str(nodes)) as prometheus:
        yield prometheus


@needs_prometheus
def test_a_wrong_expression_is_said_to_be_wrong_at_once(empty_prometheus: Prometheus) -> None:
    (answer,) = check(empty_prometheus, [Query("panel", "sum by (", True)], wait=600)
    assert "parse error" in answer.error


def test_every_gauge_is_on_the_dashboard_and_no_variable_of_grafana_is_left() -> None:
    expressions = " ".join(q.expression for q in read_queries(json.loads(DASHBOARD.read_text())))
    assert [name for name in GAUGES if f"ray_{name}" not in expressions] == []
    assert "$" not in expressions


def test_a_machine_without_ray_is_told_what_to_do(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"start a sweep|is not installed"),
        private_prometheus(str(tmp_path / "none.json")),
    ):
        pass


@pytest.mark.parametrize("url", ["localhost:9090", "file:///etc/passwd"])
def test_only_http_addresses_are_asked(url: str) -> None:
    with pytest.raises(UserError, match="give one like http"):
        Prometheus(url)


@pytest.fixture
def nobody(tmp_path: Path) -> str:
    """A discovery file of a session without nodes."""
    (tmp_path / "nodes.json").write_text("[]")
    return str(tmp_path / "nodes.json")


@pytest.mark.slow
@needs_prometheus
def test_without_data_it_lists_the_queries_and_exits_with_1(
    nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--discovery", nobody, "--wait", "0"]) == 1
    output = capsys.readouterr()
    assert "failed trials: NO DATA" in output.out
    assert "check during a sweep" in output.err
    assert main(["--discovery", nobody, "--wait", "0", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 15
    assert {row["series"] for row in rows} == {0}


@needs_prometheus
def test_a_polite_kill_leaves_no_prometheus_behind(nobody: str) -> None:
    command = [sys.executable, "-m", "dashboards.check", "--discovery", nobody]
    with subprocess.Popen([*command, "--wait", "600"], stderr=subprocess.DEVNULL) as process:
        tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        child = int(wait_for(tasks.read_text, "Prometheus to start").split()[0])
        process.terminate()
        assert process.wait(PATIENCE) == 130
    assert not Path(f"/proc/{child}").exists()


def test_a_wrong_address_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prometheus", "http://127.0.0.1:9"]) == 2
    assert "no Prometheus answers" in capsys.readouterr().err
