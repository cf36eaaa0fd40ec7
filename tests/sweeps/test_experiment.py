"""One trial on Tune: what a failed trial is charged for, and every trial has a last record."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps import experiment
from dpfp_ray.sweeps.driver import Charges
from dpfp_ray.sweeps.experiment import LastRecords, Notices
from dpfp_ray.sweeps.trial import (
    RETRIES,
    InputsOnce,
    SweepState,
    Trial,
    bind_trial,
    error_reason,
    has_restarts_left,
    input_key,
)
from dpfp_ray.training.step import Steps
from tests.support.ray_runs import run_script
from tests.support.tune_trial import TuneTrial

Values = dict[str, Any]


SEED = 7


inputs = InputsOnce()


@pytest.fixture
def trial(tiny_task: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A trial of the head alone, in the ledger."""
    monkeypatch.setattr(experiment, "node_and_process", dict)
    monkeypatch.setattr(experiment.ray.tune, "report", lambda *_: None)
    monkeypatch.setattr(experiment.ray, "get", lambda reference: reference)
    (tmp_path / "store").mkdir()
    chosen = {**tiny_task, "method": "dpsgd", "scope": "head", "micro_batches": 1}
    (begun,) = charges(tmp_path).begin([bind_trial(chosen, inputs)], SEED)
    return begun


def charges(tmp_path: Path) -> Charges:
    return Charges(Ledger(tmp_path / "ledger"), str(tmp_path / "store"), inputs)


def run(trial: Trial, tmp_path: Path, workers: int = 1) -> None:
    shared: Any = {input_key(trial.plan): inputs(trial.plan)}
    sweep = experiment.Sweep("s", str(tmp_path / "store"), SEED, workers=workers)
    experiment.run_trial({"trial": trial.to_config()}, sweep, shared)


def charged(tmp_path: Path) -> int | None:
    charges(tmp_path).settle()
    (entry,) = Ledger(tmp_path / "ledger").entries()
    return entry.charged


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("where", "workers"),
    [
        ("dpfp_ray.models.representations.HeadClassifier.to", 1),
        ("dpfp_ray.training.loop.make_method", 1),
        ("dpfp_ray.training.loop.check_all_learn", 1),
        ("dpfp_ray.sweeps.workers.run_on_workers", 2),  # as init_process_group would
    ],
)
def test_a_trial_that_fails_before_its_first_draw_is_charged_for_nothing(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, workers: int
) -> None:
    monkeypatch.setattr(where, fail)
    run(trial, tmp_path, workers)
    record = Store(tmp_path / "store").get(trial.id)
    assert record is not None
    assert record["trial"]["status"] == "failed"
    assert charged(tmp_path) == 0


@pytest.mark.parametrize("number", [0, 4])
def test_a_trial_is_charged_for_the_step_that_failed(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    take = Steps.take

    def take_or_fail(self: Any, step: int) -> Any:
        return take(self, step) if step < number else fail()

    monkeypatch.setattr(Steps, "take", take_or_fail)
    run(trial, tmp_path)
    assert charged(tmp_path) == number + 1


def test_a_restart_that_fails_does_not_hide_what_the_killed_process_drew(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SweepState(str(tmp_path / "store")).mark_drawn(trial.id)
    monkeypatch.setattr("dpfp_ray.models.representations.HeadClassifier.to", fail)
    run(trial, tmp_path)
    assert charged(tmp_path) == trial.plan.steps


@pytest.mark.parametrize("drawn", [False, True])
def test_a_trial_that_is_given_up_is_charged_only_if_it_drew(
    trial: Trial, tmp_path: Path, drawn: bool
) -> None:
    if drawn:
        SweepState(str(tmp_path / "store")).mark_drawn(trial.id)
    ended = SimpleNamespace(
        config={"trial": trial.to_config()},
        num_failures=RETRIES + 1,
        max_failures=RETRIES,
        get_error=lambda: None,
    )
    LastRecords(str(tmp_path / "store")).on_trial_error(1, [], ended)
    assert charged(tmp_path) == (trial.plan.steps if drawn else 0)


def test_a_finished_trial_leaves_no_mark(trial: Trial, tmp_path: Path) -> None:
    run(trial, tmp_path)
    assert charged(tmp_path) == trial.plan.steps
    assert not list((tmp_path / "store" / "states").iterdir())


def test_a_trial_given_up_or_stopped_early_has_a_last_record(tmp_path: Path) -> None:
    ends = LastRecords(str(tmp_path))
    given_up, stopped = TuneTrial(1e-3, "ERROR"), TuneTrial(2e-3, "TERMINATED", status="running")
    ends.on_trial_error(0, [], given_up)
    ends.on_trial_complete(0, [], stopped)
    records: Any = [Store(tmp_path).get(trial.ours.id) for trial in (given_up, stopped)]
    assert [record["trial"]["status"] for record in records] == ["failed", "stopped"]
    assert "the worker died" in records[0]["trial"]["error"]
    assert records[0]["plan"] == given_up.ours.plan.to_dict()


def test_only_restarts_without_a_newer_saved_state_count(tmp_path: Path) -> None:
    trial, ends, states = TuneTrial(1e-3), LastRecords(str(tmp_path)), SweepState(str(tmp_path))
    for step in range(1, 20):
        states.save_trial(trial.ours.id, {"progress": {"step": step}}, SEED)
        trial.num_failures += 1
        ends.on_trial_recover(0, [trial], trial)
        assert has_restarts_left(trial)
    for _ in range(RETRIES):
        assert has_restarts_left(trial)
        trial.num_failures += 1
        ends.on_trial_recover(0, [trial], trial)
    trial.num_failures += 1
    assert not has_restarts_left(trial)


NCCL = """\x1b[36mray::_RayTrainWorker__execute()\x1b[39m (pid=7, ip=10.0.0.2)
Traceback (most recent call last):
  File "worker_group.py", line 33, in __execute
    raise skipped from exception_cause(skipped)
torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 'out of memory'

see the logs of the workers for more
"""


def test_a_failed_set_up_is_told_by_its_cause_in_a_line() -> None:
    assert error_reason(RuntimeError(f"Training failed due to controller error:\n{NCCL}")) == (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error "
        "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 'out of "
        "memory'"
    )


def test_a_machine_that_will_go_is_noticed_once(ray_turn: None) -> None:
    assert run_script("ray_drain") == [False, True, False]


def test_a_notice_saves(trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most every half minute it would be otherwise, which this trial does not last."""
    saved: list[int] = []
    save = SweepState.save_trial

    def noted(states: SweepState, identity: str, state: Any, seed: int) -> None:
        saved.append(state["progress"]["step"])
        save(states, identity, state, seed)

    monkeypatch.setattr(SweepState, "save_trial", noted)
    news = iter([False, True, False, True])
    monkeypatch.setattr(Notices, "new", lambda _: next(news, False))
    run(trial, tmp_path)
    assert saved == [2, 4]


def test_a_trial_that_tune_ended_with_restarts_left_is_to_run_again(tmp_path: Path) -> None:
    trial = TuneTrial(1e-3, "ERROR")
    trial.num_failures = 1
    LastRecords(str(tmp_path)).on_trial_error(0, [trial], trial)
    assert Store(tmp_path).records() == []
