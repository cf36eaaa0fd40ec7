"""Search spaces: what is drawn from them, what becomes a plan, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray.plan.values import make_plan
from dpfp_ray.sweeps.space import Parameter, SearchSpace, read_search_space
from dpfp_ray.system.errors import UserError
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


SHIPPED = sorted((Path(__file__).parents[2] / "search_spaces").glob("*.yaml"))


GRID = {"method": "grid", "parameters": {"batch_size": {"values": [16, 32]}}}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"parametres": {}}, ["unknown key 'parametres'", "did you mean 'parameters'?"]),
        ({"method": "bayes"}, ["unknown method 'bayes'", "grid, random, tpe"]),
        ({"method": "grid"}, ["a grid needs values for learning_rate", "method: random"]),
        ({"scheduler": "ahsa"}, ["unknown scheduler 'ahsa'", "did you mean 'asha'?"]),
        ({"name": "a\ud83d"}, ["name is", "can be printed"]),
        ({"samples": 0}, ["samples is 0", "1 or more"]),
        ({"samples": 2.5}, ["samples is 2.5", "whole number"]),
        ({"method": "tpe", "seeds": 2}, ["seeds", "grid or random"]),
        ({"metric": "acuracy"}, ["unknown metric 'acuracy'", "did you mean 'accuracy'?"]),
        ({"metric": {"name": "accuracy", "goal": "up"}}, ["unknown goal 'up'"]),
        ({"metric": {"nome": "accuracy"}}, ["metric must be {name: accuracy, goal: maximize}"]),
        ({"metric": ["accuracy", "train_seconds"]}, ["two metrics need method: tpe"]),
        (
            {"metric": ["accuracy", "train_seconds"], "method": "tpe", "scheduler": "asha"},
            ["scheduler: none"],
        ),
        ({"metric": ["accuracy", "accuracy"], "method": "tpe"}, ["accuracy", "twice"]),
        ({"metric": ["accuracy"] * 3, "method": "tpe"}, ["one metric, or two"]),
        ({"metric": []}, ["one metric, or two"]),
        ({"parameters": None}, ["parameters must name at least one field"]),
        ({"parameters": {"learning_rat": {"values": [1]}}}, ["did you mean 'learning_rate'?"]),
        ({"parameters": {"lr": 3}}, ["learning_rate: give {values: […]}"]),
        ({"parameters": {"lr": {"values": []}}}, ["at least one value"]),
        ({"parameters": {"lr": {"values": [1], "min": 0}}}, ["stand alone"]),
        ({"parameters": {"lr": {"distribution": "normal", "min": 0, "max": 1}}}, ["'normal'"]),
        ({"parameters": {"lr": {"min": 2, "max": 1}}}, ["min 2 must be below max 1"]),
        ({"parameters": {"lr": {"min": 1}}}, ["uniform needs numbers min and max"]),
        ({"parameters": {"lr": {"min": 0, "max": float("inf")}}}, ["finite"]),
        ({"parameters": {"lr": {"min": 0, "max": 1, "step": 1}}}, ["unknown key 'step'"]),
        (
            {"parameters": {"lr": {"distribution": "log_uniform", "min": 0, "max": 1}}},
            ["log_uniform needs a min above 0"],
        ),
        (
            {"parameters": {"B": {"distribution": "power_of_two", "min": 3, "max": 8}}},
            ["power_of_two needs powers of 2"],
        ),
        (
            {"parameters": {"B": {"distribution": "int_uniform", "min": 1.5, "max": 8}}},
            ["int_uniform needs whole numbers"],
        ),
        ({"samples": 10**9}, ["1,000,000,000 trials", "at most 100,000"]),
        ({"seeds": 10**5}, ["trials; at most 100,000"]),
        (
            {"parameters": {"lr": {"values": [{"lr": 1e-3}, 1e-2]}}},
            ["learning_rate: values must be mappings, all of them or none"],
        ),
        (
            {"parameters": {"rows_per_micro_batch": {"values": ["x"]}}},
            ["rows_per_micro_batch is 'x'", "whole number"],
        ),
        (
            {"parameters": {"rows_per_micro_batch": {"values": [0]}}},
            ["rows_per_micro_batch is 0", "whole number"],
        ),
        ({"plan": {"lr": 1e-3}}, ["learning_rate is both fixed and varied"]),
        (
            {"parameters": {"epsilon": {"values": [1, 3]}}},
            ["epsilon is both fixed and varied"],
        ),
        (
            {
                "plan": {"micro_batches": 2},
                "parameters": {"rows_per_micro_batch": {"values": [1]}},
            },
            ["micro_batches is both fixed and varied", "rows_per_micro_batch"],
        ),
        ({"parameters": {"lr": {"values": [1]}, "learning_rate": {"values": [1]}}}, ["twice"]),
        ({"plan": [1]}, ["plan must be a mapping"]),
        ({"plan": {"taks": "demo"}}, ["plan", "did you mean 'task'?"]),
        ({"plan": {"method": "dpfd"}}, ["unknown method 'dpfd'", "did you mean 'dpfp'?"]),
        ({"budget": {"batch_size": 3}}, ["budget: unknown key 'batch_size'"]),
        ({"budget": {"epsilon": -1}}, ["epsilon is -1"]),
        ({"budget": {"epsilon": 3}, "plan": {"epsilon": 4}}, ["epsilon", "plan and budget"]),
    ],
)
def test_each_mistake_is_one_clear_line(
    tmp_path: Path, keys: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, **keys)
    message = str(caught.value)
    assert "\n" not in message
    assert "space.yaml" in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lerning_rate": "1"}, ["--set lerning_rate", "did you mean 'learning_rate'?"]),
        ({"samples": "none"}, ["samples is 'none'"]),
        ({"parameters": "1"}, ["--set parameters"]),
    ],
)
def test_mistakes_on_the_command_line(
    tmp_path: Path, change: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, change)
    assert all(word in str(caught.value) for word in words), caught.value


def test_set_fixes_a_varied_field(tmp_path: Path) -> None:
    space = read(tmp_path, {"batch_size": "64", "samples": "7"}, **GRID, metric="accuracy")
    assert space.parameters == ()
    assert space.samples == 7
    assert [make_plan(space.plan_values(c)).batch_size for c in choices(space)] == [64]


def test_set_method_is_the_plans_and_search_the_spaces(tmp_path: Path) -> None:
    space = read(tmp_path, {"method": "dpsgd", "search": "tpe"})
    assert space.search == "tpe"
    assert space.fixed["method"] == "dpsgd"


def test_two_metrics(tmp_path: Path) -> None:
    space = read(tmp_path, method="tpe", metric=["accuracy", {"name": "train_seconds"}])
    assert space.metrics == (("accuracy", "max"), ("train_seconds", "min"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_spaces_say_what_they_answer_and_cost(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# Answers:")
    assert "# Costs:" in text


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_spaces_make_valid_plans(path: Path) -> None:
    space = read_search_space(path, {})
    for chosen in list(choices(space))[:200]:
        plan = make_plan(space.plan_values(chosen)).bind(records=67_349, representation="mean")
        assert plan.steps > 0
        assert plan.accountant == space.fixed.get("accountant", "pld")
    assert set(space.varied) <= set(plan.to_dict())


def test_main_table_has_28_cells() -> None:
    path = next(path for path in SHIPPED if path.stem == "table_main")
    space = read_search_space(path, {})
    plans = [make_plan(space.plan_values(chosen)) for chosen in choices(space)]
    cells = {(p.task, p.method, p.epsilon) for p in plans}
    assert len(plans) == len(cells) == 28
    assert {p.task for p in plans} == {"mnli", "qqp", "qnli", "sst2"}
