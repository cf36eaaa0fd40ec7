import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpfp_ray.plan.plan import Plan
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.trial import (
    SETTLED,
    SweepState,
    Trial,
    error_reason,
    last_error,
    mark_interrupted,
    settle,
)
from dpfp_ray.system.errors import UserError
from tests.support.result_records import make_record


def make(**changes: Any) -> Trial:
    plan = Plan(**{"method": "dpfp", "task": "sst2", **changes}).bind(
        records=1000, representation="mean"
    )
    return Trial(plan, 0.5)


def test_survives_json() -> None:
    trial = make(train_file="x.csv", task="custom", labels=("bad", "good"))
    assert Trial.from_config(json.loads(json.dumps(trial.to_config()))) == trial


def test_id_follows_from_plan_repetition_and_group() -> None:
    trial = make()
    again = Trial(trial.plan, 0.5, seed_index=1)
    tuning = Trial(trial.plan, 0.5, group="tune")
    assert len({trial.id, again.id, tuning.id, make(learning_rate=1e-3).id}) == 4
    assert make().id == trial.id


def test_seeds_differ_between_trials_and_sweeps() -> None:
    trial = make()
    seeds = {trial.seed(1), trial.seed(2), Trial(trial.plan, 0.5, 1).seed(1)}
    assert len(seeds) == 3
    assert make().seed(1) == trial.seed(1)


def test_config_holds_no_seed() -> None:
    public = {"plan", "noise_multiplier", "seed_index", "group", "name", "entry"}
    assert set(make().to_config()) == public


@pytest.mark.parametrize("value", [3, 3.0])
def test_whole_and_broken_numbers_are_one_trial(value: float) -> None:
    assert make(epochs=value).id == make(epochs=3).id


def test_trials_on_one_release_share_a_seed_so_that_tuning_is_free() -> None:
    one, other = (make(mode="moments", ridge=ridge) for ridge in (0.5, 2.0))
    assert one.id != other.id
    assert one.seed(1) == other.seed(1)
    assert Trial(one.plan, 0.5, group="tune").seed(1) == one.seed(1)
    assert Trial(one.plan, 0.5, seed_index=1).seed(1) != one.seed(1)


def test_a_name_takes_the_place_of_plan_and_repetition() -> None:
    trial = make()
    one, other = (Trial(trial.plan, 0.5, name=name) for name in ("a", "b"))
    assert (one.id, other.id) == ("a", "b")
    assert one.seed(1) != other.seed(1)


def test_named_trials_make_releases_of_their_own() -> None:
    trial = make(mode="moments")
    assert Trial(trial.plan, 0.5, name="a").seed(1) != Trial(trial.plan, 0.5, name="b").seed(1)


def test_a_settled_trial_keeps_what_it_recorded_before(tmp_path: Path) -> None:
    trial = make()
    record = make_record(trial.id, accuracy=0.7)
    record["trial"]["status"] = "running"
    Store(tmp_path).put(record)
    settle(str(tmp_path), trial, "stopped", "why", {"pid": 7})
    kept = Store(tmp_path).get(trial.id)
    assert kept is not None
    assert kept["trial"] == {**record["trial"], "pid": 7, "status": "stopped", "error": "why"}
    assert kept["history"] == record["history"]


def test_a_trial_that_recorded_nothing_is_settled_with_its_plan(tmp_path: Path) -> None:
    trial = make()
    assert settle(str(tmp_path), trial, "failed", "why") == Store(tmp_path).get(trial.id)
    kept = Store(tmp_path).get(trial.id)
    assert kept is not None
    assert kept["plan"] == trial.plan.to_dict()
    assert kept["trial"]["status"] == "failed"


def test_a_record_that_is_settled_already_is_not_touched(tmp_path: Path) -> None:
    trial = make()
    Store(tmp_path).put(make_record(trial.id))
    assert settle(str(tmp_path), trial, "stopped", "why")["trial"]["status"] == "finished"
    kept = Store(tmp_path).get(trial.id)
    assert kept is not None
    assert kept["trial"]["status"] == "finished"


def test_a_settled_trial_has_no_saved_state(tmp_path: Path) -> None:
    trial, states = make(), SweepState(str(tmp_path))
    states.save_trial(trial.id, {"progress": {"step": 3}}, seed=1)
    settle(str(tmp_path), trial, "failed", "why")
    assert states.load_trial(trial.id, 1, trial.plan) is None


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


def test_what_was_at_work_when_a_sweep_ended_is_interrupted_and_goes_on_later(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    for name, status in (("a", "running"), ("b", "finished"), ("c", "failed")):
        record = make_record(name)
        record["trial"]["status"] = status
        store.put(record)
    mark_interrupted(str(tmp_path))
    found = {record["trial"]["id"]: record["trial"]["status"] for record in store.records()}
    assert found == {"a": "interrupted", "b": "finished", "c": "failed"}
    assert "interrupted" not in SETTLED


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "its process died (killed, or out of memory)"),
        ("ActorDiedError: The actor died\nSome common causes", "its process died (killed, or out"),
        (
            "Traceback\n  here\nOSError: [Errno 28] No space left",
            "OSError: [Errno 28] No space left",
        ),
    ],
)
def test_what_ended_a_process_is_one_line(text: str | None, reason: str) -> None:
    said = last_error(SimpleNamespace(get_error=lambda: text))
    assert said.startswith(reason)
    assert "\n" not in said
