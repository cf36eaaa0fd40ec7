"""Saved states: files of the version before load, and saving takes a bounded share of time."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfp_ray.plan.plan import Plan
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import LocalFiles
from dpfp_ray.training import run_folder
from dpfp_ray.training.record import checked_record, make_record, read_record, record_id
from dpfp_ray.training.run_folder import RESUME, SAVE_SHARE, Saver, save_seconds
from tests.support.samples import everything_small
from tests.support.states import flip_byte, whole_state


@pytest.fixture
def plan() -> Plan:
    return Plan(method="dpfp", task="sst2").bind(records=1000, representation="mean")


def state_of(plan: Plan, step: int = 3) -> dict[str, Any]:
    return whole_state(plan, step)


def test_a_runs_state_is_the_owners_only(plan: Plan, tmp_path: Path) -> None:
    run_folder.save_state(tmp_path, state_of(plan), seed=1)
    assert os.stat(tmp_path / "resume.pt").st_mode & 0o777 == 0o600


def test_a_trials_state_does_not_hold_its_seed(plan: Plan, tmp_path: Path) -> None:
    run_folder.save_trial(LocalFiles(tmp_path), "t.pt", state_of(plan), seed=2**100)
    saved = torch.load(tmp_path / "t.pt", weights_only=True)
    assert saved.keys() == {*state_of(plan), "seed_mark"}
    assert saved["seed_mark"] != 2**100


@pytest.mark.parametrize("where", [0.01, 0.5, 0.9, 0.999])
def test_a_damaged_state_is_refused_in_a_line(plan: Plan, tmp_path: Path, where: float) -> None:
    run_folder.save_state(tmp_path, state_of(plan), seed=1)
    flip_byte(tmp_path / RESUME, where)
    with pytest.raises(UserError, match=r"resume\.pt is damaged .*--overwrite"):
        run_folder.load_state(tmp_path, plan)


CHANGES: dict[str, Any] = {
    "later version": {"keying": 99},
    "other progress": {"progress": {"step": 3}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_of_another_version_is_refused_in_a_line(
    plan: Plan, tmp_path: Path, change: dict[str, Any]
) -> None:
    run_folder.save_state(tmp_path, {**state_of(plan), **change}, seed=1)
    with pytest.raises(UserError, match=r"resume\.pt is damaged"):
        run_folder.load_state(tmp_path, plan)


def test_a_method_of_one_release_has_no_optimizer_and_goes_on(tmp_path: Path) -> None:
    """Found by benchmarks/chaos.py: killed between its save and its result, it called its own state
    damaged."""
    plan = Plan(method="dpfp", mode="moments", task="sst2").bind(
        records=1000, representation="mean"
    )
    state = state_of(plan, step=1)
    for name in ("optimizer", "loss_sum", "loss_rows"):
        del state[name]
    run_folder.save_state(tmp_path, state, seed=1)
    assert run_folder.load_state(tmp_path, plan) is not None


def test_a_trial_without_a_good_state_starts_again(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "t.pt").write_bytes(b"half")
    with pytest.warns(UserWarning, match=r"t\.pt is damaged"):
        assert run_folder.load_trial(LocalFiles(tmp_path), "t.pt", seed=1, plan=plan) is None


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(run_folder.time, "monotonic", lambda: self.now)

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
        if saver.due:
            saver.save_now(lambda: {"at": clock.now})
    assert saved == [{"at": 131.0}, {"at": 162.0}]


def test_slow_storage_is_written_to_less_often(clock: Clock) -> None:
    saver = Saver(lambda _: clock.wait(9.0), every_seconds=30.0)
    saver.save_now(dict)
    clock.wait(SAVE_SHARE * 9.0)
    assert not saver.due
    clock.wait(0.1)
    assert saver.due


def test_one_setting_says_how_often_all_verbs_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPFP_SAVE_SECONDS", raising=False)
    assert save_seconds() == Saver(print).every_seconds == RayOptions().save_every == 30.0
    monkeypatch.setenv("DPFP_SAVE_SECONDS", "7")
    assert save_seconds() == Saver(print).every_seconds == RayOptions().save_every == 7.0
    assert save_seconds(0.5) == 0.5


def test_an_error_that_is_not_the_disks_is_not_called_a_full_disk(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="something else"):
        run_folder.save_state(tmp_path, state_of(plan), seed=1)


# A record is checked when it is read; what is read has the shape that its type says.


def test_a_record_comes_back_as_it_was_written() -> None:
    for record in everything_small():
        assert read_record(json.dumps(record)) == record


def test_a_failed_trial_has_all_sections_but_empty() -> None:
    record = checked_record({"plan": {}, "trial": {"id": "t", "status": "failed"}})
    assert record == make_record(trial={"id": "t", "status": "failed"})
    assert record_id(record) == "t"


def test_what_a_later_version_adds_is_kept() -> None:
    facts = {"plan": {}, "plan_hash": "x", "cost": {"watts": 5}, "later": 1}
    assert checked_record(facts)["cost"] == {"watts": 5}


@pytest.mark.parametrize(
    ("facts", "where"),
    [
        ({"plan_hash": "x"}, "no plan"),
        ([], "no plan"),
        ({"plan": {}}, "neither trial.id nor plan_hash"),
        ({"plan": {}, "plan_hash": "x", "privacy": []}, "privacy"),
        ({"plan": {}, "plan_hash": "x", "history": [None]}, "history.0"),
        ({"plan": {}, "plan_hash": "x", "history": [{"dev": {"dev": 1}}]}, "history.0"),
        ({"plan": {}, "plan_hash": "x", "trial": {"id": ["t"]}}, "trial.id"),
        ({"plan": {"batch_size": "many"}, "plan_hash": "x"}, "batch_size"),
        ({"plan": {"clip": {}}, "plan_hash": "x"}, "clip"),
    ],
)
def test_nonsense_is_refused_by_its_place(facts: Any, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        read_record(json.dumps(facts))


def test_endless_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        read_record("[" * 100_000)
