"""The examples run as they are written, in an empty folder, and do what their text says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT, NOTEBOOK = ROOT / "examples" / "quickstart.py", ROOT / "examples" / "story.ipynb"


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


@pytest.mark.nightly
def test_the_notebook_runs_in_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_turn: None
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    outputs = tmp_path / "story.ipynb"
    command = [sys.executable, str(ROOT / "examples/run_notebook.py"), str(NOTEBOOK), str(outputs)]
    subprocess.run(command, check=True, timeout=1800)
    assert outputs_of(outputs).keys() == outputs_of(NOTEBOOK).keys()


def outputs_of(notebook: Path) -> dict[int, str]:
    """The code cells that show something, and what."""
    cells = json.loads(notebook.read_text())["cells"]
    return {at: json.dumps(cell["outputs"]) for at, cell in enumerate(cells) if cell.get("outputs")}


def test_the_notebook_is_committed_with_its_pictures_and_no_path_of_a_machine() -> None:
    text = " ".join(outputs_of(NOTEBOOK).values())
    assert text.count("image/png") >= 3
    assert "refuted" in text
    assert "/tmp" not in text
    assert "Traceback" not in text
