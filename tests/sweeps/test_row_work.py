"""Rows that go through Ray Data come back as if this process had worked on them, to the bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpfp_ray.data import Split
from dpfp_ray.data.pair_tokens import PairTable
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.models import row_store
from dpfp_ray.plan.values import make_plan
from dpfp_ray.sweeps import shared as row_work
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.sweeps.shared import ClusterWork, hands_of, whole, windows
from dpfp_ray.training.prepare import Hands, load_inputs
from tests.support.tiny_runs import tiny_split


def test_one_machine_and_ray_client_keep_the_plain_path() -> None:
    assert hands_of(RayOptions()) == Hands()
    assert hands_of(RayOptions(address="ray://there:10001")) == Hands()
    assert hands_of(RayOptions(address="there:6379")) != Hands()


def test_few_rows_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_work, "connected", lambda address: pytest.fail("joined a cluster"))
    work = ClusterWork("there:6379", least=10)
    chunks: Iterator[Any] = iter([(["a"] * 4, None), (["b"] * 5, None)])
    few, again = work._few(chunks, lambda chunk: len(chunk[0]))
    assert few
    assert [len(texts) for texts, _ in again] == [4, 5]


def test_windows_hold_so_many_rows_and_all_of_them() -> None:
    tables = [pa.table({"x": range(n)}) for n in (3, 4, 2, 9, 1)]
    assert [[len(t) for t in w] for w in windows(iter(tables), 5)] == [[3, 4], [2, 9], [1]]


def test_tables_that_were_cut_are_whole_again() -> None:
    cut = [pa.table({"x": part}) for part in ([0, 1], [2], [3, 4, 5, 6], [7])]
    found = [one.column("x").to_pylist() for one in whole(iter(cut), [3, 1, 4])]
    assert found == [[0, 1, 2], [3], [4, 5, 6, 7]]


@pytest.mark.parametrize("layers", [0, 3])
def test_a_shard_is_the_same_after_arrow(layers: int) -> None:
    """Also one without layers, as `cls` and `pooler` have it."""
    digests = np.array([b"a" * 16, b"b" * 16])
    last = np.arange(8, dtype=np.float32).reshape(2, 4)
    shard = row_store.Shard(digests, last, np.ones((2, layers, 4), np.float16))
    again = vars(row_work.shard_of(row_work.shard_table(shard)))
    for name, array in vars(shard).items():
        assert np.array_equal(array, again[name])
        assert array.dtype == again[name].dtype
        assert array.shape == again[name].shape


def arrays(table: Any) -> dict[str, Any]:
    if isinstance(table, PairTable):
        return {**arrays(table.first), **{f"2 {k}": v for k, v in arrays(table.second).items()}}
    if isinstance(table, TokenTable):
        return {**table.columns, "offsets": table.offsets}
    return {"h": table.h}


@pytest.mark.parametrize(
    ("fields", "windows"),  # two of tokens, and two of what the encoder makes of them
    [
        ({"scope": "all"}, 2),
        ({"scope": "head", "representation": "layers"}, 4),
        ({"scope": "head", "representation": "cls"}, 4),
        ({"scope": "head", "representation": "pooler"}, 4),
    ],
    ids=["tokens", "layers", "cls", "pooler"],
)
def test_inputs_are_the_same_bits(
    ray_session: None,
    tiny_task: dict[str, Any],
    fields: dict[str, Any],
    windows: int,
    fresh_cache: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr("dpfp_ray.data.tokens.CHUNK", 17)
    monkeypatch.setattr(row_store, "SHARD", 16)
    named = ("train_file", "dev_file", "model")
    plan = make_plan({name: tiny_task[name] for name in named} | {"method": "dpsgd", **fields})
    here = load_inputs(plan)
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "another"))
    work = ClusterWork("the session's", least=50, window=70)  # the dev set has 40 rows
    calls: list[int] = []
    plain = row_work.stream
    monkeypatch.setattr(row_work, "stream", lambda *a, **k: calls.append(1) or plain(*a, **k))
    there = load_inputs(plan, hands=Hands(work.tokenise, work.encode))
    assert len(calls) == windows, "each went through Ray Data"
    for one, other in (
        (here.data.train, there.data.train),
        (here.data.dev["dev"], there.data.dev["dev"]),
    ):
        assert one.content() == other.content()
        for name, array in arrays(one).items():
            assert np.array_equal(array, arrays(other)[name]), name
            assert array.dtype == arrays(other)[name].dtype


def test_pairs_go_out_together(ray_session: None, tiny_task: dict[str, Any]) -> None:
    from dpfp_ray.data.tokens import _encode
    from dpfp_ray.models.pretrained import load_tokenizer

    tokenizer = load_tokenizer(tiny_task["model"])
    split = tiny_split(30)
    both = Split(split.texts, [text[::-1] for text in split.texts], split.labels)
    here = _encode(both, tokenizer, 16, "")
    (found,) = ClusterWork("", least=1).tokenise(iter([(both.texts, both.pairs)]), tokenizer, 16)
    assert np.array_equal(found["input_ids"], here.columns["input_ids"])
    assert np.array_equal(found["token_type_ids"], here.columns["token_type_ids"])
    assert np.array_equal(found["lengths"], here.lengths)
