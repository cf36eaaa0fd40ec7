"""Connecting to Ray, what nodes give to trials, and what survives when parts are killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.sweeps import cluster
from dpfp_ray.sweeps.cluster import Resources, connected, plan_resources
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.signals import Interrupted
from tests.support.ray_runs import measured, run_plainly, run_script, trial


def outcome_of(script: str, trials: list[Trial], folder: Path) -> Any:
    """What a script says of these trials on a cluster of its own; their records must be those of
    runs that nothing disturbed."""
    (folder / "trials.json").write_text(json.dumps([trial.to_config() for trial in trials]))
    outcome = run_script(script, str(folder))
    alone = run_plainly(trials)
    assert outcome["records"].keys() == alone.keys()
    for identity, record in alone.items():
        assert json.dumps(measured(outcome["records"][identity])) == json.dumps(measured(record))
    return outcome


def long_trials(task: dict[str, Any], count: int) -> list[Trial]:
    rates = [1e-3 * (1 + number) for number in range(count)]
    return [trial(task, learning_rate=rate, batch_size=4, epochs=6) for rate in rates]


@pytest.mark.nightly
def test_trials_spread_over_nodes_and_a_killed_process_and_a_killed_node_change_nothing(
    ray_turn: None, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    outcome = outcome_of("ray_nodes", long_trials(tiny_task, 3), tmp_path)
    assert len(set(outcome["nodes"])) == 3
    assert len(set(outcome["disturbed"])) == 2
    for identity in outcome["disturbed"]:
        assert outcome["records"][identity]["trial"]["resumed_at_step"] > 0


@pytest.mark.nightly
def test_a_sweep_brings_nodes_up_to_its_concurrency_and_gives_them_back(
    ray_turn: None, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    outcome = outcome_of("ray_growing", long_trials(tiny_task, 4), tmp_path)
    assert outcome["most"] == 3, "the head and one node for each trial at a time"
    assert outcome["left"] == 1


def test_no_cluster_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def refuse(**options: Any) -> None:
        assert options["address"] == "auto"
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify the one")

    monkeypatch.setattr(ray, "init", refuse)
    words = r"cannot reach Ray at auto: Could not find .* the one"
    with pytest.raises(UserError, match=words), connected("auto"):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_one_quick_line(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=f"cannot reach Ray at {address}"), connected(address):
        pass


@pytest.mark.nightly
def test_a_ray_that_gives_up_at_its_start_is_started_again_once(ray_turn: None) -> None:
    slow_start = run_script("ray_slow_start")
    assert slow_start["nodes"] == 1
    line = slow_start["error"]  # when the first two starts took too long
    assert "Ray did not start on this machine, twice" in line
    assert "--address auto" in line
    assert "\n" not in line


LISTENERS = """
import json, os, psutil
from dpfp_ray.sweeps.cluster import connected, settings

with settings(), connected("local", cpus=1):
    import ray
    ray.get(ray.remote(lambda: 1).remote())
    mode = os.environ["RAY_AUTH_MODE"]
    me = psutil.Process()
    hosts = [
        connection.laddr.ip
        for process in (me, *me.children(recursive=True))
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
print(json.dumps([hosts, mode, os.environ.get("RAY_AUTH_MODE")]))
"""


@pytest.mark.slow
def test_a_ray_of_our_own_listens_to_this_machine_only_and_wants_a_token(
    ray_turn: None, tmp_path: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    end = subprocess.run(
        [sys.executable, "-c", LISTENERS],
        env={**kept, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert end.returncode == 0, end.stderr
    hosts, mode, afterwards = json.loads(end.stdout.splitlines()[-1])
    assert set(hosts) == {"127.0.0.1", "::ffff:127.0.0.1"}
    assert (mode, afterwards) == ("token", None)
    assert (tmp_path / ".ray" / "auth_token").exists()


def test_sigterm_while_ray_starts_is_ours_and_no_silent_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ray.init` puts a handler of its own in place, which calls sys.exit."""
    import ray

    def ray_init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "init", ray_init)
    with pytest.raises(Interrupted) as stop:
        cluster.init({})
    assert stop.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


