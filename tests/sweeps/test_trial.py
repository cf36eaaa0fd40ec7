"""A trial's identity and seeds, its last record, and the files of an unfinished sweep."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpfp_ray.plan.plan import Plan
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.trial import (
    SECRET,
    SETTLED,
    SweepState,
    Trial,
    error_reason,
    last_error,
    mark_interrupted,
    resolve_storage,
    settle,
)
from dpfp_ray.system.errors import UserError
from tests.support.result_records import make_record
from tests.support.states import flip_byte, whole_state


@pytest.fixture(params=["path", "uri"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder = tmp_path / "a sweep" if request.param == "path" else tmp_path / "sweep"
    return str(folder) if request.param == "path" else folder.as_uri()


PLAN = Plan(method="dpfp", task="sst2").bind(records=1000, representation="mean")


def make(**changes: Any) -> Trial:
    plan = Plan(**{"method": "dpfp", "task": "sst2", **changes})
    return Trial(plan.bind(records=1000, representation="mean"), 0.5)


def kept(folder: Path, identity: str) -> Any:
    return Store(folder).get(identity)


# --- the secret seed ----------------------------------------------------------------------------


def test_seed_is_made_once_and_owner_only(tmp_path: Path) -> None:
    state = SweepState(str(tmp_path / "sweep"))
    seed = state.seed(None)
    assert seed.bit_length() > 64
    assert SweepState(str(tmp_path / "sweep")).seed(None) == seed
    path = tmp_path / "sweep" / SECRET
    assert os.stat(path).st_mode & 0o777 == 0o600
    state.forget()
    assert not path.exists()
    assert state.seed(None) != seed


def test_given_seed_is_not_written(tmp_path: Path) -> None:
    assert SweepState(str(tmp_path)).seed(12345678901) == 12345678901
    assert all(b"12345678901" not in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("first", "then", "fix"),
    [(7, 8, "give the --seed"), (7, None, "give the --seed"), (None, 8, "drop --seed")],
)
def test_a_seed_other_than_the_unfinished_sweeps_is_refused(
    storage: str, first: int | None, then: int | None, fix: str
) -> None:
    seed = SweepState(storage).seed(first)
    with pytest.raises(UserError, match=f"unfinished sweep .*{fix}"):
        SweepState(storage).seed(then)
    assert SweepState(storage).seed(first) == seed
    SweepState(storage).forget()
    SweepState(storage).seed(then)


@pytest.mark.parametrize("wrong", [b"", b"12", b"what"])
def test_a_damaged_seed_is_refused_in_a_line(tmp_path: Path, wrong: bytes) -> None:
    SweepState(str(tmp_path)).seed(None)
    whole = (tmp_path / SECRET).read_bytes()
    (tmp_path / SECRET).write_bytes(wrong + whole[len(wrong) :] if wrong else wrong)
    with pytest.raises(UserError, match=r"sweep\.secret is damaged; restore"):
        SweepState(str(tmp_path)).seed(None)


@pytest.mark.parametrize("call", ["link", "fsync", "unlink"])
def test_a_kill_while_the_seed_is_written_leaves_none(tmp_path: Path, call: str) -> None:
    killed_there = f"""
import os
from dpfp_ray.sweeps.trial import SweepState
real = os.{call}
def killed(*arguments, **named):
    real(*arguments, **named) if "{call}" != "unlink" else None
    os._exit(9)
