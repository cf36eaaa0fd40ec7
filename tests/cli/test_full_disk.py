"""`dpfp train` on a disk that is really full: a small tmpfs, filled before and while it runs."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import SHARED, Host, Hosts, missing
from tests.support.ray_runs import wait_for

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts are possible"),
]
RUN, TWIN = "/tmp/run", "/srv/twin"


@pytest.fixture(scope="module")
def host(
    tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Host, list[str]]]:
    """A machine whose /tmp has 30 MB, and the command to train there."""
    shared = tmp_path_factory.mktemp("shared")
    values = {**tiny_task, "epochs": 40, "batch_size": 4}
    for name in ("train_file", "dev_file", "model"):
        source = Path(values[name])
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, shared / source.name)
        values[name] = SHARED / source.name
    words = ["-m", "dpfp_ray.cli", "train", "--seed", "5", "--save-every", "0.1"]
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    with Hosts(shared, 1, tmp="30m") as hosts:
        yield hosts[0], words


def fill(host: Host) -> None:
    host.run("sh", "-c", "cat /dev/zero > /tmp/filling")


def free(host: Host) -> None:
    host.run("rm", "-f", "/tmp/filling")


def files(host: Host, folder: str) -> list[str]:
    return sorted(host.run("find", folder, "-type", "f", "-printf", "%P\n")[1].split())


def test_a_full_disk_ends_a_run_in_a_line_and_the_same_command_finishes_it(
    host: tuple[Host, list[str]],
) -> None:
    machine, words = host
    command = [*words, "--ledger", "/home/ledger", "--output"]

    fill(machine)
    before = machine.python(*command, RUN)
    said, _ = before.communicate(timeout=900)
    assert before.returncode == 2, said
    assert "no room to write" in said.splitlines()[-1]
    assert "run the same command" in said.splitlines()[-1]
    free(machine)

    during = machine.python(*command, RUN)
    wait_for(lambda: "resume.pt" in files(machine, RUN), "a saved state")
    fill(machine)
    said, _ = during.communicate(timeout=900)
    assert during.returncode == 2, said
    assert "no room to write" in said.splitlines()[-1]
    assert "Traceback" not in said
    left = files(machine, RUN)
    assert "resume.pt" in left
    assert not [name for name in left if name.split("/")[-1].startswith(".")], left
    free(machine)

    for output in (RUN, TWIN):
        ended = machine.python(*command, output)
        said, _ = ended.communicate(timeout=900)
        assert ended.returncode == 0, said
    sums = [
        machine.run("sh", "-c", f"cd {folder} && sha256sum $(find . -name '*.safetensors')")[1]
        for folder in (RUN, TWIN)
    ]
    assert sums[0] == sums[1]
    assert "safetensors" in sums[0]
