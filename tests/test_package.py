"""The wheel: all that a person needs who has nothing but it, in an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docs/cluster/Dockerfile"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the paths that the Dockerfile copies, and from no others."""
    folder = tmp_path_factory.mktemp("wheel")
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE):
        for name in line.split()[:-1]:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "out", "."]
    subprocess.run(command, cwd=folder, check=True)
    (built,) = (folder / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, without a checkout beside it."""
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


@pytest.mark.nightly
def test_the_wheel_alone_in_a_new_environment_runs_the_demo(wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        [sys.executable, "-m", "venv", str(tmp_path / "venv")],
        [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel],
        [tmp_path / "venv/bin/dpfp", "demo", "--samples", "3", "--seeds", "1"],
    ):
        subprocess.run([str(word) for word in command], cwd=tmp_path, env=ours, check=True)
    assert (tmp_path / "runs/demo/report/index.html").exists()
    # What sweeps do not need is an extra, and says so.
    for words in (["serve"], ["results", "s3://bucket/runs"]):
        command = [str(tmp_path / "venv/bin/dpfp"), *words]
        done = subprocess.run(command, cwd=tmp_path, env=ours, capture_output=True, text=True)
        assert (done.returncode, "pip install 'dpfp-ray[" in done.stderr) == (2, True), done.stderr


def test_the_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    subprocess.run([str(hadolint), "--failure-threshold", "warning", str(DOCKERFILE)], check=True)


def test_nothing_in_the_repository_is_a_link() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not [line for line in listed.splitlines() if line.startswith("120000")]