os.{call} = killed
SweepState({str(tmp_path)!r}).seed(None)
"""
    ended = subprocess.run([sys.executable, "-c", killed_there], check=False)
    assert ended.returncode == 9
    assert list(tmp_path.iterdir())  # the kill left something
    state = SweepState(str(tmp_path))
    state.seed(None)
    state.forget()
    assert not list(tmp_path.iterdir())


# --- other files --------------------------------------------------------------------------------


def test_a_damaged_search_is_refused(tmp_path: Path) -> None:
    states = SweepState(str(tmp_path))
    states.save_search("k", [{"id": "a"}])
    assert states.load_search("k") == [{"id": "a"}]
    flip_byte(tmp_path / "search-k.json", 0.3)
    with pytest.raises(UserError, match="is damaged; restore"):
        states.load_search("k")


def test_all_that_is_unfinished_is_the_owners_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        states = SweepState(str(tmp_path / "sweep"))
        states.seed(None)
        for step in (3, 4):
            states.save_trial("t-0", whole_state(PLAN, step), seed=1)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "sweep").rglob("*.*")}
    assert modes == {0o600}
    for folder in ("sweep", "sweep/states"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


def test_trial_state_comes_back_for_its_own_seed(storage: str) -> None:
    states = SweepState(storage)
    assert states.load_trial("t-0", seed=1, plan=PLAN) is None
    for step in (3, 4):
        states.save_trial("t-0", whole_state(PLAN, step), seed=1)
    assert states.load_trial("t-0", seed=2, plan=PLAN) is None
    saved = states.load_trial("t-0", seed=1, plan=PLAN)
    assert saved is not None
    assert saved["progress"]["step"] == 4
    assert torch.equal(saved["model"]["w"], torch.arange(3.0))
    for _ in range(2):
        states.drop_trial("t-0")
    assert states.load_trial("t-0", seed=1, plan=PLAN) is None


def test_relative_storage_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_storage("runs/x") == str(tmp_path / "runs/x")
    assert resolve_storage("s3://bucket/x") == "s3://bucket/x"


# --- identity and seeds -------------------------------------------------------------------------


def test_a_config_survives_json_and_holds_no_seed() -> None:
    trial = make(train_file="x.csv", task="custom", labels=("bad", "good"))
    config = trial.to_config()
    assert Trial.from_config(json.loads(json.dumps(config))) == trial
    public = {"plan", "noise_multiplier", "seed_index", "group", "name", "entry"}
    assert set(config) == public


def test_id_follows_from_plan_repetition_and_group() -> None:
    trial = make()
    again = Trial(trial.plan, 0.5, seed_index=1)
    tuning = Trial(trial.plan, 0.5, group="tune")
    assert len({trial.id, again.id, tuning.id, make(learning_rate=1e-3).id}) == 4
    assert make().id == trial.id
    assert make(epochs=3).id == make(epochs=3.0).id


def test_seeds_differ_between_trials_and_sweeps() -> None:
    trial = make()
    seeds = {trial.seed(1), trial.seed(2), Trial(trial.plan, 0.5, 1).seed(1)}
    assert len(seeds) == 3
    assert make().seed(1) == trial.seed(1)


def test_trials_on_one_release_share_a_seed_so_that_tuning_is_free() -> None:
    one, other = (make(mode="moments", ridge=ridge) for ridge in (0.5, 2.0))
    assert one.id != other.id
    assert one.seed(1) == other.seed(1)
    assert Trial(one.plan, 0.5, group="tune").seed(1) == one.seed(1)
    assert Trial(one.plan, 0.5, seed_index=1).seed(1) != one.seed(1)


# --- the last record ----------------------------------------------------------------------------


def test_a_settled_trial_keeps_what_it_recorded_before(tmp_path: Path) -> None:
    trial = make()
    record = make_record(trial.id, accuracy=0.7)
    record["trial"]["status"] = "running"
    Store(tmp_path).put(record)
    settle(str(tmp_path), trial, "stopped", "why", {"pid": 7})
    last = kept(tmp_path, trial.id)
    assert last["trial"] == {**record["trial"], "pid": 7, "status": "stopped", "error": "why"}
    assert last["history"] == record["history"]


def test_a_record_that_is_settled_already_is_not_touched(tmp_path: Path) -> None:
    trial = make()
    Store(tmp_path).put(make_record(trial.id))
    assert settle(str(tmp_path), trial, "stopped", "why")["trial"]["status"] == "finished"
    assert kept(tmp_path, trial.id)["trial"]["status"] == "finished"


def test_a_trial_that_recorded_nothing_is_settled_with_its_plan_and_no_state(
    tmp_path: Path,
) -> None:
    trial, states = make(), SweepState(str(tmp_path))
    states.save_trial(trial.id, {"progress": {"step": 3}}, seed=1)
    last = settle(str(tmp_path), trial, "failed", "why")
    assert last == kept(tmp_path, trial.id)
    assert last["plan"] == trial.plan.to_dict()
    assert last["trial"]["status"] == "failed"
    assert states.load_trial(trial.id, 1, trial.plan) is None


def test_what_was_at_work_when_a_sweep_ended_is_interrupted_and_goes_on_later(
    tmp_path: Path,
) -> None:
    statuses = {"a": "running", "b": "finished", "c": "failed"}
    for name, status in statuses.items():
        record = make_record(name)
        record["trial"]["status"] = status
        Store(tmp_path).put(record)
    mark_interrupted(str(tmp_path))
    after = {r["trial"]["id"]: r["trial"]["status"] for r in Store(tmp_path).records()}
    assert after == statuses | {"a": "interrupted"}
    assert "interrupted" not in SETTLED


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("give a\n number"), "give a number"),
        (IndexError("out of range"), "IndexError: out of range"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_the_reason_is_one_line(error: Exception, reason: str) -> None:
    assert error_reason(error) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "its process died (killed, or out of memory)"),
        (
            "ActorDiedError: The actor died\nSome causes",
            "its process died (killed, or out of memory)",
        ),
        ("Traceback\n  here\nOSError: [Errno 28] No space", "OSError: [Errno 28] No space"),
    ],
)
def test_what_ended_a_process_is_one_line(text: str | None, reason: str) -> None:
    assert last_error(SimpleNamespace(get_error=lambda: text)) == reason


@pytest.mark.parametrize("mode", ["paper", "moments"])
def test_named_trials_have_seeds_and_releases_of_their_own(mode: str) -> None:
    one, other = (Trial(make(mode=mode).plan, 0.5, name=name) for name in ("a", "b"))
    assert (one.id, other.id) == ("a", "b")
    assert one.seed(1) != other.seed(1)
