"""Search spaces: what is drawn from them, what becomes a plan, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.sweeps.space import (
    Parameter,
    SearchSpace,
    log_uniform,
    power_of_two,
    read_search_space,
    shipped_spaces,
    space_of,
)
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


GRID = {"method": "grid", "parameters": {"batch_size": {"values": [16, 32]}}}


def rate(**spec: Any) -> dict[str, Any]:
    return {"parameters": {"lr": spec}}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"parametres": {}}, "unknown key 'parametres'; did you mean 'parameters'?"),
        ({"method": "bayes"}, "unknown method 'bayes'"),
        ({"method": "grid"}, "a grid needs values for learning_rate"),
        ({"scheduler": "ahsa"}, "did you mean 'asha'?"),
        ({"name": "a\ud83d"}, "can be printed"),
        ({"samples": 0}, "samples is 0; give a whole number of 1 or more"),
        ({"samples": 2.5}, "samples is 2.5"),
        ({"method": "tpe", "seeds": 2}, "seeds repeat the trials of method grid or random"),
        ({"metric": "acuracy"}, "did you mean 'accuracy'?"),
        ({"metric": {"name": "accuracy", "goal": "up"}}, "unknown goal 'up'"),
        ({"metric": {"nome": "accuracy"}}, "metric must be {name: accuracy, goal: maximize}"),
        ({"metric": ["accuracy", "train_seconds"]}, "several metrics need method: tpe"),
        ({"metric": ["accuracy", "accuracy"], "method": "tpe"}, "accuracy is given twice"),
        ({"metric": []}, "give one metric or several"),
        ({"parameters": None}, "parameters must name at least one field"),
        ({"parameters": {"learning_rat": {"values": [1]}}}, "did you mean 'learning_rate'?"),
        ({"parameters": {"lr": 3}}, "learning_rate: give {values: […]}"),
        (rate(values=[]), "at least one value"),
        (rate(values=[1], min=0), "stand alone"),
        (rate(distribution="normal", min=0, max=1), "'normal'"),
        (rate(min=2, max=1), "min 2 must be below max 1"),
        (rate(min=1), "uniform needs numbers min and max"),
        (rate(min=0, max=float("inf")), "finite"),
        (rate(min=0, max=1, step=1), "unknown key 'step'"),
        (rate(distribution="log_uniform", min=0, max=1), "log_uniform needs a min above 0"),
        (rate(distribution="power_of_two", min=3, max=8), "power_of_two needs powers of 2"),
        (rate(distribution="int_uniform", min=1.5, max=8), "int_uniform needs whole numbers"),
        (rate(values=[{"lr": 1e-3}, 1e-2]), "values must be mappings, all of them or none"),
        ({"samples": 10**9}, "1,000,000,000 trials; at most 100,000"),
        (
            {"parameters": {"rows_per_micro_batch": {"values": ["x"]}}},
            "rows_per_micro_batch is 'x'",
        ),
        ({"plan": {"lr": 1e-3}}, "learning_rate is both fixed and varied"),
        ({"parameters": {"lr": {"values": [1]}, "learning_rate": {"values": [1]}}}, "twice"),
        ({"plan": [1]}, "plan must be a mapping"),
        ({"plan": {"taks": "demo"}}, "did you mean 'task'?"),
        ({"plan": {"method": "dpfd"}}, "did you mean 'dpfp'?"),
        ({"budget": {"batch_size": 3}}, "budget: unknown key 'batch_size'"),
        ({"budget": {"epsilon": -1}}, "epsilon is -1"),
        ({"budget": {"epsilon": 3}, "plan": {"epsilon": 4}}, "epsilon is in both plan and budget"),
    ],
)
def test_each_mistake_is_one_clear_line(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, **keys)
    message = str(caught.value)
    assert "\n" not in message
    assert "space.yaml" in message
    assert words in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lerning_rate": "1"}, "--set lerning_rate: .*did you mean 'learning_rate'?"),
        ({"samples": "none"}, "samples is 'none'"),
        ({"parameters": "1"}, "--set parameters"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path: Path, change: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(tmp_path, change)


def test_set_fixes_a_varied_field(tmp_path: Path) -> None:
    space = read(tmp_path, {"batch_size": "64", "samples": "7"}, **GRID, metric="accuracy")
    assert space.parameters == ()
    assert space.samples == 7
    assert [make_plan(space.plan_values(c)).batch_size for c in choices(space)] == [64]


def test_set_method_is_the_plans_and_search_the_spaces(tmp_path: Path) -> None:
    space = read(tmp_path, {"method": "dpsgd", "search": "tpe"})
    assert space.search == "tpe"
    assert space.fixed["method"] == "dpsgd"


SHIPPED = sorted((Path(__file__).parents[2] / "search_spaces").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_spaces_make_valid_plans_and_say_what_they_answer_and_cost(path: Path) -> None:
    text, space = path.read_text(), read_search_space(path, {})
    assert text.startswith("# Answers:")
    assert "# Costs:" in text
    for chosen in choices(space)[:200]:
        free = make_plan(space.plan_values(chosen))
        public = {"public_records": 10_000} if free.teacher else {}
        plan = free.bind(records=67_349, representation="mean", **public)
        assert plan.steps > 0
        assert plan.accountant == space.fixed.get("accountant", "pld")
    assert set(space.varied) <= set(plan.to_dict())


def test_main_table_has_28_cells() -> None:
    space = read_search_space(SHIPPED[0].parent / "table_main.yaml", {})
    plans = [make_plan(space.plan_values(chosen)) for chosen in choices(space)]
    cells = {(p.task, p.method, p.epsilon) for p in plans}
    assert len(plans) == len(cells) == 28
    assert {p.task for p in plans} == {"mnli", "qqp", "qnli", "sst2"}


def test_a_shipped_space_is_found_by_its_name_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_search_space("moments", {}).varied == ["ridge", "shrinkage"]
    assert read_search_space("search_spaces/moments.yaml", {}).name == "moments"
    with pytest.raises(UserError, match="unknown search space 'momets'; did you mean 'moments'"):
        read_search_space("momets", {})


def test_every_shipped_space_says_what_it_answers() -> None:
    spaces = {space.name: space for space in shipped_spaces()}
    assert set(spaces) == {path.stem for path in SHIPPED}
    assert all(space.question and space.costs and space.trials for space in spaces.values())
    assert spaces["demo"].trials == 32


def test_a_space_from_python_is_that_of_a_file() -> None:
    plan = Plan(task="demo", method="dpfp", scope="head", epsilon=3)
    space = space_of(
        {"lr": log_uniform(1e-4, 1), "B": [64, 256], "rows_per_micro_batch": power_of_two(1, 16)},
        plan,
        samples=5,
    )
    assert (space.search, space.samples) == ("tpe", 5)
    assert space.varied == ["learning_rate", "batch_size", "micro_batches"]
    assert space.fixed["scope"] == "head"
    assert all(made.scope == "head" for made in space.some_plans())


def test_a_longer_sobol_sequence_begins_with_the_shorter_one() -> None:
    plan = {"method": "dpsgd", "epsilon": 3}
    asked: dict[str, Any] = {"learning_rate": log_uniform(1e-5, 1e-1), "clip": [0.5, 1.0]}
    short, long = (space_of(asked, plan, search="qmc", samples=n) for n in (8, 32))
    rng = np.random.default_rng(0)
    first, more = list(short.choices(rng)), list(long.choices(rng))
    assert more[:8] == first
    rates = sorted(choice["learning_rate"] for choice in more)
    assert rates[0] < 1e-4 < 1e-2 < rates[-1]


@pytest.mark.parametrize(
    ("spec", "low", "high"),
    [
        (Parameter("clip", values=(1, 2, 3)), 1, 3),
        (Parameter("clip", distribution="uniform", low=0.5, high=1.0), 0.5, 1.0),
        (Parameter("clip", distribution="int_uniform", low=2, high=5), 2, 5),
        (Parameter("clip", distribution="power_of_two", low=2, high=16), 2, 16),
        (Parameter("clip", distribution="log_uniform", low=0.01, high=1.0), 0.01, 1.0),
    ],
)
def test_shares_cover_a_parameter_from_its_lowest_to_its_highest(
    spec: Parameter, low: float, high: float
) -> None:
    assert spec.at(0.0) == pytest.approx(low)
    assert spec.at(1 - 1e-12) == pytest.approx(high, rel=1e-6)
