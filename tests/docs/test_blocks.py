"""What README says to type is typed: every command, in order, in an empty folder; its Python."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from dpfp_ray.data.demo import demo_rows

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.nightly


def blocks(kind: str) -> list[str]:
    return [text for name, text in BLOCK.findall(README) if name == kind]


def test_every_command_of_the_readme_works_as_written(tmp_path: Path) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    typed = [line.partition("  #")[0].strip() for line in lines if line.startswith(".venv/bin/")]
    assert len(typed) >= 6
    ours = {**os.environ, "PYTHONPATH": str(ROOT), "DPFP_LEDGER": str(tmp_path / "ledger")}
    for command in typed:
        words = command.replace(".venv/bin/dpfp", f"{sys.executable} -m dpfp_ray.cli")
        done = subprocess.run(
            words, shell=True, cwd=tmp_path, env=ours, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"


def test_the_python_of_the_readme_runs_on_a_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    monkeypatch.chdir(tmp_path)
    texts, labels = demo_rows()
    stars = ["good" if label else "bad" for label in labels[:600]]
    (code,) = blocks("python")
    exec(code, {"frame": pandas.DataFrame({"review": list(texts[:600]), "stars": stars})})
    assert (tmp_path / "runs/mine-report/index.html").exists()