SCRIPT = """
import sys, time
from ray._private import worker
from dpfp_ray.system.errors import UserError
from dpfp_ray.sweeps.cluster import connected, settings
def wait():
    time.sleep(600)

def kill():
    [info] = worker._global_node.all_processes[sys.argv[1]]
    info.process.kill()

def kill_and_connect(*options, **more):
    kill()
    return connect(*options, **more)

connect = worker.connect
if sys.argv[2] == "at its start":
    worker.connect = kill_and_connect
try:
    with settings(), connected("local", cpus=1):
        import ray
        kill()
        ray.get(ray.remote(wait).remote())
except UserError as error:
    print(error, file=sys.stderr)
    raise SystemExit(2)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "when"),
    [("raylet", "later"), ("gcs_server", "later"), ("gcs_server", "at its start")],
)
def test_a_dead_part_of_ray_is_one_line_and_not_a_minute(
    ray_turn: None, part: str, when: str
) -> None:
    end = subprocess.run(
        [sys.executable, "-c", SCRIPT, part, when], capture_output=True, text=True, timeout=600
    )
    assert end.returncode == 2, end.stderr
    assert f"Ray's {part} on this machine has died" in end.stderr
    assert "the same command continues" in end.stderr
    assert "Traceback" not in end.stderr


LAPTOP = [{"CPU": 8.0, "memory": 1e9}]
THREE = [{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0}]
GPUS = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 4.0}]


@pytest.mark.parametrize(
    ("nodes", "options", "expected"),
    [
        (LAPTOP, {"concurrency": 3}, Resources(2, 0.0, 1, 3)),  # fewer trials: more threads
        (THREE, {"workers": 2}, Resources(2, 0.0, 2, 1)),  # a worker does not span nodes
        (THREE, {"workers": 3}, Resources(1, 0.0, 3, 1)),
        (THREE, {"cpus": 2}, Resources(2, 0.0, 1, 2)),
        (THREE, {"concurrency": 100}, Resources(1, 0.0, 1, 5)),  # at most what fits
        (GPUS, {"gpus": 1}, Resources(4, 1, 1, 8)),  # GPUs limit and share the cores
        (GPUS, {"gpus": 0.5}, Resources(2, 0.5, 1, 16)),
        (GPUS, {"gpus": 0.6}, Resources(4, 0.6, 1, 8)),  # a share lies on one GPU
        (GPUS, {}, Resources(4, 1, 1, 8)),  # one for each trial where there are any
        (GPUS, {"gpus": 0}, Resources(1, 0, 1, 32)),
        (GPUS, {"workers": 4, "gpus": 1}, Resources(4, 1, 4, 2)),
    ],
)
def test_nodes_are_filled_and_not_oversubscribed(
    nodes: Any, options: dict[str, Any], expected: Resources
) -> None:
    assert plan_resources(nodes, **options) == expected


def test_a_cluster_that_may_grow_is_asked_for_all_that_could_be_used() -> None:
    nobody = [{"memory": 1e9}]  # a head that runs nothing
    assert plan_resources(THREE, concurrency=100, may_grow=True) == Resources(1, 0.0, 1, 100)
    assert plan_resources(nobody, concurrency=3, may_grow=True) == Resources(1, 0.0, 1, 3)
    assert plan_resources(LAPTOP, concurrency=3, may_grow=True) == Resources(2, 0.0, 1, 3)
    assert plan_resources(THREE, may_grow=True).slots == 5  # nobody said how many
    with pytest.raises(UserError, match="do not fit"):
        plan_resources(nobody, may_grow=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 6}, ["6 workers of 1 CPUs", "2 CPUs, 2 CPUs, 1 CPUs", "--workers"]),
        ({"cpus": 3}, ["1 workers of 3 CPUs"]),
        ({"gpus": 1.0}, ["1 GPUs", "0 GPUs", "--gpus-per-worker"]),
        ({"gpus": 1.5}, ["gpus_per_worker is 1.5; give a whole number, or a part of one GPU"]),
        ({"gpus": -1}, ["gpus_per_worker is -1"]),
        ({"gpus": 0.5, "workers": 2}, ["NCCL wants a GPU for each of them"]),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, float], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        plan_resources(THREE, **options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_logical_gpus_that_torch_does_not_see(ray_turn: None, tmp_path: Path) -> None:
    found = run_script("ray_gpus", str(tmp_path))
    assert found["default"]["slots"] == 4
    for status, error, _ in found["default"]["ends"]:
        assert status == "failed"
        assert error.startswith("a GPU is assigned, and torch 2.")
    assert [end[::2] for end in found["none"]["ends"]] == [["finished", "cpu"]] * 2
    assert found["unseen"].startswith("the workers did not start: a GPU is assigned, and torch 2.")
    assert found["1.5"].startswith("gpus_per_worker is 1.5; give a whole number")
    assert "NCCL wants a GPU for each of them" in found["half"]
    assert found["many"].startswith("5 workers of 1 CPUs and 1 GPUs each do not fit the cluster")
