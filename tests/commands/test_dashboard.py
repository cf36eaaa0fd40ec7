"""`dpfp dashboard check`: what it prints and how it exits."""

import json
import shutil
from pathlib import Path

import pytest

from dpfp_ray.cli import main

needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus here")


@pytest.fixture
def nobody(tmp_path: Path) -> str:
    """A discovery file of a session without nodes."""
    (tmp_path / "nodes.json").write_text("[]")
    return str(tmp_path / "nodes.json")


@needs_prometheus
def test_without_data_it_lists_the_queries_and_exits_with_1(
    nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", "check", "--discovery", nobody, "--wait", "0"]) == 1
    output = capsys.readouterr()
    assert "failed trials: NO DATA" in output.out
    assert "check during a sweep" in output.err


@needs_prometheus
def test_json_has_every_query(nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "check", "--discovery", nobody, "--wait", "0", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 15
    assert {row["series"] for row in rows} == {0}


def test_a_wrong_address_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "check", "--prometheus", "http://127.0.0.1:9"]) == 2
    assert "no Prometheus answers" in capsys.readouterr().err
