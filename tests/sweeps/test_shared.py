"""Data on a cluster: rows and models come back to the bit, and trials share one copy."""

import dataclasses
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpfp_ray.data.tokens import PairTable, TokenTable
from dpfp_ray.methods import moments
from dpfp_ray.models import representations, row_store
from dpfp_ray.models.representations import RepresentationTable, entry_of
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.sampling import keyed_integer
from dpfp_ray.sweeps import shared as sharing
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.sweeps.shared import (
    ClusterWork,
    SharedModel,
    hands_of,
    mapped,
    publish,
    share_inputs,
)
from dpfp_ray.training.prepare import Hands, Prepared, build_model, load_inputs
from tests.support.one_release import make_plan as make_bound_plan
from tests.support.one_release import make_table
from tests.support.ray_runs import measured, run_here, run_plainly, trial

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tiny_task: dict[str, Any]) -> Prepared:
    plan = make_plan(tiny_task)
    inputs = load_inputs(plan)
    bound = plan.bind(records=len(inputs.data.train), representation=inputs.representation)
    return Prepared(bound, inputs, 1.0)


@pytest.mark.parametrize("scope", ["all", "bias", "lora", "top:1"])
def test_a_rebuilt_model_is_the_same_to_the_bit_and_trains_what_its_scope_says(
    prepared: Prepared, scope: str
) -> None:
    chosen = replace(prepared, plan=replace(prepared.plan, scope=scope))
    shared = SharedModel.of(build_model(chosen, seed=0, device=CPU))
    direct = build_model(chosen, seed=9, device=CPU)
    rebuilt = shared.build(chosen.plan, keyed_integer(9, "head"))
    state, trained = rebuilt.state_dict(), dict(rebuilt.named_parameters())
    for name, tensor in direct.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    for name, parameter in direct.named_parameters():
        assert parameter.requires_grad == trained[name].requires_grad, name
    batch = prepared.data.train.collate(np.arange(5))
    assert torch.equal(direct.eval()(batch), rebuilt.eval()(batch))


def test_training_one_copy_leaves_the_shared_one(prepared: Prepared) -> None:
    shared = SharedModel.of(build_model(prepared, seed=0, device=CPU))
    for array in shared.arrays.values():
        array.setflags(write=False)  # as Ray hands them out
    before = pickle.dumps(shared.arrays)
    model = shared.build(prepared.plan, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert pickle.dumps(shared.arrays) == before


def test_tables_travel_through_the_object_store(prepared: Prepared, ray_session: None) -> None:
    import ray

    reference = share_inputs(prepared.plan, prepared.inputs)
    inputs = ray.get(reference)
    rows = np.array([3, 0, 3])
    for ours, theirs in (
        (prepared.data.train, inputs.data.train),
        (prepared.data.dev["dev"], inputs.data.dev["dev"]),
    ):
        assert np.array_equal(ours.labels, theirs.labels)
        assert not isinstance(theirs.labels, np.memmap)
        expected, found = ours.collate(rows), theirs.collate(rows)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert inputs.label_names == prepared.inputs.label_names


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
        back: Any = pickle.loads(pickle.dumps(publish(table, place)))
        assert not entry_of(table.key).exists(), "nobody has looked at a row"
        assert np.array_equal(back.h, table.h)
        assert back.h.dtype == table.h.dtype
        assert back.content() == table.content()
        assert isinstance(np.asarray(back.h).base, np.memmap)


def test_what_is_there_is_not_written_again(
    table: RepresentationTable, tmp_path: Path, fresh_cache: Path
) -> None:
    times = []
    for _ in range(2):
        publish(table, str(tmp_path))
        (shards,) = (tmp_path / "representations").iterdir()
        times.append({path.name: path.stat().st_mtime_ns for path in shards.iterdir()})
    assert len(times[0]) == 5
    assert times[0] == times[1]


def test_sums_are_made_where_shards_lie_and_are_the_same_bits(
    ray_session: None,
    table: RepresentationTable,
    tmp_path: Path,
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    named: Any = publish(table, str(tmp_path))
    plan = make_bound_plan("moments", len(table))
    expected = moments.sums_of(plan, table, 2)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}, {"Alive": False}])
    found = moments.sums_of(plan, named, 2)
    assert [part.tobytes() for part in found] == [part.tobytes() for part in expected]
    assert not entry_of(table.key).exists(), "no machine has all rows"


def test_trials_of_a_sweep_give_the_same_records(
    ray_session: None, tiny_task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {name: tiny_task[name] for name in ("train_file", "dev_file", "model")}
    one = trial(named, method="dpfp", mode="moments", epsilon=3.0)
    monkeypatch.setenv("DPFP_SHARED_CACHE", str(tmp_path / "shared"))
    found = run_here([one], tmp_path / "sweep")
    assert list((tmp_path / "shared" / "representations").glob("*/000000.arrow"))
    alone = run_plainly([one])
    first, second = (measured(run[one.id]) for run in (found, alone))
    assert json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def test_one_machine_and_ray_client_keep_the_plain_path() -> None:
    assert hands_of(RayOptions()) == Hands()
    assert hands_of(RayOptions(address="ray://there:10001")) == Hands()
    assert hands_of(RayOptions(address="there:6379")) != Hands()


def test_few_rows_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "connected", lambda address: pytest.fail("joined a cluster"))
    work = ClusterWork("there:6379", least=10)
    chunks: Iterator[Any] = iter([(["a"] * 4, None), (["b"] * 5, None)])
    few, again = work._few(chunks, lambda chunk: len(chunk[0]))
    assert few
    assert [len(texts) for texts, _ in again] == [4, 5]


def arrays(table: Any) -> dict[str, Any]:
    if isinstance(table, PairTable):
        return {**arrays(table.first), **{f"2 {k}": v for k, v in arrays(table.second).items()}}
    if isinstance(table, TokenTable):
        return {**table.columns, "offsets": table.offsets}
    return {"h": table.h}


@pytest.mark.parametrize("representation", [None, "layers", "cls"])
def test_inputs_are_the_same_bits(
    ray_session: None,
    tiny_task: dict[str, Any],
    representation: str | None,
    fresh_cache: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr("dpfp_ray.data.tokens.CHUNK", 17)
    monkeypatch.setattr(row_store, "SHARD", 16)
    task = {name: tiny_task[name] for name in ("train_file", "dev_file", "model")}
    task |= {"scope": "head", "representation": representation} if representation else {}
    plan = make_plan({**task, "method": "dpsgd"})
    here = load_inputs(plan)
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "another"))
    work = ClusterWork("the session's", least=50)  # the dev set has 40 rows
    there = load_inputs(plan, hands=Hands(work.tokenise, work.encode))
    for one, other in (
        (here.data.train, there.data.train),
        (here.data.dev["dev"], there.data.dev["dev"]),
    ):
        assert one.content() == other.content()
        for name, array in arrays(one).items():
            assert np.array_equal(array, arrays(other)[name]), name
            assert array.dtype == arrays(other)[name].dtype
