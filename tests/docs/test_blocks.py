"""What the documents say to type is typed: every command, in order, in one folder; their Python.

README's run as they are. Those of the other documents get fewer rows and samples, and what needs a
cluster, a hub or an endless process is left out: `test_links.py` knows that its flags exist.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from dpfp_ray.data.demo import demo_rows

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("tour", "own_data", "user_level", "using_models", "ledger", "auditing", "public_text")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_HERE = re.compile(r"dpfp (serve|submit)|HEAD|://|/shared|--push-to-hub|unzip|plans/CELL|^make ")
ROWS = 600
pytestmark = pytest.mark.nightly


def blocks(document: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(document.read_text(encoding="utf-8"))


def lines_of(block: str) -> list[str]:
    """The commands of a block, each on one line, without comments."""
    lines = [line.partition("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#") and "dpfp" in line]


def smaller(line: str) -> str:
    if re.search(r"dpfp (train|compare|audit)", line) and "--max-train" not in line:
        line += f" --max-train {ROWS} --max-dev 200"
    line = re.sub(r"--canaries \d+", "--canaries 200", line)
    line = re.sub(r"(dpfp sweep \S+)", rf"\1 --set max_train={ROWS} --set max_dev=200", line)
    return re.sub(r"--samples (\d+)", lambda match: f"--samples {int(match[1]) // 8}", line)


def type_in(line: str, folder: Path) -> None:
    words = re.sub(r"(\.venv/bin/)?\bdpfp (?=[a-z])", f"{sys.executable} -m dpfp_ray.cli ", line)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DPFP_LEDGER": str(folder / "ledger")}
    done = subprocess.run(
        words, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}: {done.stderr[-2000:]}"


def reviews(rows: int) -> pandas.DataFrame:
    texts, labels = demo_rows()
    stars = ["good" if label else "bad" for label in labels[:rows]]
    authors = [f"author {row % (rows // 3)}" for row in range(rows)]
    return pandas.DataFrame({"review": list(texts[:rows]), "stars": stars, "author": authors})


def test_every_command_of_the_readme_works_as_written(tmp_path: Path) -> None:
    shown = [text for kind, text in blocks(ROOT / "README.md") if kind == "sh"]
    commands = [line for text in shown for line in lines_of(text)]
    assert len(commands) >= 6
    for line in commands:
        type_in(line, tmp_path)


def test_the_python_of_the_readme_runs_on_a_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = [text for kind, text in blocks(ROOT / "README.md") if kind == "python"]
    exec(code, {"frame": reviews(ROWS)})
    assert (tmp_path / "runs/mine-report/index.html").exists()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_block_of_a_document_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_turn: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPFP_LEDGER", str(tmp_path / "ledger"))
    frame = reviews(ROWS)
    frame.to_csv("reviews.csv", index=False)
    frame.rename(columns={"review": "text", "stars": "label"}).head(20).to_csv(
        "new.csv", index=False
    )
    frame.head(20).to_csv("rows.tsv", sep="\t", index=False, header=False)
    Path("sentences.txt").write_text("\n".join(frame["review"].head(5)) + "\n")
    shared = {
        "frame": frame.rename(columns={"review": "text", "stars": "label"}),
        "texts": list(frame["review"]),
        "labels": list(frame["stars"]),
        "authors": list(frame["author"]),
    }
    typed = 0
    for kind, text in blocks(ROOT / "docs" / f"{name}.md"):
        if kind == "python":
            exec(text.replace("ENCODER", "sentence-transformers/all-MiniLM-L6-v2"), shared)
            typed += 1
        for line in lines_of(text) if kind == "sh" else []:
            if not NOT_HERE.search(line):
                type_in(smaller(line), tmp_path)
                typed += 1
    assert typed
