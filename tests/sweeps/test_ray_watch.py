"""A Ray that dies under the work is one line, soon."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
from ray._private import worker
from dpfp_ray.plan.errors import UserError
from dpfp_ray.sweeps.cluster import connected, settings
def wait():
    time.sleep(600)

try:
    with settings(), connected("local", cpus=1):
        import ray
        [(name, process)] = [
            (name, infos[0].process)
            for name, infos in worker._global_node.all_processes.items()
            if name == sys.argv[1]
        ]
        process.kill()
        ray.get(ray.remote(wait).remote())
except UserError as error:
    print(error, file=sys.stderr)
    raise SystemExit(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_dead_part_of_ray_is_one_line_and_not_a_minute(ray_turn: None, part: str) -> None:
    end = subprocess.run(
        [sys.executable, "-c", SCRIPT, part], capture_output=True, text=True, timeout=600
    )
    assert end.returncode == 2, end.stderr
    assert f"Ray's {part} on this machine has died" in end.stderr
    assert "the same command continues" in end.stderr
    assert "Traceback" not in end.stderr
