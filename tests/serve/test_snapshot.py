"""What is on storage now: complete, and read again only where it changed."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.results.runs import read_runs
from dpfp_ray.results.store import Store
from dpfp_ray.serve import api as service_api
from dpfp_ray.serve import snapshot
from dpfp_ray.serve.api import ANSWERS, Wanted, matching, picks_by_score
from dpfp_ray.serve.snapshot import (
    BY_SCORE,
    IN_PART,
    READING,
    CachedStore,
    Filtered,
    LiveRecords,
    Snapshot,
)
from tests.support.samples import comparison, sample


def filled(folder: Path) -> Store:
    store = Store(folder)
    for record in comparison(seeds=1):
        store.put(record)
    return store


def aged(folder: Path) -> None:
    """As if everything had been written a minute ago."""
    for path in (folder / "records").iterdir():
        os.utime(path, (time.time() - 60, time.time() - 60))


def test_unchanged_records_are_read_once(tmp_path: Path) -> None:
    store = filled(tmp_path)
    aged(tmp_path)
    cached = CachedStore(str(tmp_path))
    assert cached.records() == store.records()
    assert cached.read_count == 7
    assert cached.records() == store.records()
    assert cached.read_count == 7


def test_only_the_changed_record_is_read_again(tmp_path: Path) -> None:
    store = filled(tmp_path)
    aged(tmp_path)
    cached = CachedStore(str(tmp_path))
    before = cached.records()
    changed = {**before[0], "metrics": {"accuracy": 0.123}}
    store.put(changed)
    assert changed in cached.records()
    assert cached.read_count == 8


def test_a_young_record_may_change_within_its_times_grain(tmp_path: Path) -> None:
    """Object stores tell times in seconds: the second write may have the first one's time."""
    store = Store(tmp_path)
    store.put(sample("one", accuracy=0.5))
    cached = CachedStore(str(tmp_path))
    cached.records()
    (path,) = (tmp_path / "records").iterdir()
    times = path.stat()
    store.put(sample("one", accuracy=0.75))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cached.records()[0]["metrics"]["accuracy"] == 0.75


def test_runs_that_share_a_plan_keep_their_ids_when_read_from_memory(tmp_path: Path) -> None:
    for number in range(2):
        record = sample("x", accuracy=0.5 + number / 10)
        del record["trial"]
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "result.json").write_text(snapshot.store.to_json(record))
    cached = CachedStore(str(tmp_path))
    first = [record["trial"]["id"] for record in cached.records()]
    assert len(set(first)) == 2
    assert [record["trial"]["id"] for record in cached.records()] == first


def test_half_a_record_does_not_replace_a_whole_one(tmp_path: Path) -> None:
    Store(tmp_path).put(sample("one", accuracy=0.5))
    cached = CachedStore(str(tmp_path))
    cached.records()
    (path,) = (tmp_path / "records").iterdir()
    path.write_text('{"plan": ')
    assert cached.records()[0]["metrics"]["accuracy"] == 0.5


def test_the_version_changes_when_a_record_comes_changes_or_goes(tmp_path: Path) -> None:
    live = LiveRecords(str(tmp_path))
    live._next_look = 0.0
    versions = [live.now().version]

    def look() -> None:
        live._next_look = 0.0
        versions.append(live.now().version)

    store = Store(tmp_path)
    store.put(sample("one", accuracy=0.5))
    look()
    store.put(sample("one", accuracy=0.75))
    look()
    next((tmp_path / "records").iterdir()).unlink()
    look()
    assert len(set(versions)) == 4
    look()
    assert versions[-1] == versions[-2]


def test_however_many_ask_storage_is_looked_at_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "EVERY", 60.0)
    live = LiveRecords(str(tmp_path))
    live.now()
    Store(tmp_path).put(sample("one"))
    assert list(live.now().runs) == []


