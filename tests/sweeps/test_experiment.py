"""One Tune experiment: what would hang it is refused, and every trial has a last record."""

import copy
from pathlib import Path

import pytest
from ray.tune.search.variant_generator import generate_variants

from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.experiment import LastRecords, check_deadlock, each_of
from dpfp_ray.system.errors import UserError
from tests.support.tune_trial import TuneTrial


def test_a_trial_given_up_has_a_record(tmp_path: Path) -> None:
    trial = TuneTrial(1e-3, "ERROR")
    LastRecords(str(tmp_path)).on_trial_error(0, [trial], trial)
    kept = Store(tmp_path).get(trial.ours.id)
    assert kept is not None
    assert kept["trial"]["status"] == "failed"
    assert "the worker died" in kept["trial"]["error"]
    assert kept["plan"] == trial.ours.plan.to_dict()


def test_a_trial_that_tune_ended_with_restarts_left_is_to_run_again(tmp_path: Path) -> None:
    trial = TuneTrial(1e-3, "ERROR")
    trial.num_failures = 1
    LastRecords(str(tmp_path)).on_trial_error(0, [trial], trial)
    assert Store(tmp_path).records() == []


def test_a_trial_stopped_early_has_a_record(tmp_path: Path) -> None:
    trial = TuneTrial(1e-3, "TERMINATED", status="running")
    LastRecords(str(tmp_path)).on_trial_complete(0, [trial], trial)
    kept = Store(tmp_path).get(trial.ours.id)
    assert kept is not None
    assert kept["trial"]["status"] == "stopped"


def test_a_trial_that_finished_is_left_alone(tmp_path: Path) -> None:
    trial = TuneTrial(1e-3, "TERMINATED", status="finished")
    LastRecords(str(tmp_path)).on_trial_complete(0, [trial], trial)
    assert Store(tmp_path).records() == []


def test_tune_makes_each_trial_and_no_copy_of_their_list() -> None:
    """It copies the whole space for each trial: with the list, that grows with its square."""
    ours = [TuneTrial(rate, "PENDING").ours for rate in (1e-3, 1e-2, 1e-1)]
    space = each_of(ours)
    made = [spec["config"]["trial"] for _, spec in generate_variants({"config": space})]
    assert made == [trial.to_config() for trial in ours]
    assert copy.deepcopy(space)["trial"]["grid_search"] is space["trial"]["grid_search"]


def test_nested_scheduler_without_dashboard_is_refused(ray_session: None) -> None:
    with pytest.raises(UserError, match="dashboard"):
        check_deadlock(object(), workers=2)
    check_deadlock(object(), workers=1)
    check_deadlock(None, workers=2)
