"""Saved states: files of the version before load, and saving takes a bounded share of time."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfp_ray.data.storage import LocalFiles
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import keyed_integer
from dpfp_ray.training import checkpoints
from dpfp_ray.training.checkpoints import SAVE_SHARE, Saver


@pytest.fixture
def plan() -> Plan:
    return Plan(method="dpfp", task="sst2").bind(records=1000, representation="mean")


def state_of(plan: Plan) -> dict[str, Any]:
    return {"plan_hash": plan.hash, "progress": {"step": 3}, "model": {"w": torch.arange(3.0)}}


def test_a_resume_file_of_version_0_1_loads(plan: Plan, tmp_path: Path) -> None:
    torch.save({**state_of(plan), "seed": 2**100, "seed_known": True}, tmp_path / "resume.pt")
    state = checkpoints.load_state(tmp_path, plan)
    assert state is not None
    assert (state["seed"], state["seed_known"]) == (2**100, True)
    assert torch.equal(state["model"]["w"], torch.arange(3.0))


def test_a_trials_state_of_version_0_1_loads(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    marked = {**state_of(plan), "seed_mark": keyed_integer(7, "mark")}
    torch.save(marked, tmp_path / "states" / "t-0.pt")
    state = checkpoints.load_trial(LocalFiles(tmp_path), "states/t-0.pt", seed=7)
    assert state is not None
    assert state.keys() == state_of(plan).keys()


def test_a_runs_state_is_the_owners_only(plan: Plan, tmp_path: Path) -> None:
    checkpoints.save_state(tmp_path, state_of(plan), seed=1)
    assert os.stat(tmp_path / "resume.pt").st_mode & 0o777 == 0o600


def test_a_trials_state_does_not_hold_its_seed(plan: Plan, tmp_path: Path) -> None:
    checkpoints.save_trial(LocalFiles(tmp_path), "t.pt", state_of(plan), seed=2**100)
    saved = torch.load(tmp_path / "t.pt", weights_only=True)
    assert saved.keys() == {*state_of(plan), "seed_mark"}
    assert saved["seed_mark"] != 2**100


def test_a_damaged_state_of_a_trial_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.pt").write_bytes(b"half")
    with pytest.raises(UserError, match=r"t\.pt is damaged .*delete it"):
        checkpoints.load_trial(LocalFiles(tmp_path), "t.pt", seed=1)


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(checkpoints.time, "monotonic", lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_state_is_made_and_saved_only_when_it_is_due(clock: Clock) -> None:
    saved: list[Any] = []
    saver = Saver(saved.append, every_seconds=30.0)
    for seconds in (0, 30, 1, 29, 2, 28):
        clock.wait(seconds)
        saver.save_if_due(lambda: {"at": clock.now})
    assert saved == [{"at": 131.0}, {"at": 162.0}]


def test_slow_storage_is_written_to_less_often(clock: Clock) -> None:
    saver = Saver(lambda _: clock.wait(9.0), every_seconds=30.0)
    saver.save_now(dict)
    clock.wait(SAVE_SHARE * 9.0)
    assert not saver.due
    clock.wait(0.1)
    assert saver.due
