"""MLflow, TensorBoard and Weights & Biases, each the real thing, writing to this machine."""

from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.sweeps import progress
from dpfp_ray.sweeps.progress import Tracked, make_tracker
from dpfp_ray.system.errors import UserError
from tests.support.ray_runs import run_here, trial
from tests.support.tune_trial import TuneTrial

RESULT = {
    "status": "running",
    "step": 30,
    "epoch": 1,
    "accuracy": 0.75,
    "loss": 0.5,
    "epsilon": 2.0,
    "epsilon_gdp": 2.0,
    "time_total_s": 12.0,
}


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")


def mlflow_runs(storage: Path, sweep: str) -> Any:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{storage}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name(sweep)
    return client, {
        run.info.run_name: run for run in client.search_runs([experiment.experiment_id])
    }


class IdentifiedTrial(TuneTrial):
    def __init__(self, rate: float = 1e-3) -> None:
        super().__init__(rate)
        self.trial_id = f"tune-{rate}"


def one_trial(tracker: Tracked, end: str = "finished") -> IdentifiedTrial:
    """Tune's events of one trial."""
    tuned = IdentifiedTrial()
    tracker.on_trial_start(0, [tuned], tuned)
    tracker.on_trial_result(1, [tuned], tuned, RESULT)
    tuned.last_result = {"status": end}
    tracker.on_trial_complete(2, [tuned], tuned)
    tracker.on_experiment_end([tuned])
    return tuned


def test_mlflow_gets_a_sweeps_trials_under_their_own_names(
    tmp_path: Path, ray_session: None, tiny_task: dict[str, Any]
) -> None:
    pytest.importorskip("mlflow")
    one, other = trial(tiny_task), trial(tiny_task, learning_rate=2e-3)
    records = run_here([one, other], tmp_path, tracker="mlflow")
    client, runs = mlflow_runs(tmp_path, "test")
    assert set(runs) == {one.id, other.id}
    run = runs[one.id]
    assert run.data.params["learning_rate"] == "0.001"
    assert run.data.params["guarantee"] == "nominal"
    assert run.data.metrics["accuracy"] == records[one.id]["metrics"]["accuracy"]
    assert run.data.metrics["epsilon_pld"] == records[one.id]["privacy"]["epsilon"]["pld"]
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert [point.step for point in history] == [15, 30]


def test_mlflow_calls_a_failed_trial_failed(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    for end, status in (("finished", "FINISHED"), ("failed", "FAILED")):
        tuned = one_trial(make_tracker("mlflow", end, str(tmp_path)), end)
        _, runs = mlflow_runs(tmp_path, end)
        assert runs[tuned.ours.id].info.status == status


def test_mlflow_goes_on_with_the_run_of_a_killed_sweep(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    killed = make_tracker("mlflow", "sweep", str(tmp_path))
    tuned = IdentifiedTrial()
    killed.on_trial_start(0, [tuned], tuned)
    one_trial(make_tracker("mlflow", "sweep", str(tmp_path)))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("sweep")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"


def test_tensorboard_gets_a_folder_a_trial_that_stays(tmp_path: Path) -> None:
    tuned = one_trial(make_tracker("tensorboard", "sweep", str(tmp_path)))
    (file,) = (tmp_path / "tensorboard" / tuned.ours.id).glob("events.out.tfevents.*")
    content = file.read_bytes()
    assert b"ray/tune/accuracy" in content
    assert b"time_total_s" not in content


def test_wandb_gets_a_run_a_trial(tmp_path: Path, ray_session: None) -> None:
    pytest.importorskip("wandb")
    tuned = one_trial(make_tracker("wandb", "sweep", str(tmp_path)))
    (file,) = (tmp_path / "wandb" / tuned.ours.id).glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"accuracy" in content
    assert b"guarantee" in content


def test_a_missing_package_is_one_line_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install mlflow-skinny"):
        make_tracker("mlflow", "sweep", str(tmp_path))


def test_a_server_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match="tracker mlflow does not start"):
        make_tracker("mlflow", "sweep", str(tmp_path))


def test_tensorboard_needs_a_folder() -> None:
    with pytest.raises(UserError, match="--storage FOLDER") as error:
        make_tracker("tensorboard", "sweep", "s3://bucket/x?secret_key=abc")
    assert "abc" not in str(error.value)


def test_a_tracker_that_breaks_down_is_a_warning(tmp_path: Path) -> None:
    tracker = make_tracker("tensorboard", "sweep", str(tmp_path))
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="tracker tensorboard missed an event"):
        one_trial(tracker)
