"""A sweep on S3 (moto), behind a proxy where many requests fail: killed, continued, read."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from dpfp_ray.cli.main import main
from dpfp_ray.models import representations
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.sweeps import shared as published
from dpfp_ray.sweeps.trial import SweepState
from dpfp_ray.system import lease
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.lease import held
from dpfp_ray.system.storage import open_files
from tests.support.object_store import BUCKET, SECRET_KEY, Faults, ObjectStore, object_store
from tests.support.one_release import make_table
from tests.support.ports import free_ports
from tests.support.ray_runs import (
    ONE_PROCESS_FLAGS,
    SEED,
    Command,
    measured,
    sweep_here,
    wait_for,
    write_space,
)

pytestmark = pytest.mark.nightly
RATES = [1e-4, 1e-2]
SHAKY = Faults(seed=3, refused=0.05, unanswered=0.01, late=0.003, pause=8.0)


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started


@dataclass
class Story:
    space: Path
    storage: str
    ledger: str
    said: str = ""
    killed_with: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(
    ray_turn: None,
    store: ObjectStore,
    tiny_task: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Story:
    """Killed when it has saved a state, and continued."""
    keys: Any = {"method": "grid", "parameters": {"learning_rate": {"values": RATES}}}
    keys["plan"] = {"epochs": 5, "batch_size": 4}
    space = write_space(tmp_path_factory.mktemp("s3") / "s.yaml", tiny_task, **keys)
    it = Story(space, f"s3://{BUCKET}/sweep", f"s3://{BUCKET}/ledger")
    command = ["sweep", str(space), "--storage", it.storage, "--ledger", it.ledger]
    command += ["--seed", str(SEED), *ONE_PROCESS_FLAGS]
    store.faults = SHAKY
    first = Command(*command)

    def saved() -> bool:
        assert first.process.poll() is None, first.end()[1][-3000:]
        return any(name.endswith(".pt") for name in store.names("sweep/states/"))

    wait_for(saved, "a saved state")
    first.kill()
    it.killed_with = store.names("sweep/")
    code, it.said = Command(*command).end()
    assert code == 0, it.said[-3000:]
    it.faults = dict(store.failed)
    store.faults = Faults()
    return it


def test_killed_and_continued_it_has_the_numbers_of_an_unbroken_sweep_on_a_folder(
    story: Story, store: ObjectStore, ray_session: None, tmp_path: Path
) -> None:
    assert story.faults["refused"] >= 5
    unbroken, swept = sweep_here(story.space, tmp_path / "runs"), store.records("sweep")
    assert {k: measured(r) for k, r in swept.items()} == {
        k: measured(r) for k, r in unbroken.items()
    }
    assert any("resumed_at_step" in record["trial"] for record in swept.values())


def test_every_trial_is_charged_once(story: Story) -> None:
    (spent,) = Ledger(story.ledger).groups()
    assert {entry.status for entry in spent.entries} == {"finished"}
    assert len({entry.run_id for entry in spent.entries}) == len(RATES) < len(spent.entries)
    assert spent.how == "composition of a fixed list"


def test_nothing_that_only_a_kill_needs_stays_and_no_secret_is_anywhere(
    story: Story, store: ObjectStore
) -> None:
    assert any(name.startswith("sweep/sweep.secret") for name in story.killed_with)
    left = {name.split("/")[1] for name in store.names("sweep/")}
    assert left == {"records", "results.csv", "results.jsonl", "results.parquet"}
    assert SECRET_KEY not in story.said
    for name in store.names():
        assert SECRET_KEY.encode() not in store.read(name), name


# --- conditional writes -------------------------------------------------------------------------


def test_of_many_creators_one_succeeds_and_of_many_seeds_one_is_kept(store: ObjectStore) -> None:
    files = open_files(f"s3://{BUCKET}/race")

    def draw(_: int) -> int:
        return SweepState(f"s3://{BUCKET}/seeds").seed(None)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: files.create("name", str(n).encode()), range(32)))
        assert len(set(pool.map(draw, range(16)))) == 1
    assert sum(won) == 1
    assert files.read_name("name") == str(won.index(True)).encode()


def test_a_creator_that_hears_nothing_of_its_success_still_knows(store: ObjectStore) -> None:
    files = open_files(f"s3://{BUCKET}/lost-answer")
    store.faults = Faults(unanswered=0.5, seed=1)
    try:
        assert files.create("name", b"mine")
        assert not files.create("name", b"other")
    finally:
        store.faults = Faults()


def test_of_many_drivers_never_two_have_the_store(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BEAT", "STALE", "PATIENCE"):
        monkeypatch.setattr(lease, name, getattr(lease, name) / 10)
    inside, counting = 0, threading.Lock()
    seen: list[int] = []

    def drive(_: int) -> None:
        nonlocal inside
        with suppress(UserError), held(open_files(f"s3://{BUCKET}/leased"), "wait"):
            with counting:
                inside += 1
                seen.append(inside)
            with counting:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(drive, range(24)))
    assert max(seen) == 1
    assert store.names("leased/") == []


# --- requests -----------------------------------------------------------------------------------


def test_a_store_that_stays_away_is_one_line(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert main(["results", f"s3://{BUCKET}/sweep"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot reach s3://bucket/sweep" in line
    assert SECRET_KEY not in line


def test_a_shared_cache_may_lie_on_it(
    store: ObjectStore, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(representations, "SHARD", 7)
    store.faults = SHAKY
    table = replace(make_table(rows=30), key="a-hash")
    found = published.publish(table, f"s3://{BUCKET}/cache")
    store.faults = Faults()
    assert len(store.names("cache/representations/a-hash/")) == 5
    published.mapped.cache_clear()
    assert np.array_equal(found.h, table.h)
    assert isinstance(np.asarray(found.h).base, np.memmap)


def test_results_and_report_read_it(
    story: Story, store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["results", story.storage, "--json"]) == 0
    said = capsys.readouterr()
    assert {row["status"] for row in json.loads(said.out)} == {"finished"}
    output = tmp_path / "report"
    assert main(["report", story.storage, "--output", str(output), "--ledger", story.ledger]) == 0
    said_later = capsys.readouterr()
    assert "dpfp" in next(output.rglob("*.html")).read_text(encoding="utf-8")
    assert SECRET_KEY not in "".join([*said, *said_later])


def test_the_service_shows_it(story: Story, store: ObjectStore, ray_turn: None) -> None:
    (port,) = free_ports(1)
    service = Command("serve", "--storage", story.storage, "--port", str(port))
    try:
        url = f"http://127.0.0.1:{port}/api/results"

        def answer() -> Any:
            try:
                found = requests.get(url, timeout=60)
            except requests.ConnectionError:
                assert service.process.poll() is None
                return None
            return found.text if found.ok and "finished" in found.text else None

        assert SECRET_KEY not in wait_for(answer, "the service's answer")
    finally:
        _, said = service.interrupt()
    assert SECRET_KEY not in said
