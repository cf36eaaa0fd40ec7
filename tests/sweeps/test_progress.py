"""What people see of a running sweep: live table, gauges with few and public tags, trackers."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dpfp_ray.plan.plan import ACCOUNTANTS, Plan
from dpfp_ray.sweeps import progress
from dpfp_ray.sweeps.progress import (
    GAUGES,
    STATUSES,
    LiveTable,
    Tracked,
    TrialCounts,
    TrialGauges,
    make_tracker,
    trial_tags,
)
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.system.errors import UserError
from tests.support.ray_runs import run_here
from tests.support.ray_runs import trial as bound_trial
from tests.support.result_records import make_record
from tests.support.tune_trial import TuneTrial


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "stderr", Console(file=stream, width=120, highlight=False))
    return stream


def table(total: int = 4, done: int = 0) -> LiveTable:
    return LiveTable("title", total, done, ["learning_rate"])


def test_one_line_a_trial_with_the_right_count(output: io.StringIO) -> None:
    ends = [("finished", {"accuracy": 0.5, "epsilon": 3.0, "guarantee": "nominal"})]
    ends += [("running", {"accuracy": 0.25, "epsilon": 1.5}), ("failed", {"error": "no luck"})]
    with table(total=4, done=1) as shown:
        for number, (status, result) in enumerate(ends):
            trial = TuneTrial(10.0 ** -(3 + number), **result)
            trial.last_result["status"] = status
            shown.on_trial_complete(0, [trial], trial)
    assert output.getvalue().splitlines() == [
        "1 of 4 trials are finished already",
        "[2/4]  learning_rate 0.001  done  accuracy 0.5000  ε 3.000†",
        "[3/4]  learning_rate 0.0001  stopped  accuracy 0.2500  ε 1.500",
        "[4/4]  learning_rate 1e-05  failed: no luck",
    ]


def test_table_shows_running_trials_and_the_best() -> None:
    shown = table()
    trials = [
        TuneTrial(1e-3, "TERMINATED", accuracy=0.75, epsilon=3.0, epoch=3),
        TuneTrial(1e-4, "TERMINATED", accuracy=0.5, epsilon=3.0, epoch=3),
        TuneTrial(1e-5, accuracy=0.6, epsilon=1.0, epoch=1),
        TuneTrial(1e-6),
        TuneTrial(1e-7, "PENDING"),
    ]
    for trial, status in zip(trials, ("finished", "finished", "running"), strict=False):
        trial.last_result["status"] = status
    shown.trials, shown.done = trials, 2
    stream = io.StringIO()
    Console(file=stream, width=120).print(shown.table())
    text = stream.getvalue()
    assert "2 of 4 done, 2 running, best 0.7500" in text
    assert "left" not in text.replace("time left ┃", ""), "nothing is known of any trial's time"
    lines = [line for line in text.splitlines() if "│" in line]
    assert ["running" in lines[0], "starts" in lines[1], "0.7500" in lines[2]] == [True] * 3
    assert len(lines) == 4, "pending trials are only counted"


def test_without_a_terminal_a_line_a_minute_says_how_it_stands(
    output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(progress, "LINE_EVERY_SECONDS", 0.0)
    trials = [TuneTrial(1e-3), TuneTrial(2e-3, "TERMINATED", accuracy=0.8)]
    with LiveTable("mine", 5, 0, ["learning_rate"]) as shown:
        shown.on_step_end(1, trials)
        trials[0].last_result = {"epoch": 2, "seconds": 100.0, "status": "running"}
        trials[0].config["trial"]["plan"]["epochs"] = 4
        shown.on_step_end(2, trials)
    assert output.getvalue().splitlines() == [
        "0 of 5 done, 1 running, best 0.8000, 0:00 gone",
        # 100 s for its other half, then four trials of 200 s.
        "0 of 5 done, 1 running, best 0.8000, 0:00 gone, time left 15:00",
        "    learning_rate 0.001  epoch 2 of 4  time left 1:40",
    ]


def in_epoch(epoch: int, seconds: float, status: str = "RUNNING") -> TuneTrial:
    said = {"status": "finished" if status == "TERMINATED" else "running", "accuracy": 0.5}
    trial = TuneTrial(1e-3, status, epoch=epoch, seconds=seconds, **said)
    trial.config["trial"]["plan"]["epochs"] = 4
    return trial


def test_time_left_is_that_of_the_trials_that_run_and_of_those_that_wait() -> None:
    shown = table(total=3, done=0)
    shown.trials = [in_epoch(1, 30.0), TuneTrial(2e-3), TuneTrial(3e-3, "PENDING")]
    # 90 s of 120 are left of the first; the second has said nothing, and counts as another such.
    assert shown.seconds_left() == pytest.approx(90 + 120)
    shown.heard_at[id(shown.trials[0])] = progress.time.monotonic() - 60
    assert shown.seconds_left() == pytest.approx(30 + 120, abs=1)
    shown.trials, shown.done = [in_epoch(4, 100.0, "TERMINATED"), TuneTrial(2e-3)], 1
    assert shown.seconds_left() == pytest.approx(200)


def test_a_sweep_that_goes_on_knows_how_long_its_trials_took() -> None:
    shown = LiveTable("title", 4, 2, [], seconds=[50.0, 70.0])
    shown.trials = [TuneTrial(1e-3)]
    assert shown.seconds_left() == pytest.approx(120)


@pytest.mark.parametrize("width", [80, 120])
def test_no_row_of_the_table_is_broken(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    monkeypatch.setattr(progress, "stderr", console)
    varied = ["method", "model", "learning_rate", "batch_size", "micro_batches", "epsilon"]
    shown = LiveTable("a-sweep-with-a-very-long-name-" * 5, 400, 0, varied)
    shown.trials = [in_epoch(1, 3000.0), in_epoch(4, 9000.0, "TERMINATED")]
    for trial in shown.trials:
        trial.config["trial"]["plan"]["model"] = "/shared/models/all-MiniLM-L6-v2-of-mine"
    console.print(shown.table())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 8, "title, heading, a line for each of two trials, summary"
    assert max(map(len, lines)) <= width
    assert "time left ┃" in lines[2]
    assert " 2:30:00 " in lines[4]
    assert ("learning_rate" in lines[2]) == (width == 120)
    assert "0.5000" in lines[4]
    assert "time left" in lines[-1]


def test_a_long_line_on_a_terminal_breaks_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, highlight=False)
    monkeypatch.setattr(progress, "stderr", console)
    shown, trial = table(), TuneTrial(1e-5, error="a reason that goes on and on " * 5)
    trial.last_result["status"] = "failed"
    shown.on_trial_complete(0, [trial], trial)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert words == f"[1/4] learning_rate 1e-05 failed: {trial.last_result['error']}".split()


def test_a_warning_is_shown_once_and_a_restart_with_its_reason(output: io.StringIO) -> None:
    ended_without_need = TuneTrial(1e-4, "ERROR")
    ended_without_need.num_failures = 1
    with table() as shown:
        trial = TuneTrial(1e-3, accuracy=0.5)
        for _ in range(2):
            shown.on_trial_result(0, [trial], trial, {"warning": "states/x.pt is damaged"})
            shown.on_trial_recover(0, [trial], trial)
        shown.on_trial_error(0, [ended_without_need], ended_without_need)
    assert output.getvalue().splitlines() == [
        "warning: states/x.pt is damaged",
        "again:  learning_rate 0.001  the worker died",
        "again:  learning_rate 0.0001  the worker died",
    ]
    assert shown.done == 0


Shown = dict[tuple[str, ...], float]


@pytest.fixture
def gauges_shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Value by (gauge, tag values in the gauge's order), in place of Ray's."""
    values: Shown = {}

    def put(name: str, value: float | None, tags: dict[str, str]) -> None:
        assert set(tags) == set(GAUGES[name][1])
        if value is not None:
            values[name, *(tags[key] for key in GAUGES[name][1])] = value

    monkeypatch.setattr(progress, "put", put)
    return values


