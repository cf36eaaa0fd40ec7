"""The fuzzer finds what is wrong, makes it small, and finds nothing in a few cases of ours."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"fuzzing.{name}")


@pytest.mark.slow
def test_a_few_cases_of_every_kind_end_well() -> None:
    end = subprocess.run(
        [sys.executable, str(BENCHMARKS / "fuzz.py"), "--cases", "12", "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert end.returncode == 0, end.stdout + end.stderr[-2000:]
    assert "12 cases, no ways to fail" in end.stdout


def test_the_smallest_input_is_found(part: Any) -> None:
    minimise = part("minimise").minimise
    assert minimise(b"many bytes, one of them X, and more", lambda left: b"X" in left) == b"X"
    words = ("--a=1", "--b=long word", "--c")
    assert minimise(words, lambda left: any("w" in word for word in left)) == ("w",)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (lambda folder: None, ""),
        (lambda folder: {}["gone"], "traceback"),
        (lambda folder: (folder / f".x.{'0' * 32}").touch(), "half-written"),
        (lambda folder: "believed: it", "believed"),
    ],
    ids=["good", "traceback", "half-written", "its own"],
)
def test_what_is_wrong_is_noticed(part: Any, case: Any, kind: str) -> None:
    assert part("judge").run_case(case, ())[0] == kind


def test_a_file_elsewhere_is_noticed(part: Any, tmp_path: Path) -> None:
    kind, details, _ = part("judge").run_case(lambda folder: (tmp_path / "x").touch(), ())
    assert (kind, details) == ("outside", str(tmp_path / "x"))


def test_a_hang_is_noticed(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = part("judge")
    monkeypatch.setattr(judge, "HANG", 0.2)

    def busy(folder: Path) -> None:
        while True:
            os.getpid()

    assert judge.run_case(busy, ())[0] == "hang"
