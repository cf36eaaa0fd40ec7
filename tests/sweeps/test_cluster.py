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
from dpfp_ray.sweeps.cluster import (
    Resources,
    connected,
    plan_resources,
)
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.signals import Interrupted
from tests.support.ray_runs import (
    measured,
    run_plainly,
    run_script,
    trial,
)


@pytest.fixture(scope="module")
def trials(tiny_task: dict[str, Any]) -> list[Trial]:
    long = {"batch_size": 4, "epochs": 6}
    return [trial(tiny_task, learning_rate=rate, **long) for rate in (1e-3, 2e-3, 3e-3)]


@pytest.fixture(scope="module")
def outcome(ray_turn: None, trials: list[Trial], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "trials.json").write_text(json.dumps([trial.to_config() for trial in trials]))
    return run_script("ray_nodes", str(folder))


@pytest.fixture(scope="module")
def undisturbed(trials: list[Trial]) -> dict[str, Any]:
    return run_plainly(trials)


@pytest.mark.nightly
def test_trials_spread_over_the_nodes(outcome: Any) -> None:
    assert len(set(outcome["nodes"])) == 3


@pytest.mark.nightly
def test_killed_process_and_killed_node_change_nothing(
    outcome: Any, undisturbed: dict[str, Any]
) -> None:
    found = outcome["records"]
    assert found.keys() == undisturbed.keys()
    for identity, record in undisturbed.items():
        assert json.dumps(measured(found[identity])) == json.dumps(measured(record))
    assert len(set(outcome["disturbed"])) == 2
    for identity in outcome["disturbed"]:
        assert found[identity]["trial"]["resumed_at_step"] > 0


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


@pytest.fixture(scope="module")
def slow_start(ray_turn: None) -> Any:
    """What happens to a command when Ray's first two starts, or its first, take too long."""
    return run_script("ray_slow_start")


@pytest.mark.nightly
def test_a_ray_that_gives_up_at_its_start_is_started_again(slow_start: Any) -> None:
    assert slow_start["nodes"] == 1


@pytest.mark.nightly
def test_a_ray_that_gives_up_twice_is_one_line_that_says_what_to_do(slow_start: Any) -> None:
    line = slow_start["error"]
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


def test_fewer_trials_get_more_threads() -> None:
    assert plan_resources(LAPTOP, concurrency=3) == Resources(2, 0.0, 1, 3)


def test_a_worker_does_not_span_nodes() -> None:
    assert plan_resources(THREE, workers=2) == Resources(2, 0.0, 2, 1)
    assert plan_resources(THREE, workers=3) == Resources(1, 0.0, 3, 1)
    assert plan_resources(THREE, cpus=2).slots == 2


def test_concurrency_is_at_most_what_fits() -> None:
    assert plan_resources(THREE, concurrency=100) == Resources(1, 0.0, 1, 5)


def test_a_cluster_that_may_grow_is_asked_for_all_that_could_be_used() -> None:
    nobody = [{"memory": 1e9}]  # a head that runs nothing
    assert plan_resources(THREE, concurrency=100, may_grow=True) == Resources(1, 0.0, 1, 100)
    assert plan_resources(nobody, concurrency=3, may_grow=True) == Resources(1, 0.0, 1, 3)
    assert plan_resources(LAPTOP, concurrency=3, may_grow=True) == Resources(2, 0.0, 1, 3)
    assert plan_resources(THREE, may_grow=True).slots == 5  # nobody said how many
    with pytest.raises(UserError, match="do not fit"):
        plan_resources(nobody, may_grow=True)


def test_gpus_limit_and_share_the_cores() -> None:
    assert plan_resources(GPUS, gpus=1) == Resources(4, 1, 1, 8)
    assert plan_resources(GPUS, gpus=0.5).slots == 16
    assert plan_resources(GPUS, workers=4, gpus=1) == Resources(4, 1, 4, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 6}, ["6 workers of 1 CPUs", "2 CPUs, 2 CPUs, 1 CPUs", "--workers"]),
        ({"cpus": 3}, ["1 workers of 3 CPUs"]),
        ({"gpus": 1.0}, ["1 GPUs", "0 GPUs", "--gpus-per-worker"]),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, float], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        plan_resources(THREE, **options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value