def bound(**values: Any) -> Plan:
    return Plan(**values).bind(records=1000, representation="mean")


def gauges_of(plan: Plan, silent: bool = False) -> TrialGauges:
    return TrialGauges(Trial(plan, 0.5), "a sweep", silent)


def test_a_sealed_trial_has_no_gauges(gauges_shown: Shown) -> None:
    gauges_of(bound(method="dpfp"), silent=True).report(make_record("t"))
    assert gauges_shown == {}


def test_tags_hold_no_path_and_no_model() -> None:
    plan = bound(train_file="/home/me/secret.csv", dev_file="/home/me/dev.csv", model="/home/me/m")
    text = " ".join(trial_tags(plan, "abc-0", "sweep").values())
    assert "/" not in text
    assert "me" not in text


def test_epsilon_is_nominal_for_the_papers_mode_and_proved_for_dpsgd_but_not_by_clt(
    gauges_shown: Shown,
) -> None:
    for method in ("dpfp", "dpsgd"):
        gauges_of(bound(method=method)).report(make_record(method=method))
    guarantees = {(k[3], k[-1]): k[-2] for k in gauges_shown if k[0] == "dpfp_epsilon_spent"}
    assert {guarantees["dpfp", name] for name in ACCOUNTANTS} == {"nominal"}
    assert {name: guarantees["dpsgd", name] for name in ACCOUNTANTS} == {
        "gdp": "nominal",
        "rdp": "proved",
        "pld": "proved",
    }


