"""The price of a sweep: what cannot run is known, times add up over slots, and ε as it will be."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.data.tasks import load_task
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.sweeps import price as prices
from dpfp_ray.sweeps.cluster import Resources
from dpfp_ray.sweeps.price import Price, minutes, price, wall_seconds
from dpfp_ray.training.forecast import Rates

TWO = Resources(cpus_per_worker=1, gpus_per_worker=0.0, workers=1, slots=2)


RAY = prices.RAY_SECONDS
DATA = ("train_file", "dev_file", "model", "max_length")


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one second and a hundredth for each row; what is measured has tests of its own."""
    known = Rates(step=1.0, row=0.01, dev_row=0.0, encode_row=0.0, memory=2**30, state=2**20)
    monkeypatch.setattr(prices, "rates", lambda *_: known)


def plans(task: dict[str, Any], **fields: Any) -> list[Any]:
    data = {name: value for name, value in task.items() if name in DATA}
    return [make_plan({**data, "method": "dpsgd", "epsilon": 3, "epochs": 2, **fields})]


def test_trials_run_side_by_side() -> None:
    slow, quick = wall_seconds([10.0, 1.0, 1.0], 2, 3, searched=False), RAY + 10
    assert slow == (quick, quick)
    low, high = wall_seconds([1.0, 2.0, 3.0, 4.0], 2, 8, searched=True)
    assert RAY + 4 < low < high < RAY + 16


def test_what_cannot_run_is_said_with_its_reason(tiny_task: dict[str, Any], ledger: Ledger) -> None:
    good, bad = plans(tiny_task, batch_size=16), plans(tiny_task, batch_size=100_000)
    made = price([*good, *bad], load_task(good[0]), TWO, ledger)
    assert (made.trials, sum(made.impossible.values()), made.looked_at) == (2, 1, 2)
    assert any(line.startswith("1 of 2 settings cannot run: ") for line in made.lines)


def test_time_follows_steps_and_rows(tiny_task: dict[str, Any], ledger: Ledger) -> None:
    (plan,) = plans(tiny_task, batch_size=16)
    task = load_task(plan)
    once = price([plan], task, TWO, ledger).seconds[0] - RAY
    bound = plan.bind(records=task.train.units, representation="mean")
    assert once == pytest.approx(bound.steps * 1.16 + prices.TRIAL_SECONDS)
    four = price([plan], task, TWO, ledger, seeds=4).seconds[0] - RAY
    assert four == pytest.approx(2 * once)


def test_the_ledger_is_asked_and_nothing_is_written(
    tiny_task: dict[str, Any], ledger: Ledger
) -> None:
    (plan,) = plans(tiny_task, batch_size=16)
    made = price([plan], load_task(plan), TWO, ledger)
    assert made.before is None
    assert made.after is not None
    assert made.after.epsilon == pytest.approx(3, rel=0.01)
    assert not ledger.exists()
    twice = price([plan], load_task(plan), TWO, ledger, seeds=2)
    assert twice.after is not None
    assert twice.after.epsilon > 1.2 * made.after.epsilon


def test_lines_give_a_range_where_a_searcher_decides() -> None:
    made = Price(16, 2, Counter(), 16, (60.0, 300.0), 120.0, 2**30, 5 * 2**20, None, None)
    assert made.lines[0] == (
        "16 trials, 2 at a time: about 60 s to 5.0 min on this machine; before it 2.0 min of "
        "encoding, unless a cache has it"
    )
    assert minutes(7200) == "2.0 h"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def test_of_a_large_grid_settings_are_taken_evenly(
    tiny_task: dict[str, Any], ledger: Ledger
) -> None:
    grid = [plans(tiny_task, batch_size=16, epochs=1 + n // 50)[0] for n in range(100)]
    made = price(grid, load_task(grid[0]), TWO, ledger)
    assert made.trials == 100
    assert made.looked_at <= prices.MOST_CALIBRATED
    low, high = made.seconds
    assert high > 1.5 * low, "both halves of the grid were looked at"
