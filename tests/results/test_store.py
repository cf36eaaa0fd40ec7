"""Records survive crashes, are found wherever they lie, and become flat rows of fixed shape."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import LocalStore, MemoryStore

from dpfp_ray.results.rows import flatten
from dpfp_ray.results.store import Store, load_records
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import LocalFiles, RemoteFiles, public
from dpfp_ray.system.whole_files import write_json
from dpfp_ray.training import record as training
from dpfp_ray.training.record import record_id
from tests.support.result_records import make_record


def memory_store() -> Store:
    """An object store in memory: the code path of every remote store."""
    return Store("", RemoteFiles(MemoryStore(), "memory://sweep"))


def identities(store: Store) -> list[str]:
    return [record_id(record) for record in store.records()]


@pytest.fixture(params=["path", "file URI", "memory", "subtree"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return memory_store()
    if request.param == "subtree":
        return Store("", RemoteFiles(LocalStore(str(tmp_path)), "sub"))
    return Store(tmp_path / "s" if request.param == "path" else f"file://{tmp_path}/s")


def test_what_is_put_is_read(store: Store) -> None:
    record = make_record("t1")
    store.put(record)
    assert store.records() == [json.loads(json.dumps(record))]


def test_records_come_by_id(store: Store) -> None:
    for name in ("c", "a", "b"):
        store.put(make_record(name))
    assert identities(store) == ["a", "b", "c"]


def test_a_store_exists_once_something_is_in_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    assert not store.exists()
    store.put(make_record("t1"))
    assert store.exists()


def test_an_absent_store_holds_no_records(tmp_path: Path) -> None:
    assert Store(tmp_path / "s").records() == []
    assert memory_store().records() == []


def test_a_run_without_a_trial_is_named_by_its_plan(tmp_path: Path) -> None:
    record = make_record()
    Store(tmp_path).put(record)
    assert (tmp_path / "records" / f"{record['plan_hash']}.json").is_file()


def test_a_record_without_any_name_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"trial\.id or plan_hash"):
        store.put(training.make_record())


def test_an_infinite_epsilon_comes_back_as_a_number(store: Store) -> None:
    record = make_record("t1")
    record["privacy"]["epsilon"]["rdp"] = math.inf
    store.put(record)
    assert flatten(store.records()[0])["epsilon_rdp"] == math.inf


@pytest.mark.parametrize(
    "identity",
    ["../../evil", "/etc/passwd", "a/b", "a\\b", "..", ".hidden", "ε=3 C:1", "x" * 500, "\udc80"],
)
def test_no_id_leaves_the_folder_or_hides(identity: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.put(make_record(identity))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.parent for path in files] == [tmp_path / "s" / "records"]
    assert identities(store) == [identity]


def test_ids_that_look_alike_have_files_of_their_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for identity in ("a/b", "a_b", "a b"):
        store.put(make_record(identity))
    assert len(identities(store)) == 3


def test_scratch_files_of_a_killed_writer_are_not_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(make_record("t1"))
    for name in (".t2.json.0a1b", "t3.json.4711", ".t4.json"):
        (tmp_path / "records" / name).write_text('{"plan_hash": "x"', encoding="utf-8")
    (tmp_path / "result.json.4711").write_text("{", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert identities(store) == ["t1"]


def test_a_failed_write_leaves_the_old_record_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.put(make_record("t1", accuracy=0.5))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        store.put(make_record("t1", accuracy=0.6))
    assert [flatten(record)["accuracy"] for record in store.records()] == [0.5]
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["t1.json"]


WRITER = """
import sys
from dpfp_ray.results.store import Store
from tests.support.result_records import make_record
store, n = Store(sys.argv[1]), 0
while True:
    n += 1
    store.put({**make_record(f"t{n % 5}"), "padding": "x" * 200_000})
    if n == 1:
        print("ready", flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_only_whole_records(tmp_path: Path) -> None:
    for delay in (0.05, 0.11, 0.17):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            records = Store(tmp_path).records()
        assert records
        assert all(len(record["padding"]) == 200_000 for record in records)


def test_broken_files_are_skipped_with_one_warning_that_names_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(make_record("good"))
    broken = {
        "half.json": b'{"plan_hash": "x", "plan": {',
        "empty.json": b"",
        "list.json": b"[1, 2]",
        "other.json": b'{"name": "not a record"}',
        "binary.json": b"\xff\xfe\x00",
        "deep.json": b"[" * 100_000,
    }
    for name, content in broken.items():
        (tmp_path / "records" / name).write_bytes(content)
    with pytest.warns(UserWarning, match="skipped") as caught:
        assert identities(store) == ["good"]
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "binary.json" in message
    assert "and 1 more" in message


def test_results_of_train_are_found_at_any_depth(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "result.json", make_record(clip=1.0))
    write_json(tmp_path / "b" / "c" / "result.json", make_record(clip=2.0))
    Store(tmp_path / "d").put(make_record("t1", clip=4.0))
    write_json(tmp_path / ".cache" / "result.json", make_record(clip=3.0))
    assert len(Store(tmp_path).records()) == 3


def test_the_records_folder_itself_may_be_named(tmp_path: Path) -> None:
    Store(tmp_path).put(make_record("t1"))
    assert identities(Store(tmp_path / "records")) == ["t1"]


def test_sealed_records_are_not_read_and_owner_only(tmp_path: Path) -> None:
    Store(tmp_path / "sweep" / "sealed").put(make_record("secret"))
    Store(tmp_path / "sweep").put(make_record("shown"))
    for folder in (tmp_path, tmp_path / "sweep"):
        assert identities(Store(folder)) == ["shown"]
    (kept,) = (tmp_path / "sweep" / "sealed").rglob("*.json")
    assert kept.stat().st_mode & 0o777 == 0o600


def test_files_of_ray_tune_are_not_taken_for_ours(tmp_path: Path) -> None:
    folder = tmp_path / "sweep" / "trainable_0001"
    write_json(folder / "params.json", {})
    (folder / "result.json").write_text('{"accuracy": 1}\n{"accuracy": 2}\n', encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Store(tmp_path).records() == []


def trial_copy(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**record, "trial": {**record["trial"], **changes}}


def test_of_two_records_of_a_trial_the_newer_stays(tmp_path: Path) -> None:
    record = make_record("t1")
    newer = trial_copy(record, status="failed", started_at=2_000.0)
    older = trial_copy(record, status="finished", started_at=1_000.0)
    Store(tmp_path / "a").put(newer)
    Store(tmp_path / "b").put(older)
    assert [flatten(r)["status"] for r in Store(tmp_path).records()] == ["failed"]


def test_an_ended_trial_is_newer_than_the_same_one_running(tmp_path: Path) -> None:
    record = make_record("t1")
    Store(tmp_path / "a").put(record)
    Store(tmp_path / "b").put(trial_copy(record, status="running"))
    assert [flatten(r)["status"] for r in Store(tmp_path).records()] == ["finished"]


def test_two_runs_of_one_plan_are_two_rows(tmp_path: Path) -> None:
    write_json(tmp_path / "seed1" / "result.json", make_record(accuracy=0.8))
    write_json(tmp_path / "seed2" / "result.json", make_record(accuracy=0.7))
    assert len(set(identities(Store(tmp_path)))) == 2


def test_a_copy_of_a_run_is_no_second_row(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "result.json", make_record())
    write_json(tmp_path / "b" / "result.json", make_record())
    assert identities(Store(tmp_path)) == [make_record()["plan_hash"]]


def test_export_writes_the_same_table_three_times(store: Store) -> None:
    store.put(make_record("a", accuracy=0.5))
    store.put(make_record("b", method="non_private"))
    assert store.export() == ["results.jsonl", "results.csv", "results.parquet"]
    rows = store.rows()

    def content(name: str) -> bytes:
        if isinstance(store.files, LocalFiles):
            return (store.files.root / name).read_bytes()
        assert isinstance(store.files, RemoteFiles)
        return store.files.read(name)

    lines = [json.loads(line) for line in content("results.jsonl").splitlines()]
    assert lines == rows
    header, first, _ = content("results.csv").decode().splitlines()
    assert header.split(",") == list(rows[0])
    assert first.startswith("a,s,finished,dpfp,paper,demo,minilm,3.0,pld,nominal,0.5,")
    table = pq.read_table(pa.BufferReader(content("results.parquet")))
    assert table.to_pylist() == rows


@pytest.mark.parametrize("location", ["nope://x/y", "s3://", "file://relative/path", "://"])
def test_an_unusable_uri_is_one_line(location: str) -> None:
    with pytest.raises(UserError) as error:
        Store(location)
    assert "\n" not in str(error.value)


def test_secrets_in_a_uri_are_not_shown() -> None:
    assert public("s3://KEY:SECRET@bucket/x?secret_key=abc") == "s3://bucket/x"
    with pytest.raises(UserError) as error:
        Store("nope://KEY:SECRET@bucket/x?token=abc")
    assert "SECRET" not in str(error.value)
    assert "abc" not in str(error.value)


@pytest.mark.parametrize(("folder", "reason"), [(".", "holds no records"), ("x", "no folder")])
def test_a_place_without_records_is_named(tmp_path: Path, folder: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_records(str(tmp_path / folder))