def test_no_request_waits_until_a_large_store_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    monkeypatch.setattr(snapshot, "LARGE", 3)
    monkeypatch.setattr(snapshot, "FIRST", 0.01)
    may_read, look = threading.Event(), CachedStore.look

    def slow(store: CachedStore) -> Any:
        assert may_read.wait(60)
        return look(store)

    monkeypatch.setattr(CachedStore, "look", slow)
    live = LiveRecords(str(tmp_path))
    assert (list(live.now().runs), live.now().broken) == ([], (READING,))
    assert live.now().loading
    reading = live._looking
    may_read.set()
    assert reading is not None
    reading.join(60)
    assert len(live.now().runs) == 7
    assert not live.now().loading


def test_what_is_known_is_at_hand_until_a_look_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "EVERY", 60.0)
    filled(tmp_path)
    live = LiveRecords(str(tmp_path))
    assert live.at_hand() is None
    now = live.now()
    assert live.at_hand() is now
    live._next_look = 0.0
    assert live.at_hand() is None


def test_the_same_filter_is_worked_out_once(tmp_path: Path) -> None:
    filled(tmp_path)
    now, kept = LiveRecords(str(tmp_path)).now(), Filtered()
    first = kept.of(now, now.runs[:3], by_score=False)
    assert kept.of(now, now.runs[:3], by_score=False) is first
    assert kept.of(now, now.runs[:4], by_score=False) is not first
    assert kept.of(now, now.runs[:3], by_score=True) is not first


def test_a_folder_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert list(LiveRecords(str(tmp_path / "later")).now().runs) == []


def filtered(folder: Path, where: str) -> list[str]:
    """Why each comparison of the runs that match is not tested; empty: it is."""
    store = Store(folder)
    for record in comparison(budgets=(3.0,)):
        store.put(record)
    now = LiveRecords(str(folder)).now()
    found = matching(now, Wanted(where))
    shown = now.only(found.all, picks_by_score(where, now.columns))
    return [contest.why_not for contest in shown.contests]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("method != 'rgp'", ""),
        ("learning_rate > 0", ""),
        ("accuracy > 0.1", BY_SCORE),  # also where it happens to keep all runs of a method
        ("not (method == 'rgp' and accuracy_dev < 0.2)", BY_SCORE),
        ("seed_index != 1", IN_PART),
    ],
)
def test_a_filter_by_results_tests_nothing(tmp_path: Path, where: str, reason: str) -> None:
    assert filtered(tmp_path, where) == [reason]


def test_the_page_shows_what_is_at_work_first_and_the_api_keeps_its_order() -> None:
    records = [sample(name) for name in ("a", "b", "c")]
    records[1]["trial"]["status"] = "running"
    now = Snapshot("v", read_runs(records), [])
    on_page = matching(now, Wanted(), {})
    assert [run.row["id"] for run in on_page.all] == ["b-0", "a-0", "c-0"]
    assert [run.row["id"] for run in matching(now, Wanted()).all] == ["a-0", "b-0", "c-0"]
    sorted_by_hand = matching(now, Wanted(sort="id"), {})
    assert [run.row["id"] for run in sorted_by_hand.all] == ["a-0", "b-0", "c-0"]


def test_the_next_page_of_rows_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Snapshot("v", read_runs([sample(name) for name in ("a", "b", "c")]), [])
    first = matching(now, Wanted("accuracy >= 0", "-id", limit=2))
    monkeypatch.setattr(service_api, "answer", lambda *_: pytest.fail("filtered once more"))
    second = matching(now, Wanted("accuracy >= 0", "-id", limit=2, offset=2))
    assert [run.row["id"] for run in (*first.runs, *second.runs)] == ["c-0", "b-0", "a-0"]


def test_of_many_questions_the_last_few_are_kept() -> None:
    now = Snapshot("v", read_runs([sample("a")]), [])
    for number in range(3 * ANSWERS):
        matching(now, Wanted(f"accuracy >= {number}"))
    kept = [where for where, _, _ in now.answers]
    assert kept == [f"accuracy >= {number}" for number in range(2 * ANSWERS, 3 * ANSWERS)]
