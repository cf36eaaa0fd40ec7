import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfp_ray.sweeps.state import SECRET, SweepState, resolve_storage


@pytest.fixture(params=["path", "uri"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder = tmp_path / "a sweep" if request.param == "path" else tmp_path / "sweep"
    return str(folder) if request.param == "path" else folder.as_uri()


def state_of(step: int) -> dict[str, Any]:
    return {"progress": {"step": step}, "model": {"w": torch.arange(3.0)}}


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
    assert SweepState(str(tmp_path)).seed(7) == 7
    assert not list(tmp_path.iterdir())


def test_a_kill_while_the_seed_is_written_leaves_none(tmp_path: Path) -> None:
    (tmp_path / f".{SECRET}").write_text("12")  # half a seed, under its scratch name
    state = SweepState(str(tmp_path))
    assert state.seed(None) == state.seed(None) != 12
    state.forget()
    assert not list(tmp_path.iterdir())


def test_trial_state_comes_back(storage: str) -> None:
    states = SweepState(storage)
    assert states.load_trial("t-0", seed=1) is None
    states.save_trial("t-0", state_of(3), seed=1)
    states.save_trial("t-0", state_of(4), seed=1)
    found = states.load_trial("t-0", seed=1)
    assert found is not None
    assert found["progress"] == {"step": 4}
    assert torch.equal(found["model"]["w"], torch.arange(3.0))
    states.drop_trial("t-0")
    states.drop_trial("t-0")
    assert states.load_trial("t-0", seed=1) is None


def test_state_of_another_seed_is_not_taken_up(storage: str) -> None:
    states = SweepState(storage)
    states.save_trial("t-0", state_of(3), seed=1)
    assert states.load_trial("t-0", seed=2) is None


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
