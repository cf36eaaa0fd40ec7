"""What is on storage now: complete, read again only where it changed, and reported of."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.report import page
from dpfp_ray.results.contests import contests_of
from dpfp_ray.results.store import Store
from dpfp_ray.serve import snapshot
from dpfp_ray.serve.app import build_app
from dpfp_ray.serve.client import ask_service
from dpfp_ray.serve.snapshot import BY_SCORE, IN_PART, CachedStore, LiveRecords, LiveReport
from tests.serve.conftest import serving
from tests.support.samples import comparison, sample


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Seven records that were written a minute ago."""
    filled = Store(tmp_path)
    for record in comparison(seeds=1):
        filled.put(record)
    for path in (tmp_path / "records").iterdir():
        os.utime(path, (time.time() - 60, time.time() - 60))
    return filled


def test_only_a_changed_record_is_read_again(store: Store, tmp_path: Path) -> None:
    cached = CachedStore(str(tmp_path))
    before = cached.records()
    assert before == store.records() == cached.records()
    assert cached.reads == 7
    changed = {**before[0], "metrics": {"accuracy": 0.123}}
    store.put(changed)
    assert changed in cached.records()
    assert cached.reads == 8


def test_a_young_record_may_change_and_keep_its_time(tmp_path: Path) -> None:
    """Object stores give times in whole seconds."""
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
        (tmp_path / str(number) / "result.json").write_text(to_json(record))
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
    live, store = LiveRecords(str(tmp_path)), Store(tmp_path)
    versions = []

    def look() -> None:
        live.background._next = 0.0
        versions.append(live.now().version)

    look()
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


def test_no_request_waits_for_a_long_look(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, records = threading.Event(), CachedStore.records

    def slow(cached: CachedStore) -> Any:
        assert may_read.wait(60)
        return records(cached)

    monkeypatch.setattr(snapshot, "PATIENCE", 0.01)
    monkeypatch.setattr(CachedStore, "records", slow)
    with serving(build_app(str(tmp_path))) as address:
        for path in ("/api/results", "/api/version"):
            answer = requests.get(address + path, timeout=120).json()
            assert answer["status"] == "loading"
        assert "still being read" in requests.get(address, timeout=120).text
        threading.Timer(0.5, may_read.set).start()
        assert ask_service(address).total == 7
        answer = requests.get(f"{address}/api/version", timeout=120).json()
        assert (answer["status"], answer["trials"]) == ("ready", 7)


@pytest.mark.slow
def test_the_last_report_stays_while_the_next_one_is_made(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_draw = threading.Event()
    records, live = LiveRecords(str(tmp_path)), LiveReport("t", "c", str(tmp_path / "l"), None)
    monkeypatch.setattr(snapshot, "draw_figures", lambda *_: may_draw.wait(60) and ["drawn"])
    live.renew(records.now())
    assert live.report is not None
    assert (live.drawing, live.report.figures) == (True, ())
    assert len(live.report.tables["runs"].rows) == 7
    thread = live.background.start(lambda: None)
    may_draw.set()
    assert thread is not None
    thread.join(60)
    assert (live.drawing, live.report.figures) == (False, ["drawn"])
    store.put(sample("another", status="running"))
    records.background._next = live.background._next = 0.0
    monkeypatch.setattr(snapshot, "draw_figures", lambda *_: pytest.fail("no score changed"))
    monkeypatch.setattr(snapshot, "report_of", lambda *_, **__: may_draw.wait(60) and made)
    made = page.report_of(records.now().runs, [], "c")
    may_draw.clear()
    live.renew(records.now())
    assert len(live.report.tables["runs"].rows) == 7
    may_draw.set()
    if (thread := live.background.start(lambda: None)) is not None:
        thread.join(60)
    assert len(live.report.tables["runs"].rows) == 8
    assert live.report.figures == ["drawn"]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("method != 'rgp'", ""),
        ("learning_rate > 0", ""),
        ("accuracy > 0.1", BY_SCORE),  # also where it happens to keep all runs
        ("not (method == 'rgp' and accuracy_dev < 0.2)", BY_SCORE),
        ("seed_index != 1", IN_PART),
    ],
)
def test_a_filter_by_results_tests_nothing(tmp_path: Path, where: str, reason: str) -> None:
    for record in comparison(budgets=(3.0,)):
        Store(tmp_path).put(record)
    cells = LiveRecords(str(tmp_path)).now().cells(where)
    assert [contest.why_not for contest in contests_of(cells)] == [reason]
