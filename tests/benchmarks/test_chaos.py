"""A few faults of `train`, by the program that does hundreds; and that it notices a loss."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("disturb.works")


@pytest.mark.slow
def test_nothing_is_lost_in_a_few_faults_of_train() -> None:
    end = subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "chaos.py"), "--verbs", "train", "--json"),
            *("--faults", "4", "--seed", "3", "--minutes", "9", "--unseeded", "0"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert end.returncode == 0, end.stderr[-3000:]
    done = json.loads(end.stdout)
    assert len(done) >= 4
    assert [fault["lost"] for fault in done] == [[]] * len(done)


def test_every_difference_of_two_ends_is_told(works: Any, tmp_path: Path) -> None:
    for name, score, weight in (("a", 0.5, b"x"), ("b", 0.25, b"y")):
        (tmp_path / name).mkdir()
        record = {"metrics": {"accuracy": score}, "cost": {"train_seconds": score}}
        (tmp_path / name / "result.json").write_text(json.dumps(record))
        (tmp_path / name / "weights.safetensors").write_bytes(weight)
    (tmp_path / "a" / ".scratch").touch()
    one, other = (works.essence(tmp_path / name, seed_known=True) for name in "ab")
    assert works.differences(one, one) == []
    found = works.differences(one, other)
    assert [line.split(":")[0] for line in found] == [
        "/.scratch is left over",
        "/result.json/metrics/accuracy",
        "/weights.safetensors",
    ]
