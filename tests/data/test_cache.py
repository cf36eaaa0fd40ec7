"""Numbers are remembered on disk, and a bad cache costs time, never a result."""

import math
import threading
from pathlib import Path

import pytest

from dpfp_ray.data import cache
from dpfp_ray.data.cache import cache_dir, cached_number
from dpfp_ray.plan.errors import UserError


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


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b"
    assert cache_dir().is_dir()


def test_the_folder_is_in_the_users_cache_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPFP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "dpfp-ray"


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DPFP_CACHE", "~/here")
    assert cache_dir() == tmp_path / "here"


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
    assert cached_number("x", compute) == value
    assert cached_number("x", compute) == value
    assert compute.calls == 1


def test_keys_are_apart(fresh_cache: Path) -> None:
    assert cached_number("x", Counted(1.0)) == 1.0
    assert cached_number("y", Counted(2.0)) == 2.0


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


def test_nothing_is_kept_of_a_computation_that_fails(fresh_cache: Path) -> None:
    def fail() -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached_number("x", fail)
    assert cached_number("x", Counted(1.0)) == 1.0


def test_many_writers_leave_one_whole_file(fresh_cache: Path) -> None:
    threads = [threading.Thread(target=cached_number, args=("x", Counted(1.5))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(number_files(fresh_cache)) == 1
    assert cached_number("x", Counted(9.9)) == 1.5
