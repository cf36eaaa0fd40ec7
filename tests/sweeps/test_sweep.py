"""Search spaces on Ray: grid and random, TPE, ASHA, and what is refused."""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.tune.schedulers import FIFOScheduler

from dpfp_ray.results.store import Store
from dpfp_ray.sweeps import sweep as sweeping
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.sweeps.driver import Runner
from dpfp_ray.sweeps.space import SearchSpace, read_search_space
from dpfp_ray.sweeps.sweep import NO_EPOCH_LIMIT, input_variants, make_scheduler, plan_trials
from dpfp_ray.sweeps.trial import InputsOnce, Trial, bind_trial, input_key
from dpfp_ray.system.errors import UserError
from tests.support.ray_runs import records, sweep_here, write_space
from tests.support.result_records import make_record


def space_of(tmp_path: Path, task: dict[str, Any], **keys: Any) -> SearchSpace:
    return read_search_space(write_space(tmp_path / "s.yaml", task, **keys), {})


def planned(space: SearchSpace, storage: Path) -> list[Trial]:
    return plan_trials(space, Runner("s", str(storage), RayOptions(), InputsOnce()))


def test_trials_of_a_grid_are_calibrated_to_one_budget(
    tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    parameters = {"batch_size": {"values": [4, 8]}, "clip": {"values": [0.5, 1.0]}}
    space = space_of(tmp_path, tiny_task, method="grid", parameters=parameters, seeds=2)
    trials = planned(space, tmp_path)
    assert len({trial.id for trial in trials}) == 8
    assert [trial.seed_index for trial in trials] == [0] * 4 + [1] * 4
    assert {trial.plan.epsilon for trial in trials} == {8.0}
    assert len({trial.noise_multiplier for trial in trials}) == 2, "σ/C depends on B, not on C"


def test_random_trials_are_the_same_when_drawn_again(
    tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    rates = {"learning_rate": {"distribution": "log_uniform", "min": 1e-5, "max": 1e-2}}
    space = space_of(tmp_path, tiny_task, parameters=rates, samples=5)
    first, second = (planned(space, tmp_path) for _ in range(2))
    assert [t.id for t in first] == [t.id for t in second]
    more = planned(replace(space, samples=7), tmp_path)
    assert [t.id for t in more[:5]] == [t.id for t in first]


def test_what_cannot_meet_its_budget_is_refused_with_the_reason(
    tiny_task: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"batch_size": {"values": [8, 1000]}}
    space = space_of(tmp_path, tiny_task, method="grid", parameters=parameters, seeds=3)
    assert {trial.plan.B for trial in planned(space, tmp_path)} == {8}
    assert capsys.readouterr().err.count("refused: batch_size 1000: ") == 1
    (record,) = Store(tmp_path).records()
    assert record["trial"]["status"] == "refused"
    assert "1000" in record["trial"]["error"]


def test_a_space_with_nothing_left_is_an_error(tiny_task: dict[str, Any], tmp_path: Path) -> None:
    parameters = {"batch_size": {"values": [999, 1000]}}
    space = space_of(tmp_path, tiny_task, method="grid", parameters=parameters)
    with pytest.raises(UserError, match="every trial of this space was refused"):
        planned(space, tmp_path)


HEADS = {"setting": {"values": [{"method": "objpert"}, {"method": "dpsgd", "scope": "head"}]}}


@pytest.mark.parametrize(
    ("plan", "parameters"),
    [
        ({}, {"max_length": {"values": [16, 32]}, "learning_rate": {"values": [1, 2, 3]}}),
        ({"method": "dpsgd", "scope": "lora"}, {"lora_rank": {"values": [1, 2]}}),
        # With little noise such heads read all layers, with much the last one.
        ({}, {**HEADS, "epsilon": {"values": [0.01, 1000]}}),
        ({}, {"method": {"values": ["dpsgd", "objpert"]}}),
    ],
)
def test_all_inputs_that_a_search_may_ask_for_are_known_beforehand(
    tiny_task: dict[str, Any], tmp_path: Path, plan: dict[str, Any], parameters: dict[str, Any]
) -> None:
    names = ("train_file", "dev_file", "model", "epsilon", "accountant")
    task = {name: tiny_task[name] for name in names}  # all else is left open
    keys = {"method": "tpe", "budget": {"accountant": "pld"}, "parameters": parameters}
    space, inputs_of = space_of(tmp_path, task, plan=plan, **keys), InputsOnce()
    prepared = {input_key(variant) for variant in input_variants(space, inputs_of)}
    rng, asked = np.random.default_rng(0), set()
    for _ in range(20):
        with suppress(UserError):  # refused: B above D
            trial = bind_trial(space.plan_values(space.draw(rng)), inputs_of)
            asked.add(input_key(trial.plan))
    assert asked
    assert asked <= prepared


def test_what_trials_load_is_no_distribution(tiny_task: dict[str, Any], tmp_path: Path) -> None:
    parameters = {"dropout": {"distribution": "uniform", "min": 0, "max": 0.2}}
    space = space_of(tmp_path, tiny_task, method="tpe", parameters=parameters)
    with pytest.raises(UserError, match=r"dropout is a distribution; .* {values: "):
        input_variants(space, InputsOnce())


def asha(tiny_task: dict[str, Any], path: Path) -> Path:
    """Compared by the ε that an epoch has spent, which no draw of the noise changes: of three
    epochs the first spends more than of six."""
    keys = {"method": "grid", "parameters": {"epochs": {"values": [6, 3]}}, "scheduler": "asha"}
    return write_space(path, tiny_task, metric={"name": "epsilon", "goal": "minimize"}, **keys)


def test_asha_stops_poor_trials_which_report_what_they_spent(
    tiny_task: dict[str, Any], tmp_path: Path, ray_session: None
) -> None:
    found = sweep_here(asha(tiny_task, tmp_path / "s.yaml"), tmp_path / "runs")
    good, poor = sorted(found.values(), key=lambda record: -record["plan"]["epochs"])
    assert good["trial"]["status"] == "finished"
    assert good["privacy"]["steps"] == 90
    assert good["privacy"]["epsilon"]["gdp"] == pytest.approx(8, rel=1e-3)
    assert poor["trial"]["status"] == "stopped"
    assert poor["trial"]["error"] == "stopped early by the scheduler"
    assert poor["privacy"]["steps"] == poor["history"][-1]["step"] == 15
    assert 0 < poor["privacy"]["epsilon"]["gdp"] < 7


def test_asha_remembers_what_finished_before(tiny_task: dict[str, Any], tmp_path: Path) -> None:
    space = read_search_space(asha(tiny_task, tmp_path / "s.yaml"), {})
    store = Store(tmp_path / "runs")
    for number, accuracy in enumerate((0.9, 0.8, 0.85, 0.95)):
        store.put(make_record(f"t-{number}", accuracy=accuracy))
    scheduler: Any = make_scheduler(space, str(tmp_path / "runs"))
    assert scheduler._max_t == NO_EPOCH_LIMIT
    (bracket,) = scheduler._brackets
    assert len(bracket._rungs[-1][1]) == 4


def test_tpe_on_ray_is_on_budget_and_can_be_extended(
    tiny_task: dict[str, Any], tmp_path: Path, ray_session: None
) -> None:
    """Two objectives at once: what works for two works for one. The representation is left open,
    as in the spaces that we ship."""
    tiny_task = {name: value for name, value in tiny_task.items() if name != "representation"}
    parameters = {
        "learning_rate": {"distribution": "log_uniform", "min": 1e-4, "max": 1e-2},
        "batch_size": {"distribution": "power_of_two", "min": 4, "max": 16},
        "rows_per_micro_batch": {"distribution": "power_of_two", "min": 1, "max": 8},
    }
    keys = {"method": "tpe", "metric": ["accuracy", "train_seconds"], "parameters": parameters}
    path = write_space(tmp_path / "s.yaml", tiny_task, samples=3, plan={"epochs": 1}, **keys)
    first = sweep_here(path, tmp_path / "runs")
    assert len(first) == 3
    for record in first.values():
        assert record["finished"]
        assert record["privacy"]["epsilon"]["gdp"] == pytest.approx(8, rel=1e-3)
    write_space(path, tiny_task, samples=5, plan={"epochs": 1}, **keys)
    second = sweep_here(path, tmp_path / "runs")
    assert len(second) == 5
    assert all(second[identity] == record for identity, record in first.items())
    assert records(tmp_path / "runs") == second


class KillsOnce(FIFOScheduler):
    """Kills the process of the first trial that ends, just before Tune hands it to the next."""

    def __init__(self, storage: Path) -> None:
        super().__init__()
        self.storage = storage
        self.killed = 0

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if not self.killed:
            (ended,) = records(self.storage).values()
            self.killed = ended["trial"]["pid"]
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["grid", "tpe"])
def test_a_process_that_dies_while_it_is_handed_over_costs_no_trial(
    tiny_task: dict[str, Any],
    tmp_path: Path,
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    method: str,
) -> None:
    store = tmp_path / "store"
    scheduler = KillsOnce(store)
    monkeypatch.setattr(sweeping, "make_scheduler", lambda *_: scheduler)
    rates = {"learning_rate": {"values": [1e-4, 1e-3]}}
    more = {"samples": 2} if method == "tpe" else {}
    space = write_space(
        tmp_path / "s.yaml", tiny_task, method=method, parameters=rates, plan={"epochs": 1}, **more
    )
    ended = sweep_here(space, store)
    assert {record["trial"]["status"] for record in ended.values()} == {"finished"}
    assert sorted(record["plan"]["learning_rate"] for record in ended.values()) == [1e-4, 1e-3]
    said = capfd.readouterr().err
    assert said.count("again:  learning_rate") == 1
    assert "its process died" in said
    assert "Traceback" not in said
