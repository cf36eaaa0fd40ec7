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


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A machine whose /tmp has 30 MB."""
    with Hosts(tmp_path, 1, tmp="30m") as hosts:
        yield hosts[0]


def command_of(task: dict[str, Any], shared: Path) -> list[str]:
    values = {**task, "epochs": 40, "batch_size": 4}
    for name in ("train_file", "dev_file", "model"):
        source = Path(values[name])
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, shared / source.name)
        values[name] = SHARED / source.name
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    fixed = ["--seed", "5", "--save-every", "0.1", "--ledger", "/home/ledger"]
    return ["-m", "dpfp_ray.cli", "train", *flags, *fixed, "--output"]


def files(host: Host, folder: str) -> list[str]:
    return sorted(host.run("find", folder, "-type", "f", "-printf", "%P\n")[1].split())


def test_a_full_disk_ends_a_run_in_a_line_and_the_same_command_finishes_it(
    host: Host, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    command = command_of(tiny_task, tmp_path)
    for full in ("before", "while it runs"):
        if full == "before":
            host.run("sh", "-c", "cat /dev/zero > /tmp/filling")
        process = host.python(*command, RUN)
        if full != "before":
            wait_for(lambda: "resume.pt" in files(host, RUN), "a saved state")
            host.run("sh", "-c", "cat /dev/zero > /tmp/filling")
        said, _ = process.communicate(timeout=900)
        assert process.returncode == 2, said
        assert "no room to write" in said.splitlines()[-1]
        assert "run the same command" in said.splitlines()[-1] or full != "before"
        assert "Traceback" not in said
        host.run("rm", "-f", "/tmp/filling")
    left = files(host, RUN)
    assert "resume.pt" in left
    assert not [name for name in left if name.split("/")[-1].startswith(".")], left

    sums = []
    for output in (RUN, TWIN):
        process = host.python(*command, output)
        said, _ = process.communicate(timeout=900)
        assert process.returncode == 0, said
        find = f"cd {output} && sha256sum $(find . -name '*.safetensors')"
        sums.append(host.run("sh", "-c", find)[1])
    assert sums[0] == sums[1]
    assert "safetensors" in sums[0]
