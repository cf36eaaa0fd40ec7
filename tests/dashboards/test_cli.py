"""`dashboards/check.py` as a command: what it prints and how it exits."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dashboards.check import main
from tests.support.ray_runs import PATIENCE, wait_for

needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus here")


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


@needs_prometheus
def test_json_has_every_query(nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
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
