"""A Ray that dies under the work is one line, soon, and the same command goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.sweeps.cluster import ray_folder
from tests.support.ray_runs import (
    SEED,
    Command,
    measured,
    records,
    sweep_here,
    wait_for,
    write_space,
)

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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def space(tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_space(
        tmp_path_factory.mktemp("space") / "s.yaml",
        tiny_task,
        method="grid",
        parameters={"learning_rate": {"values": [1e-3, 1e-2]}},
        plan={"epochs": 5, "batch_size": 4},
    )


@pytest.fixture(scope="module")
def unbroken(ray_session: None, space: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = sweep_here(space, tmp_path_factory.mktemp("unbroken"))
    return {identity: measured(record) for identity, record in found.items()}


@pytest.mark.cluster
@pytest.mark.parametrize(("part", "damaged"), [("raylet", False), ("gcs_server", True)])
def test_the_same_command_gives_the_records_of_an_unbroken_sweep(
    ray_turn: None, space: Path, unbroken: Any, tmp_path: Path, part: str, damaged: bool
) -> None:
    storage = tmp_path / "runs"
    command = ["sweep", str(space), "--storage", str(storage), "--seed", str(SEED)]
    command += ["--ledger", str(tmp_path / "ledger"), "--cpus-per-worker", "1"]
    first = Command(*command, "--concurrency", "1")
    wait_for(lambda: list(storage.glob("states/*.pt")), "a saved state")
    (victim,) = [one for one in first.others() if program(one) == part]
    os.kill(victim, signal.SIGKILL)
    code, said = first.end()
    assert code == 2, said
    assert f"Ray's {part} on this machine has died" in said.splitlines()[-1]
    assert "Traceback" not in said
    if damaged:
        for state in storage.glob("states/*"):
            state.write_bytes(b"damaged")
    before = sessions()
    code, said = Command(*command).end()
    assert code == 0, said
    assert sessions() == before  # nothing of Ray's stays after a normal end
    assert {k: measured(r) for k, r in records(storage).items()} == unbroken
    assert ("is damaged" in said and "from the start" in said) == damaged


def sessions() -> set[Path]:
    return {path for path in ray_folder().glob("session_*") if not path.is_symlink()}


def program(process: int) -> str:
    return Path(f"/proc/{process}/exe").resolve().name