def test_a_report_shows_everything_of_the_last_epoch(gauges_shown: Shown) -> None:
    record = make_record()
    record["metrics"] |= {"accuracy": 0.9, "accuracy_last": 0.8}
    gauges_of(bound()).report(record)
    trial_gauges = {name for name, (_, tags) in GAUGES.items() if "trial" in tags}
    assert {key[0] for key in gauges_shown} == trial_gauges
    assert {v for k, v in gauges_shown.items() if k[0] == "dpfp_accuracy"} == {0.8}


def test_a_save_shows_the_middle_of_an_epoch(gauges_shown: Shown) -> None:
    done = {"step": 3, "rows": 60, "train_seconds": 2.0}
    state = {"epsilon": {"pld": 0.5}, "progress": done, "loss_sum": 10.0, "loss_rows": 20}
    gauges_of(bound()).save(state)
    values = {key[0]: value for key, value in gauges_shown.items()}
    assert values["dpfp_loss"] == 0.5
    assert values["dpfp_examples_per_second"] == 30.0
    assert values["dpfp_step"] == 3
    assert "dpfp_accuracy" not in values


def test_ray_takes_every_gauge_and_its_tags(ray_session: None, recwarn: Any) -> None:
    for name, (_, tags) in GAUGES.items():
        progress.put(name, 1.0, dict.fromkeys(tags, "x"))
    assert not recwarn.list


def counted(status: str, last: str | None = None, failures: int = 0) -> TuneTrial:
    trial = TuneTrial(1e-3, status, status=last)
    trial.num_failures = failures
    return trial


def test_trials_are_counted_by_status_with_zeros(gauges_shown: Shown) -> None:
    trials = [counted("PENDING"), counted("RUNNING", failures=2), counted("ERROR")]
    trials += [counted("TERMINATED", "finished"), counted("TERMINATED", "running")]
    TrialCounts("s", 9).on_step_end(0, trials)
    counts = {status: gauges_shown["dpfp_trials", "s", "dpfp", status] for status in STATUSES}
    assert counts == dict.fromkeys(STATUSES, 1) | {"refused": 0}
    assert gauges_shown["dpfp_trials_planned", "s"] == 9
    assert gauges_shown["dpfp_restarts", "s", "dpfp"] == 2


def test_a_sweep_that_goes_on_counts_on(gauges_shown: Shown) -> None:
    plan = bound()
    settled = {"plan": plan.to_dict(), "trial": {"id": "a", "status": "finished"}}
    unsettled = {"plan": plan.to_dict(), "trial": {"id": "b", "status": "running"}}
    counts = TrialCounts("s", 2, [settled, unsettled])
    counts.on_trial_complete(0, [counted("TERMINATED", "stopped")], None)
    assert gauges_shown["dpfp_trials", "s", "dpfp", "finished"] == 1
    assert gauges_shown["dpfp_trials", "s", "dpfp", "running"] == 0


# --- trackers, each the real thing, writing to this machine

RESULT = {"status": "running", "step": 30, "epoch": 1, "accuracy": 0.75, "loss": 0.5}
RESULT |= {"epsilon": 2.0, "epsilon_gdp": 2.0, "time_total_s": 12.0}


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


def identified() -> TuneTrial:
    trial: Any = TuneTrial(1e-3)
    trial.trial_id = "tune-1"
    return trial


def one_trial(tracker: Tracked, end: str = "finished") -> TuneTrial:
    """Tune's events of one trial."""
    tuned = identified()
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
    one, other = bound_trial(tiny_task), bound_trial(tiny_task, learning_rate=2e-3)
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


def test_mlflow_calls_a_failed_trial_failed_and_goes_on_with_the_run_of_a_killed_sweep(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mlflow")
    for end, status in (("finished", "FINISHED"), ("failed", "FAILED")):
        killed, trial = make_tracker("mlflow", end, str(tmp_path)), identified()
        killed.on_trial_start(0, [trial], trial)
        tuned = one_trial(make_tracker("mlflow", end, str(tmp_path)), end)
        client, runs = mlflow_runs(tmp_path, end)
        assert runs[tuned.ours.id].info.status == status
        experiment = client.get_experiment_by_name(end)
        assert len(client.search_runs([experiment.experiment_id])) == 1


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
