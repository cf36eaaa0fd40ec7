"""What is on storage now: complete, read again only where it changed, and reported of."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from dpfp_ray.results.contests import contests_of
from dpfp_ray.results.store import Store
from dpfp_ray.service import snapshot
from dpfp_ray.service.app import build_app
from dpfp_ray.service.client import ask_service
from dpfp_ray.service.snapshot import BY_SCORE, IN_PART, CachedStore, LiveRecords, LiveReport
from dpfp_ray.system.whole_files import to_json
from tests.service.conftest import serving
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


def test_only_a_changed_record_is_read_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, paths = CachedStore(str(tmp_path)), []
    read = cached.files.read
    monkeypatch.setattr(cached.files, "read", lambda path: paths.append(path) or read(path))
    before = cached.records()
    assert before == store.records() == cached.records()
    assert len(paths) == 7
    changed = {**before[0], "metrics": {"accuracy": 0.123}}
    store.put(changed)
    assert changed in cached.records()
    assert len(paths) == 8


def test_a_young_record_may_change_and_keep_its_time_and_half_a_record_is_none(
    tmp_path: Path,
) -> None:
    """Object stores give times in whole seconds."""
    store, cached = Store(tmp_path), CachedStore(str(tmp_path))
    store.put(sample("one", accuracy=0.5))
    cached.records()
    (path,) = (tmp_path / "records").iterdir()
    times = path.stat()
    store.put(sample("one", accuracy=0.75))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cached.records()[0]["metrics"]["accuracy"] == 0.75
    path.write_text('{"plan": ')
    assert cached.records()[0]["metrics"]["accuracy"] == 0.75


def test_runs_that_share_a_plan_keep_their_ids_when_read_from_memory(tmp_path: Path) -> None:
    for number in range(2):
        record = sample("x", accuracy=0.5 + number / 10)
        del record["trial"]
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "result.json").write_text(to_json(record))
    cached = CachedStore(str(tmp_path))
    first, second = ([r["trial"]["id"] for r in cached.records()] for _ in range(2))
    assert len(set(first)) == 2
    assert first == second


def test_the_version_changes_when_a_record_comes_changes_or_goes(tmp_path: Path) -> None:
    live, store = LiveRecords(str(tmp_path)), Store(tmp_path)
    versions = []
    for change in (
        lambda: None,
        lambda: store.put(sample("one", accuracy=0.5)),
        lambda: store.put(sample("one", accuracy=0.75)),
        lambda: next((tmp_path / "records").iterdir()).unlink(),
        lambda: None,
    ):
        change()
        live.background._next = 0.0
        versions.append(live.now().version)
    assert len(set(versions[:4])) == 4
    assert versions[4] == versions[3]
    store.put(sample("two"))
    assert list(live.now().runs) == [], "storage was looked at less than a second ago"


def test_the_time_left_counts_down_and_counts_trials_that_have_not_begun(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ended, running = sample("a"), sample("b", status="running")
    ended["trial"] |= {"seconds": 400.0, "batch": "x", "planned": 4}
    running["trial"] |= {"seconds": 100.0, "reported_at": 1_000.0, "batch": "x", "planned": 4}
    running["plan"]["epochs"] = 4.0
    running["history"] = running["history"][:1]
    for record in (ended, running, sample("of another store, with the same name")):
        store.put(record)
    now = LiveRecords(str(tmp_path)).now()
    assert now.seconds_left(1_000.0) == 300 + 2 * 400
    assert now.seconds_left(1_060.0) == 240 + 2 * 400
    with serving(build_app(str(tmp_path))) as address:
        news = requests.get(f"{address}/api/version", timeout=120).json()
        page = requests.get(address, timeout=120).text
    assert news["time_left"] == "time left 13:20"  # its own estimate ran out long ago
    assert "1 running, time left 13:20; storage" in page
    assert "Time left" in page
    store.put(running | {"trial": {**running["trial"], "status": "finished"}})
    assert LiveRecords(str(tmp_path)).now().seconds_left(1_000.0) is None


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
        for path in ("/api/results?where=accuracy_dev+%3E+0", "/api/version"):
            assert requests.get(address + path, timeout=120).json()["status"] == "loading"
        assert "still being read" in requests.get(address, timeout=120).text
        threading.Timer(0.5, may_read.set).start()
        assert ask_service(address, where="accuracy_dev > 0").total == 7
        assert requests.get(f"{address}/api/version", timeout=120).json()["trials"] == 7


@pytest.mark.slow
def test_figures_come_after_the_tables_and_stay_until_a_score_changes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_draw = threading.Event()
    monkeypatch.setattr(snapshot, "draw_figures", lambda *_: may_draw.wait(60) and ["drawn"])
    records, live = LiveRecords(str(tmp_path)), LiveReport("t", "c", str(tmp_path / "l"), None)
    for name, status, before in (("a", "finished", (8, ())), ("b", "running", (9, ["drawn"]))):
        store.put(sample(name, status=status))
        records.background._next = live.tables._next = live.drawings._next = 0.0
        while not live.report or len(live.report.tables["runs"].rows) < before[0]:
            live.renew(records.now())
        live.renew(records.now())
        while live.drawing and live.drawings._thread is None:  # another test may hold the slot
            live.renew(records.now())
        assert (len(live.report.tables["runs"].rows), live.report.figures) == before
        drawing = live.drawings._thread
        assert (drawing is not None) == live.drawing == (name == "a")
        may_draw.set()
        if drawing is not None:
            drawing.join(60)


def test_many_questions_start_few_threads(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, may_end = LiveRecords(str(tmp_path)).now(), threading.Event()
    monkeypatch.setattr(snapshot, "PATIENCE", 0.01)
    monkeypatch.setattr(snapshot, "report_of", lambda *_, **__: may_end.wait(60))
    reports = [LiveReport("t", "c", None, f"epsilon == {number}") for number in range(5)]
    for live in reports:
        live.renew(now)
    threads = [thread for live in reports if (thread := live.tables._thread)]
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert len(threads) == 2


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("method != 'rgp'", ""),
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
