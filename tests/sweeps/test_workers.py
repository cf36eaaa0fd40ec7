"""Several Ray Train workers for one trial: the same numbers, also when one is killed."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfp_ray.sweeps.experiment import assigned_device
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.sweeps.workers import INTERFACES, GroupConfig, use_node_interface
from dpfp_ray.system.errors import UserError
from tests.support.ray_runs import (
    PATIENCE,
    run_here,
    run_plainly,
    saved_trials,
    trial,
    wait_for,
)

# Of B = 2, often no row is left for the second worker, and sometimes none at all.
FEW = {"batch_size": 2, "micro_batches": 1, "epochs": 6, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def chosen(tiny_task: dict[str, Any]) -> Trial:
    return trial(tiny_task, **FEW)


@pytest.fixture(scope="module")
def together(
    chosen: Trial, tmp_path_factory: pytest.TempPathFactory, ray_session: None
) -> dict[str, Any]:
    """A trial whose first worker is killed after its first save, and one that raises: its records
    have more rows than the data."""
    broken = Trial(replace(chosen.plan, records=10**6), chosen.noise_multiplier)
    storage = tmp_path_factory.mktemp("together")

    def disturb() -> None:
        (victim,) = wait_for(lambda: saved_trials(storage, 1), "the trial to have saved")
        os.kill(victim["pid"], signal.SIGKILL)

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    found = run_here([chosen, broken], storage, workers=2, save_every=0.2)
    thread.join(timeout=PATIENCE)
    return {"good": found[chosen.id], "broken": found[broken.id], "storage": storage}


def test_two_workers_one_of_them_killed_and_one_often_without_rows_give_what_one_gives(
    chosen: Trial, together: dict[str, Any]
) -> None:
    found = together["good"]
    assert found["trial"]["resumed_at_step"] > 0
    (alone,) = run_plainly([chosen]).values()
    assert found["finished"]
    assert found["privacy"] == alone["privacy"]
    for ours, theirs in zip(alone["history"], found["history"], strict=True):
        assert theirs["dev"]["dev"]["loss"] == pytest.approx(ours["dev"]["dev"]["loss"], rel=1e-3)
        assert theirs["epsilon"] == ours["epsilon"]


def test_a_worker_that_raises_fails_the_trial_and_nothing_else(together: dict[str, Any]) -> None:
    record = together["broken"]
    assert record["trial"]["status"] == "failed"
    assert "IndexError" in record["trial"]["error"]


@pytest.mark.parametrize("variable", INTERFACES)
def test_an_interface_that_the_user_has_named_stays(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in INTERFACES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "ib0")
    use_node_interface()
    assert os.environ[variable] == "ib0"
    assert all(os.environ[name] for name in INTERFACES)


@pytest.mark.parametrize(("gpus", "seen"), [(0.0, True), (0.0, False), (1.0, True)])
def test_a_worker_computes_where_ray_says(
    monkeypatch: pytest.MonkeyPatch, gpus: float, seen: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    assert assigned_device(gpus).type == ("cuda" if gpus else "cpu")


def test_a_gpu_that_torch_does_not_see_is_refused() -> None:
    """It is a CPU wheel that these tests run on."""
    with pytest.raises(UserError, match=r"a GPU is assigned, and torch 2\..* sees none"):
        assigned_device(0.5)


@pytest.mark.nightly
def test_workers_that_cannot_meet_give_back_what_they_held(
    ray_session: None, tmp_path: Path
) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def free() -> float:
        return ray.available_resources().get("CPU", 0.0)

    trainer = TorchTrainer(
        lambda: None,
        torch_config=GroupConfig(init_method="by pigeon"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="apart", storage_path=str(tmp_path)),
    )
    with pytest.raises(Exception, match="pigeon"):
        trainer.fit()
    wait_for(lambda: free() == ray.cluster_resources()["CPU"], "all CPUs to be free")
