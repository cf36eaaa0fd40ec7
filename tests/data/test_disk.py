"""Disks without room, as a limit on the size of files makes them."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dpfp_ray.data.disk import NoRoom, probe
from dpfp_ray.data.storage import LocalFiles
from dpfp_ray.plan.plan import Plan
from dpfp_ray.training import checkpoints
from dpfp_ray.training.checkpoints import RESUME
from dpfp_ray.training.weights import write_weights
from tests.support.states import whole_state

MB = 10**6


@pytest.fixture
def little_room() -> Iterator[None]:
    """No file of this process may grow beyond 3 MB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("little_room")
def test_what_does_not_fit_is_known_beforehand(tmp_path: Path) -> None:
    probe(tmp_path, 2 * MB)
    with pytest.raises(NoRoom, match="free 9 MB and run the same command"):
        probe(tmp_path, 9 * MB)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("little_room")
def test_a_save_without_room_leaves_the_last_state_and_nothing_else(tmp_path: Path) -> None:
    plan = Plan(method="dpfp", task="sst2").bind(records=1000, representation="mean")
    checkpoints.save_state(tmp_path, whole_state(plan, 3), seed=1)
    large = {**whole_state(plan, 4), "model": {"w": torch.zeros(2 * MB)}}
    with pytest.raises(NoRoom, match=r"free \d+ MB and run the same command"):
        checkpoints.save_state(tmp_path, large, seed=1)
    state = checkpoints.load_state(tmp_path, plan)
    assert state is not None
    assert state["progress"]["step"] == 3
    assert {path.name for path in tmp_path.iterdir()} == {RESUME, f"{RESUME}.previous"}


@pytest.mark.usefixtures("little_room")
def test_weights_without_room_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoRoom, match="free 8 MB and run the same command"):
        write_weights(tmp_path / "w.safetensors", {"w": torch.zeros(2 * MB)}, "plan")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoRoom, match=r"cannot write .*Not a directory"):
        LocalFiles(tmp_path / "file").write("x", b"")
    with pytest.raises(NoRoom, match="cannot write"):
        probe(tmp_path / "gone", 1)
