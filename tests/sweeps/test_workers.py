"""Several Ray Train workers for one trial: the same numbers, also when one is killed."""

import os
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from dpfp_ray import load_model, train
from dpfp_ray.plan.plan import Plan
from dpfp_ray.sweeps import workers
from dpfp_ray.sweeps.experiment import assigned_device
from dpfp_ray.sweeps.trial import SweepState, Trial
from dpfp_ray.sweeps.workers import INTERFACES, GroupConfig, use_node_interface
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.signals import Interrupted
from dpfp_ray.training import console
from dpfp_ray.training.loop import Epoch, Event
from dpfp_ray.training.run_folder import RESULT, RESUME, WEIGHTS
from tests.support.ray_runs import (
    PATIENCE,
    records,
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


class StoppedLate(console.Silent):
    """Gets a Ctrl-C after the third epoch."""

    def show(self, event: Event) -> None:
        if isinstance(event, Epoch) and event.record["epoch"] == 3:
            signal.raise_signal(signal.SIGINT)


def test_a_run_on_workers_killed_stopped_and_continued_here_is_the_model_of_one_process(
    tiny_task: dict[str, Any], tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(**{**tiny_task, "method": "dpsgd", "micro_batches": None, "epochs": 4})
    usual: dict[str, Any] = {"seed": 5, "reporter": "silent", "save_every": 0.0}
    alone, together = tmp_path / "alone", tmp_path / "together"
    train(plan, output=alone, threads=1, **usual)
    victims: list[int] = []

    def disturb() -> None:
        wait_for((together / RESUME).exists, "the run to have saved")
        found = [p for p in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in title(p)]
        victims.append(found[0].pid)
        found[0].kill()

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    with monkeypatch.context() as patch:
        patch.setitem(console.DISPLAYS, "silent", StoppedLate)
        with pytest.raises(Interrupted, match="stopped; saved in"):
            train(plan, output=together, workers=2, cpus_per_worker=1, **usual)
    thread.join(timeout=PATIENCE)
    assert victims
    wait_for(lambda: free_cpus() == 3, "the workers to be gone")
    train(plan, output=together, threads=1, **usual)
    assert sorted(path.name for path in together.iterdir()) == [RESULT, WEIGHTS]
    ours, theirs = load_file(alone / WEIGHTS), load_file(together / WEIGHTS)
    assert all(torch.allclose(theirs[name], ours[name], atol=1e-6) for name in ours)
    (ours_says, theirs_says) = (
        load_model(folder).predict(["a great film"])[0] for folder in (alone, together)
    )
    assert theirs_says.probabilities == pytest.approx(ours_says.probabilities, abs=1e-6)


def title(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or [])


def free_cpus() -> float:
    import ray

    return ray.available_resources().get("CPU", 0.0)


def test_workers_of_a_run_that_cannot_meet_say_why_in_a_line(
    tiny_task: dict[str, Any], ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "GroupConfig", partial(GroupConfig, init_method="by pigeon"))
    with pytest.raises(UserError, match=r"^the workers did not start: .*pigeon") as caught:
        train(Plan(**tiny_task), workers=2, cpus_per_worker=1, reporter="silent")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_that_gets_on_between_seven_kills_ends(
    tiny_task: dict[str, Any], ray_session: None, tmp_path: Path, workers: int
) -> None:
    many = trial(tiny_task, batch_size=2, micro_batches=1, epochs=200)
    states, killed = SweepState(str(tmp_path)), [0]

    def disturb() -> None:
        for _ in range(7):
            before = states.saved_step(many.id)

            def victim(before: int = before) -> int:
                (record,) = records(tmp_path).values() or ({"trial": {"pid": 0}},)
                pid = int(record["trial"]["pid"])
                fresh = states.saved_step(many.id) > before and pid not in killed
                return pid if fresh and psutil.pid_exists(pid) else 0

            killed.append(wait_for(victim, "the trial to get on"))
            os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    found = run_here([many], tmp_path, workers=workers, save_every=0.1)
    assert len(killed) == 8
    assert found[many.id]["trial"]["status"] == "finished"


@pytest.mark.nightly
def test_workers_that_cannot_meet_give_back_what_they_held(
    ray_session: None, tmp_path: Path
) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        lambda: None,
        torch_config=GroupConfig(init_method="by pigeon"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="apart", storage_path=str(tmp_path)),
    )
    with pytest.raises(Exception, match="pigeon"):
        trainer.fit()
    wait_for(lambda: free_cpus() == ray.cluster_resources()["CPU"], "all CPUs to be free")


def test_a_run_is_not_sent_to_workers_who_cannot_be_followed(tiny_task: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot be followed through Ray Client"):
        train(Plan(**tiny_task), workers=2, address="ray://nowhere:10001", reporter="silent")
