"""Several nodes, and what survives when parts of them are killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.sweeps import cluster
from dpfp_ray.sweeps.cluster import SETTINGS, connected, settings
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import Interrupted
from tests.support.ray_runs import measured, run_plainly, run_script, trial


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


def test_trials_spread_over_the_nodes(outcome: Any) -> None:
    assert len(set(outcome["nodes"])) == 3


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


def test_settings_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_DEDUP_LOGS", "1")
    monkeypatch.delenv("RAY_AIR_NEW_OUTPUT", raising=False)
    with settings():
        assert os.environ["RAY_DEDUP_LOGS"] == "1", "the user's own choice stays"
        assert os.environ["RAY_AIR_NEW_OUTPUT"] == SETTINGS["RAY_AIR_NEW_OUTPUT"]
    assert "RAY_AIR_NEW_OUTPUT" not in os.environ


def test_a_session_that_is_there_is_used_and_left(ray_session: None) -> None:
    import ray

    with settings(), connected("local"):
        assert ray.is_initialized()
    assert ray.is_initialized()


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


def test_a_ray_that_gives_up_at_its_start_is_started_again(slow_start: Any) -> None:
    assert slow_start["nodes"] == 1


def test_a_ray_that_gives_up_twice_is_one_line_that_says_what_to_do(slow_start: Any) -> None:
    line = slow_start["error"]
    assert "Ray did not start on this machine, twice" in line
    assert "--address auto" in line
    assert "\n" not in line


def test_a_session_that_ended_well_leaves_no_folder(slow_start: Any) -> None:
    """That of the start that failed stays, with the logs that tell why."""
    assert slow_start["folders"] == 1


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
