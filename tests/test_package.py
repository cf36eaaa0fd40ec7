"""The wheel: all that a person needs who has nothing but it, in an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "dpfp_ray", "search_spaces", "docs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, without a checkout beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "out", "."]
    subprocess.run(command, cwd=folder, check=True)
    (wheel,) = (folder / "out").glob("*.whl")
    place = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return place


def run(installed: Path, folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "dpfp_ray.cli", *words]
    ours = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=folder, env=ours, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow
def test_search_spaces_and_the_glossary_are_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "Nominal" in run(installed, tmp_path, "glossary", "nominal")
    place = run_python(installed, tmp_path, "from dpfp_ray.sweeps.space import SPACES")
    assert place.startswith(str(installed))


def run_python(installed: Path, folder: Path, code: str) -> str:
    ours = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", f"{code}; print(SPACES)"]
    return subprocess.run(
        command, cwd=folder, env=ours, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.slow
def test_every_module_is_in_the_wheel(installed: Path) -> None:
    ours = {path.relative_to(ROOT) for path in (ROOT / "dpfp_ray").rglob("*.py")}
    assert ours == {path.relative_to(installed) for path in (installed / "dpfp_ray").rglob("*.py")}


def test_what_the_dockerfile_copies_builds_the_wheel() -> None:
    text = (ROOT / "docs/cluster/Dockerfile").read_text(encoding="utf-8")
    copied = " ".join(line for line in text.splitlines() if line.startswith("COPY"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "dpfp_ray", "search_spaces", "docs"):
        assert name in copied


def test_nothing_in_the_repository_is_a_link() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not [line for line in listed.splitlines() if line.startswith("120000")]
