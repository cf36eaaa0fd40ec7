from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray.plan.values import make_plan
from dpfp_ray.sweeps.space import Parameter, SearchSpace
from tests.support.search_spaces import read


def test_grid_is_the_whole_product(tmp_path: Path) -> None:
    parameters = {"B": {"values": [16, 32]}, "lr": {"values": ["1e-4", 1e-3, 1e-2]}}
    space = read(tmp_path, method="grid", parameters=parameters)
    plans = [make_plan(space.plan_values(c)) for c in choices(space)]
    assert len({plan.hash for plan in plans}) == 6
    assert {plan.learning_rate for plan in plans} == {1e-4, 1e-3, 1e-2}


def test_random_draws_are_within_and_repeatable(tmp_path: Path) -> None:
    parameters = {
        "B": {"distribution": "power_of_two", "min": 16, "max": 64},
        "lr": {"distribution": "log_uniform", "min": 1e-5, "max": 1e-3},
        "clip": {"distribution": "uniform", "min": 0.5, "max": 2},
        "epochs": {"distribution": "int_uniform", "min": 1, "max": 3},
    }
    space = read(tmp_path, parameters=parameters, samples=200)
    drawn = choices(space)
    assert drawn == choices(space)
    assert {c["batch_size"] for c in drawn} == {16, 32, 64}
    assert {c["epochs"] for c in drawn} == {1, 2, 3}
    rates = [c["learning_rate"] for c in drawn]
    assert 1e-5 <= min(rates) < 3e-5
    assert 3e-4 < max(rates) <= 1e-3
    assert all(0.5 <= c["clip"] <= 2 for c in drawn)


def test_settings_that_belong_together(tmp_path: Path) -> None:
    values = [{"method": "non_private"}, {"method": "dpfp", "lr": 1e-3}]
    space = read(tmp_path, method="grid", plan={}, parameters={"setting": {"values": values}})
    plans = [make_plan(space.plan_values(c)) for c in choices(space)]
    assert [plan.method for plan in plans] == ["non_private", "dpfp"]
    assert [plan.epsilon for plan in plans] == [None, 3]
    assert space.varied == ["method", "learning_rate"]


def test_micro_batches_follow_from_rows_so_that_every_trial_is_valid(tmp_path: Path) -> None:
    parameters = {
        "B": {"distribution": "int_uniform", "min": 1, "max": 40},
        "rows_per_micro_batch": {"distribution": "power_of_two", "min": 1, "max": 64},
    }
    space = read(tmp_path, parameters=parameters, samples=300)
    for chosen in choices(space):
        plan = make_plan(space.plan_values(chosen))
        assert max(1, plan.B // chosen["rows_per_micro_batch"]) == plan.M
    assert space.varied == ["batch_size", "micro_batches"]


def test_rows_per_micro_batch_of_another_method_are_ignored(tmp_path: Path) -> None:
    parameters = {"rows_per_micro_batch": {"values": [4]}}
    space = read(tmp_path, plan={"method": "dpsgd", "B": 64}, parameters=parameters)
    assert make_plan(space.plan_values({"rows_per_micro_batch": 4})).M == 1


@pytest.mark.parametrize(
    "parameter",
    [
        Parameter("clip", values=(0.5, {"lr": 1})),
        Parameter("lr", distribution="log_uniform", low=1e-5, high=1e-3),
        Parameter("clip", distribution="uniform", low=0, high=1),
        Parameter("epochs", distribution="int_uniform", low=1, high=3),
        Parameter("B", distribution="power_of_two", low=8, high=64),
    ],
)
def test_what_optuna_suggests_becomes_a_value(parameter: Parameter) -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(30):
        value = parameter.from_optuna(study.ask(dict([parameter.for_optuna()])).params)
        assert value in parameter.values if parameter.values else True
        assert parameter.values or parameter.low <= value <= parameter.high
        assert parameter.name != "B" or value in (8, 16, 32, 64)


def test_key_does_not_depend_on_the_number_of_samples(tmp_path: Path) -> None:
    assert read(tmp_path, samples=3).key == read(tmp_path, samples=9).key
    assert read(tmp_path, budget={"epsilon": 4}).key != read(tmp_path).key


def choices(space: SearchSpace) -> list[dict[str, Any]]:
    return list(space.choices(np.random.default_rng(1)))
