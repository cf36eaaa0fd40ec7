"""One version, stated once; what a release publishes about itself is complete."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

import dpfp_ray

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_package_has_the_version_of_pyproject() -> None:
    assert dpfp_ray.__version__ == VERSION


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", VERSION]


def test_no_other_file_of_the_package_states_the_version() -> None:
    sources = [*(ROOT / "dpfp_ray").rglob("*.py"), ROOT / "CITATION.cff"]
    stating = re.compile(
        rf"^(__version__|version)\s*[:=]\s*[\"']?{re.escape(VERSION)}", re.MULTILINE
    )
    assert [path for path in sources if stating.search(path.read_text())] == []


def test_hooks_call_the_tools_of_make_lint() -> None:
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    of_make = set(re.findall(r"\$\(BIN\)/([\w-]+)", lint))
    hooks = read_yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert {hook["entry"].split()[0] for hook in hooks} == {f".venv/bin/{tool}" for tool in of_make}


def test_the_workflow_runs_what_developers_run() -> None:
    steps = read_yaml(".github/workflows/ci.yml")["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
