"""The examples run as they are written, in an empty folder, and do what their text says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT, NOTEBOOK = ROOT / "examples" / "quickstart.py", ROOT / "examples" / "quickstart.ipynb"


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_script_prints_noise_accuracy_statement_and_table(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    first, second, *rest = ran.stdout.splitlines()
    assert first.startswith("σ = ")
    assert second.startswith("accuracy 0.")
    assert second.endswith(" at ε = 3.00")
    assert "proved" in rest[-1]
    assert (tmp_path / "runs/quickstart/result.json").is_file()


@pytest.mark.slow
def test_the_notebook_trains_once_for_each_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for number, cell in enumerate(code_cells(NOTEBOOK), start=1):
        exec(compile(cell, f"{NOTEBOOK.name}, code cell {number}", "exec"), names)
    assert list(names["results"]["epsilon"]) == [1, 3, 8]
    assert all(names["results"]["guarantee"] == "proved")
    assert names["results"]["accuracy"].iloc[-1] > 0.5


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.parametrize("lines", [SCRIPT.read_text(), "\n".join(code_cells(NOTEBOOK))])
def test_an_example_is_short(lines: str) -> None:
    assert len([line for line in lines.splitlines() if line.strip()]) <= 20
