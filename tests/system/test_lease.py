"""One driver at a time: on folders, behind URIs, after kills, and on machines that vanish."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.system import lease
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.lease import PREFIX, Claim, held, held_unless
from dpfp_ray.system.storage import Files, open_files

HOLD = (
    "import sys, time; from dpfp_ray.system.lease import held;"
    "from dpfp_ray.system.storage import open_files\n"
    "with held(open_files(sys.argv[1]), 'wait'): print('have it', flush=True); sys.stdin.read()"
)


@pytest.fixture(params=["path", "uri"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    folder = tmp_path / "store"
    return open_files(folder if request.param == "path" else folder.as_uri())


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become hundredths."""
    for name in ("BEAT", "STALE", "PATIENCE"):
        monkeypatch.setattr(lease, name, getattr(lease, name) / 100)


@pytest.fixture
def other_driver(tmp_path: Path) -> Iterator[Any]:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "store")]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "have it\n"
    yield process
    process.kill()
    process.communicate()


def test_nothing_stays_of_a_lease(place: Files) -> None:
    with held(place, "wait"):
        assert len(place.names()) == 1
    assert place.names() == []


@pytest.mark.usefixtures("hurried")
def test_the_second_driver_hears_who_has_the_place(other_driver: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=rf"in use by .* process {other_driver.pid}, .*or run away"),
        held(open_files(tmp_path / "store"), "run away"),
    ):
        raise AssertionError("two have it")


def test_the_lease_of_a_killed_driver_is_taken_over_at_once(
    other_driver: Any, tmp_path: Path
) -> None:
    other_driver.kill()
    other_driver.wait()
    with held(open_files(tmp_path / "store"), "wait"):
        assert len(open_files(tmp_path / "store").names()) == 1


def test_who_only_reads_removes_what_a_killed_driver_left(
    other_driver: Any, tmp_path: Path
) -> None:
    other_driver.kill()
    other_driver.wait()
    with held_unless(True, open_files(tmp_path / "store"), "wait"):
        assert open_files(tmp_path / "store").names() == []


def test_who_only_reads_leaves_a_living_driver_alone(other_driver: Any, tmp_path: Path) -> None:
    with held_unless(True, open_files(tmp_path / "store"), "wait"):
        assert len(open_files(tmp_path / "store").names()) == 1


def elsewhere(place: Files, beat: int = 3) -> str:
    """A claim from a machine that cannot be asked whether the process lives."""
    name = f"{PREFIX}elsewhere"
    claim = Claim("ann on far, process 7", "far", os.getpid(), "1", beat)
    place.write(name, json.dumps(vars(claim)).encode())
    return name


@pytest.mark.usefixtures("hurried")
def test_a_claim_from_another_machine_that_does_not_change_is_dead(place: Files) -> None:
    name = elsewhere(place)
    with held(place, "wait"):
        assert name not in place.names()


@pytest.mark.usefixtures("hurried")
def test_a_claim_from_another_machine_that_changes_is_alive(place: Files) -> None:
    ended = threading.Event()

    def beat() -> None:
        number = 3
        while not ended.wait(0.01):
            number += 1
            elsewhere(place, number)

    elsewhere(place)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UserError, match="in use by ann on far"), held(place, "wait"):
            raise AssertionError("two have it")
    finally:
        ended.set()
        thread.join()


@pytest.mark.usefixtures("hurried")
def test_a_driver_hears_that_it_was_taken_over(place: Files) -> None:
    heard = threading.Event()
    with held(place, "wait", on_lost=heard.set):
        place.delete(next(iter(place.names())))
        assert heard.wait(60)


def test_a_claim_that_nobody_can_read_is_not_an_error(place: Files, hurried: None) -> None:
    place.write(f"{PREFIX}odd", b"\xff{")
    with held(place, "wait"):
        assert len(place.names()) == 1


@pytest.mark.slow
def test_of_many_at_once_never_two_have_it(place: Files, hurried: None) -> None:
    inside, most = 0, 0
    counting = threading.Lock()

    def drive(_: int) -> None:
        nonlocal inside, most
        try:
            with held(place, "wait"):
                with counting:
                    inside += 1
                    most = max(most, inside)
                with counting:
                    inside -= 1
        except UserError:
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(drive, range(40)))
    assert most == 1
