"""A table in a shared cache: trials map their machine's copy of it, and find the same."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray.methods import moments
from dpfp_ray.models import representations
from dpfp_ray.models.representations import RepresentationTable, entry_of
from dpfp_ray.sweeps.shared import mapped, publish, shared_cache
from tests.support.one_release import make_plan, make_table
from tests.support.ray_runs import measured, run_here, run_plainly, trial


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> RepresentationTable:
    monkeypatch.setattr(representations, "SHARD", 7)
    return dataclasses.replace(make_table(rows=30), key="a-hash")


def test_rows_come_back_to_the_bit_and_are_mapped(
    table: RepresentationTable, tmp_path: Path, fresh_cache: Path
) -> None:
    for place in (str(tmp_path / "folder"), (tmp_path / "uri").as_uri()):
        mapped.cache_clear()
        entry_of(table.key).unlink(missing_ok=True)
        found: Any = pickle.loads(pickle.dumps(publish(table, place)))
        assert not entry_of(table.key).exists(), "nobody has looked at a row"
        assert np.array_equal(found.h, table.h)
        assert found.h.dtype == table.h.dtype
        assert found.content() == table.content()
        assert isinstance(np.asarray(found.h).base, np.memmap)


def test_what_is_there_is_not_written_again(
    table: RepresentationTable, tmp_path: Path, fresh_cache: Path
) -> None:
    publish(table, str(tmp_path))
    (shards,) = (tmp_path / "representations").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in shards.iterdir()}
    assert len(before) == 5
    publish(table, str(tmp_path))
    assert {path.name: path.stat().st_mtime_ns for path in shards.iterdir()} == before


def test_tokens_are_handed_out_as_they_are(tmp_path: Path) -> None:
    tokens: Any = object()
    assert publish(tokens, str(tmp_path)) is tokens


def test_a_folder_is_named_as_other_processes_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPFP_SHARED_CACHE", raising=False)
    assert shared_cache() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPFP_SHARED_CACHE", "here")
    assert shared_cache() == str(tmp_path / "here")
    monkeypatch.setenv("DPFP_SHARED_CACHE", "s3://bucket/here")
    assert shared_cache() == "s3://bucket/here"


def test_sums_are_made_where_shards_lie_and_are_the_same_bits(
    ray_session: None,
    table: RepresentationTable,
    tmp_path: Path,
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    named: Any = publish(table, str(tmp_path))
    plan = make_plan("moments", len(table))
    expected = moments.sums_of(plan, table, 2)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}, {"Alive": False}])
    found = moments.sums_of(plan, named, 2)
    assert [part.tobytes() for part in found] == [part.tobytes() for part in expected]
    assert not entry_of(table.key).exists(), "no machine has all rows"


def test_a_machine_that_is_alone_adds_up_its_own_copy(
    ray_session: None, table: RepresentationTable, tmp_path: Path, fresh_cache: Path
) -> None:
    named: Any = publish(table, str(tmp_path))
    plan = make_plan("moments", len(table))
    found, expected = moments.sums_of(plan, named, 2), moments.sums_of(plan, table, 2)
    assert [part.tobytes() for part in found] == [part.tobytes() for part in expected]
    assert entry_of(table.key).exists()


def test_trials_of_a_sweep_give_the_same_records(
    ray_session: None, tiny_task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {name: tiny_task[name] for name in ("train_file", "dev_file", "model")}
    one = trial(named, method="dpfp", mode="moments", epsilon=3.0)
    monkeypatch.setenv("DPFP_SHARED_CACHE", str(tmp_path / "shared"))
    found = run_here([one], tmp_path / "sweep")
    assert list((tmp_path / "shared" / "representations").glob("*/000000.arrow"))
    alone = run_plainly([one])
    assert json.dumps(measured(found[one.id])) == json.dumps(measured(alone[one.id]))
