"""The best setting of a sweep is one command, or one keyword, away."""

from pathlib import Path
from typing import Any

import pytest

from dpfp_ray import best_plan
from dpfp_ray.cli.options import plan_values
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.compare import with_best
from dpfp_ray.sweeps.space import read_search_space
from dpfp_ray.sweeps.sweep import settle_space
from dpfp_ray.system.errors import UserError
from tests.support.samples import sample


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for rate, accuracy in ((1e-4, 0.7), (1e-3, 0.8), (1e-2, 0.6)):
        record: Any = sample(f"t{rate}", sweep="s", learning_rate=rate, accuracy=accuracy)
        Store(tmp_path / "sweep").put(record)
    return tmp_path / "sweep"


def test_the_best_plan_is_that_of_the_highest_accuracy(store: Path) -> None:
    plan = best_plan(store)
    assert (plan.learning_rate, plan.method, plan.epsilon) == (1e-3, "dpfp", 3)


def test_a_comparison_gives_its_method_the_settings_of_the_best_trial(store: Path) -> None:
    """Also those that no trial varied: an M without its B may be no plan."""
    (method, settings), *others = with_best(None, [store]).items()
    assert (method, others) == ("dpfp", [])
    assert settings["learning_rate"] == 1e-3
    assert settings["micro_batches"] <= settings["batch_size"]
    assert not set(settings) & {"epsilon", "task", "method", "train_file"}
    own = {"dpfp": {"learning_rate": 1.0}}
    assert with_best(own, [store]) == own, "what the caller sets wins"


def test_flags_win_over_the_best_setting(store: Path) -> None:
    import argparse

    arguments = argparse.Namespace(plan=None, best=str(store), epochs="7")
    values = plan_values(arguments)
    assert values["learning_rate"] == 1e-3
    assert values["epochs"] == "7"
    with pytest.raises(UserError, match="--best and --plan are both given"):
        plan_values(argparse.Namespace(plan="search_spaces/demo.yaml", best=str(store)))


def test_a_space_from_python_needs_no_file_and_a_file_no_plan() -> None:
    space = settle_space({"clip": [1.0, 2.0]}, {"method": "dpsgd"}, {"name": "mine"}, "grid", None)
    assert (space.name, space.search, space.trials) == ("mine", "grid", 2)
    with pytest.raises(UserError, match="plan= goes with parameters in Python"):
        settle_space("demo", {"method": "dpsgd"}, None, None, None)
    larger = settle_space(read_search_space("demo", {}), None, None, None, 64)
    assert larger.samples == 64
