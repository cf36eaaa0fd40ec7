import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfp_ray.plan.plan import Plan
from dpfp_ray.sweeps.driver import check_seen_everywhere
from dpfp_ray.sweeps.trial import SECRET, SweepState, resolve_storage
from dpfp_ray.system.errors import UserError
from tests.support.states import flip_byte, whole_state


@pytest.fixture(params=["path", "uri"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder = tmp_path / "a sweep" if request.param == "path" else tmp_path / "sweep"
    return str(folder) if request.param == "path" else folder.as_uri()


PLAN = Plan(method="dpfp", task="sst2").bind(records=1000, representation="mean")


def state_of(step: int) -> dict[str, Any]:
    return whole_state(PLAN, step)


def test_seed_is_made_once_and_owner_only(tmp_path: Path) -> None:
    state = SweepState(str(tmp_path / "sweep"))
    seed = state.seed(None)
    assert seed.bit_length() > 64
    assert SweepState(str(tmp_path / "sweep")).seed(None) == seed
    path = tmp_path / "sweep" / SECRET
    assert os.stat(path).st_mode & 0o777 == 0o600
    state.forget()
    assert not path.exists()
    assert state.seed(None) != seed


def test_given_seed_is_not_written(tmp_path: Path) -> None:
    assert SweepState(str(tmp_path)).seed(12345678901) == 12345678901
    assert all(b"12345678901" not in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("first", "then", "fix"),
    [(7, 8, "give the --seed"), (7, None, "give the --seed"), (None, 8, "drop --seed")],
)
def test_a_seed_other_than_the_unfinished_sweeps_is_refused(
    storage: str, first: int | None, then: int | None, fix: str
) -> None:
    seed = SweepState(storage).seed(first)
    with pytest.raises(UserError, match=f"unfinished sweep .*{fix}"):
        SweepState(storage).seed(then)
    assert SweepState(storage).seed(first) == seed
    SweepState(storage).forget()
    SweepState(storage).seed(then)


# b"5": a seed of which only the first digit is left is a number, too
@pytest.mark.parametrize("content", [b"", b"12", b"what", b"5"])
def test_a_damaged_seed_is_found_again(tmp_path: Path, content: bytes) -> None:
    seed = SweepState(str(tmp_path)).seed(None)
    kept = (tmp_path / SECRET).read_bytes()
    (tmp_path / SECRET).write_bytes(content if content != b"12" else b"12" + kept[2:])
    assert SweepState(str(tmp_path)).seed(None) == seed


def test_a_lost_seed_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / SECRET).touch()
    with pytest.raises(UserError, match=r"sweep\.secret is damaged; restore"):
        SweepState(str(tmp_path)).seed(None)


def test_a_damaged_search_gives_way_to_the_one_before(tmp_path: Path) -> None:
    states = SweepState(str(tmp_path))
    states.save_search("k", [{"id": "a"}])
    states.save_search("k", [{"id": "a"}, {"id": "b"}])
    flip_byte(tmp_path / "search-k.json", 0.3)
    assert states.load_search("k") == [{"id": "a"}]


def test_all_that_is_unfinished_is_the_owners_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        states = SweepState(str(tmp_path / "sweep"))
        states.seed(None)
        states.save_trial("t-0", state_of(3), seed=1)
        states.save_trial("t-0", state_of(4), seed=1)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "sweep").rglob("*.*")}
    assert modes == {0o600}
    for folder in ("sweep", "sweep/states"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("call", ["link", "fsync", "unlink"])
def test_a_kill_while_the_seed_is_written_leaves_none(tmp_path: Path, call: str) -> None:
    killed_there = f"""
import os
from dpfp_ray.sweeps.trial import SweepState
real = os.{call}
def killed(*arguments, **named):
    real(*arguments, **named) if "{call}" != "unlink" else None
    os._exit(9)
os.{call} = killed
SweepState({str(tmp_path)!r}).seed(None)
"""
    ended = subprocess.run([sys.executable, "-c", killed_there], check=False)
    assert ended.returncode == 9
    assert list(tmp_path.iterdir())  # the kill left something
    state = SweepState(str(tmp_path))
    state.seed(None)
    state.forget()
    assert not list(tmp_path.iterdir())


def test_trial_state_comes_back(storage: str) -> None:
    states = SweepState(storage)
    assert states.load_trial("t-0", seed=1, plan=PLAN) is None
    states.save_trial("t-0", state_of(3), seed=1)
    states.save_trial("t-0", state_of(4), seed=1)
    found = states.load_trial("t-0", seed=1, plan=PLAN)
    assert found is not None
    assert found["progress"]["step"] == 4
    assert torch.equal(found["model"]["w"], torch.arange(3.0))
    states.drop_trial("t-0")
    states.drop_trial("t-0")
    assert states.load_trial("t-0", seed=1, plan=PLAN) is None


def test_state_of_another_seed_is_not_taken_up(storage: str) -> None:
    states = SweepState(storage)
    states.save_trial("t-0", state_of(3), seed=1)
    assert states.load_trial("t-0", seed=2, plan=PLAN) is None


def test_search_is_kept(storage: str) -> None:
    states = SweepState(storage)
    assert states.load_search("k") == []
    states.save_search("k", [{"id": "a", "values": [0.5]}])
    assert states.load_search("k") == [{"id": "a", "values": [0.5]}]
    states.forget()
    assert states.load_search("k"), "more samples may be asked for later"


def test_relative_storage_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_storage("runs/x") == str(tmp_path / "runs/x")
    assert resolve_storage("s3://bucket/x") == "s3://bucket/x"


def test_a_store_that_a_node_does_not_see_is_refused(ray_session: None, tmp_path: Path) -> None:
    import ray

    with pytest.raises(UserError, match=r"is not the same folder on .*; use one that all machines"):
        check_seen_everywhere(str(tmp_path), "marker", ray.nodes())
    (tmp_path / "marker").touch()
    check_seen_everywhere(str(tmp_path), "marker", ray.nodes())


def test_a_node_that_has_left_since_need_not_see_the_store(
    ray_session: None, tmp_path: Path
) -> None:
    check_seen_everywhere(str(tmp_path), "marker", [{"NodeID": "ab" * 28}])
