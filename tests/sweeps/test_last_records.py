"""Trials that Tune ended have a last record, and those that ended themselves keep theirs."""

from pathlib import Path

from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.last_records import LastRecords
from tests.support.tune_trial import TuneTrial


def test_a_trial_given_up_has_a_record(tmp_path: Path) -> None:
    trial = TuneTrial(1e-3, "ERROR")
    LastRecords(str(tmp_path)).on_trial_error(0, [trial], trial)
    kept = Store(tmp_path).get(trial.ours.id)
    assert kept is not None
    assert kept["trial"]["status"] == "failed"
    assert "the worker died" in kept["trial"]["error"]
    assert kept["plan"] == trial.ours.plan.to_dict()


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
