"""How `make bench` turns times into ratios, and ratios into outcomes."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"speed.{name}")


def test_the_interval_of_a_median_covers_it_as_often_as_it_says(part: Any) -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        times = np.exp(rng.normal(np.log(1.3), 0.2, 15))
        ratio = part("race").ratio_of(times, np.ones(15))
        inside += ratio.low <= 1.3 <= ratio.high
    assert inside >= 0.93 * 400


def test_few_rounds_give_a_wide_interval_and_one_gives_none(part: Any) -> None:
    ratio_of = part("race").ratio_of
    assert not ratio_of([2.0], [1.0]).known
    ratio = ratio_of([2.0, 2.2], [1.0, 1.0])
    assert ratio.low < 1.5 < 2.1 < ratio.high
    assert not ratio.known


def test_a_race_ends_when_its_ratio_is_known_or_its_rounds_are_over(part: Any) -> None:
    race = part("race")
    steady = {"one": lambda number: 2.0, "other": lambda number: 1.0}
    times = race.race(steady, [("one", "other")], race.Limits(rounds=50))
    assert times == {"one": [2.0] * 6, "other": [1.0] * 6}
    unsteady = {**steady, "one": lambda number: 1.0 + number % 2}
    assert len(race.race(unsteady, [("one", "other")], race.Limits(rounds=9))["one"]) == 9


def test_contestants_change_their_order(part: Any) -> None:
    race, order = part("race"), []
    turns = {name: lambda number, name=name: order.append(name) for name in "ab"}
    race.race(turns, [], race.Limits(rounds=3, least=3, warm_up=False))
    assert "".join(order) == "abbaab"


@pytest.mark.parametrize(
    ("goal", "low", "high", "outcome"),
    [
        ("≥ 0.97", 0.98, 1.01, "met"),
        ("≥ 0.97", 0.95, 1.01, "not known"),
        ("≥ 0.97", 0.90, 0.96, "missed"),
        ("≤ 2%", 0.01, 0.015, "met"),
        ("≤ 2%", 0.021, 0.03, "missed"),
        ("≥ 1,000", 900, 900, "missed"),
        ("≥ 100×", 120, 150, "met"),
    ],
)
def test_an_outcome_is_said_if_the_whole_interval_says_it(
    part: Any, goal: str, low: float, high: float, outcome: str
) -> None:
    assert part("bars").verdict(goal, low, high) == outcome


@pytest.mark.slow
def test_a_part_runs_and_tells_its_bars() -> None:
    end = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench.py"), "--quick", "--only", "padding"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert end.returncode == 0, end.stderr[-2000:]
    assert "| tokens that are padding, B = 1,024, DP-SGD by hooks | ≤ 5% |" in end.stdout
