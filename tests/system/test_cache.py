"""Numbers are remembered on disk, and a bad cache costs time, never a result."""

import math
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dpfp_ray.plan.plan import Plan
from dpfp_ray.system import cache
from dpfp_ray.system.cache import NoRoom, cache_dir, cached_number, probe
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import LocalFiles
from dpfp_ray.training import run_folder
from dpfp_ray.training.run_folder import RESUME, write_weights
from tests.support.states import whole_state


class Counted:
    """A computation that knows how often it was asked."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.value


def number_files(folder: Path) -> list[Path]:
    return list((folder / "numbers").iterdir())


@pytest.mark.parametrize(
    ("given", "folder"), [("~/a/b", "a/b"), ("{home}/a/b", "a/b"), (None, ".cache/dpfp-ray")]
)
def test_the_environment_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, folder: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DPFP_CACHE")
    if given:
        monkeypatch.setenv("DPFP_CACHE", given.format(home=tmp_path))
    assert cache_dir() == tmp_path / folder
    assert cache_dir().is_dir()


def test_a_folder_that_cannot_be_made_is_the_users_to_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set DPFP_CACHE"):
        cache_dir()


@pytest.mark.parametrize("value", [0.1 + 0.2, 0.0, 1e-300, math.inf])
def test_a_number_comes_back_exactly(fresh_cache: Path, value: float) -> None:
    compute = Counted(value)
    assert cached_number("another", Counted(2.0)) == 2.0
    assert cached_number("x", compute) == value
    assert cached_number("x", compute) == value
    assert compute.calls == 1


def test_another_version_of_the_accountant_computes_again(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_number("x", Counted(1.0))
    monkeypatch.setattr(cache, "version", lambda name: "99")
    assert cached_number("x", Counted(2.0)) == 2.0


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": "x"}', '{"value": 5}'])
def test_a_damaged_file_is_computed_again(fresh_cache: Path, damage: str) -> None:
    cached_number("x", Counted(1.0))
    (file,) = number_files(fresh_cache)
    file.write_text(damage)
    assert cached_number("x", Counted(2.0)) == 2.0
    assert cached_number("x", Counted(3.0)) == 2.0


def test_a_number_that_cannot_be_kept_is_still_given(fresh_cache: Path) -> None:
    (cache_dir() / "numbers").touch()  # a file where the folder should be
    assert cached_number("x", Counted(1.0)) == 1.0


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
    run_folder.save_state(tmp_path, whole_state(plan, 3), seed=1)
    large = {**whole_state(plan, 4), "model": {"w": torch.zeros(2 * MB)}}
    with pytest.raises(NoRoom, match=r"free \d+ MB and run the same command"):
        run_folder.save_state(tmp_path, large, seed=1)
    state = run_folder.load_state(tmp_path, plan)
    assert state is not None
    assert state["progress"]["step"] == 3
    assert {path.name for path in tmp_path.iterdir()} == {RESUME}


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
