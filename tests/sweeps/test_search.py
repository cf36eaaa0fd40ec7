"""Optuna's samplers: what they propose, and that a continued search is the unbroken one."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from ray.tune.search import Searcher

from dpfp_ray.plan.values import make_plan
from dpfp_ray.sweeps.search import OptunaSearch
from dpfp_ray.sweeps.space import Parameter, SearchSpace
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import without_checksum
from tests.support.result_records import make_record

RATE = Parameter("learning_rate", distribution="log_uniform", low=1e-5, high=1e-1)
ROWS = Parameter("batch_size", distribution="power_of_two", low=8, high=64)


def make(
    storage: Path,
    samples: int = 8,
    parameters: tuple[Parameter, ...] = (RATE, ROWS),
    metrics: tuple[tuple[str, str], ...] = (("accuracy", "max"),),
    refused: list[Any] | None = None,
    method: str = "tpe",
) -> OptunaSearch:
    fixed = {"method": "dpfp", "micro_batches": 1}
    space = SearchSpace("s", method, metrics, samples, 1, "none", fixed, parameters)

    def bind(chosen: dict[str, Any]) -> Trial:
        plan = make_plan(space.plan_values(chosen))
        if plan.batch_size == 64:
            raise UserError("cannot meet the budget")
        return Trial(plan.bind(records=1000, representation="mean"), 1.0)

    kept = [] if refused is None else refused
    return OptunaSearch(space, str(storage), bind, lambda *chosen: kept.append(chosen))


def score(trial: Trial) -> dict[str, Any]:
    """Best at a rate of 1e-3; noise that depends on the trial alone."""
    rate = float(trial.plan.learning_rate or 0)
    accuracy = 1 - abs(rate - 1e-3) ** 0.1 + random.Random(trial.id).random() * 0.01
    return {"status": "finished", "accuracy": accuracy, "train_seconds": 64 / trial.plan.B}


def put(tpe: OptunaSearch, trial: Trial, status: str = "finished") -> None:
    """The final record of a trial, as its process leaves it."""
    scores = score(trial)
    record = make_record(trial.id, accuracy=scores["accuracy"])
    record["history"][-1]["train_seconds"] = scores["train_seconds"]
    record["trial"]["status"] = status
    tpe.store.put(record)


def step(tpe: OptunaSearch, name: str) -> Trial | None:
    config = tpe.suggest(name)
    if config == Searcher.FINISHED:
        return None
    assert config is not None
    return Trial.from_config(config["trial"])


def run(tpe: OptunaSearch, steps: int = 100) -> list[str]:
    ids = []
    for number in range(steps):
        trial = step(tpe, str(number))
        if trial is None:
            break
        ids.append(trial.id)
        put(tpe, trial)
    return ids


@pytest.mark.parametrize("method", ["tpe", "gp", "cmaes"])
def test_proposes_as_many_as_asked_each_once_and_what_cannot_run_costs_no_sample(
    tmp_path: Path, method: str
) -> None:
    refused: list[Any] = []
    tpe = make(tmp_path, samples=12, refused=refused, method=method)
    assert tpe.left == 12
    ids = run(tpe)
    assert refused, "cannot meet the budget"
    assert len(ids) == len(set(ids)) == 12
    assert tpe.left == 0
    assert len(tpe.proposals) == 12 + len(refused)
    (path,) = tmp_path.glob("search-*.json")
    proposals = json.loads(without_checksum(path.read_bytes()))
    assert {key for p in proposals for key in p} == {"params", "id"}, "no secrets"


def test_what_cannot_run_is_avoided_the_longer_the_more(tmp_path: Path) -> None:
    """Half of this space cannot run."""
    wide = Parameter("batch_size", values=(8, 64))
    tpe = make(tmp_path, samples=24, parameters=(RATE, wide))
    run(tpe)
    lost = [proposal["id"] is None for proposal in tpe.proposals]
    assert sum(lost[-10:]) <= sum(lost[:10])


@pytest.mark.parametrize("after", [1, 4, 7])
def test_continued_search_is_the_unbroken_one(tmp_path: Path, after: int) -> None:
    unbroken = run(make(tmp_path / "a", samples=9))
    first = run(make(tmp_path / "b", samples=9), after)
    assert first + run(make(tmp_path / "b", samples=9)) == unbroken


def test_a_trial_that_was_running_is_proposed_again_first(tmp_path: Path) -> None:
    tpe = make(tmp_path, samples=6)
    run(tpe, 2)
    open_trial = step(tpe, "killed")
    assert open_trial is not None
    again = make(tmp_path, samples=6)
    continued = step(again, "new")
    assert continued is not None
    assert continued.id == open_trial.id
    put(again, continued)
    assert len(again.proposals) == 3


def test_more_samples_continue_a_finished_search(tmp_path: Path) -> None:
    first = run(make(tmp_path, samples=4))
    more = make(tmp_path, samples=7)
    assert more.left == 3
    assert not set(first) & set(run(more))


def test_small_space_ends_early(tmp_path: Path) -> None:
    two = Parameter("batch_size", values=(8, 16))
    tpe = make(tmp_path, samples=10, parameters=(two,))
    assert len(run(tpe)) == 2
    assert tpe.left == 0


@pytest.mark.parametrize("status", ["failed", "finished"])
def test_a_trial_that_ended_unheard_is_not_run_again(tmp_path: Path, status: str) -> None:
    """A failed trial teaches nothing."""
    tpe = make(tmp_path, samples=6)
    trial = step(tpe, "killed")
    assert trial is not None
    put(tpe, trial, status)
    again = make(tmp_path, samples=6)
    assert again.left == 6 - len(again.proposals)
    expected = [] if status == "failed" else [score(trial)["accuracy"]]
    assert again.scores(again.proposals[-1]) == pytest.approx(expected)
