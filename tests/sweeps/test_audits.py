"""Audits on Ray: every plan once, their records in the store, their outcomes beside the rows."""

import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpfp_ray.auditing.audit import Settings
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps import compare as audits
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.sweeps.compare import audits_of, run_audits, with_outcomes
from dpfp_ray.sweeps.compare_table import summarise
from dpfp_ray.sweeps.driver import Runner
from dpfp_ray.sweeps.trial import InputsOnce
from dpfp_ray.training.step import Steps
from tests.support.ray_runs import trial


@pytest.mark.usefixtures("ray_session")
def test_every_plan_is_audited_once(
    tiny_task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trials that were finished before start no Ray: audits must look at the store themselves.
    looked: list[str] = []
    monkeypatch.setattr(Runner, "check_storage", lambda runner: looked.append(runner.storage))
    frozen = {"method": "dpfp", "mode": "moments", "micro_batches": None, "batch_size": None}
    moments = {**tiny_task, **frozen, "epochs": None, "learning_rate": None}
    moments = {name: value for name, value in moments.items() if value is not None}
    trials = [trial(tiny_task), trial(tiny_task, seed_index=1), trial(moments)]

    def audited() -> list[dict[str, Any]]:
        with Runner("test", str(tmp_path), RayOptions(seed=5), InputsOnce(), ledger) as runner:
            every, store = audits_of(trials), Store(tmp_path)
            left = {name: every[name] for name in every if store.get(name) is None}
            runner.run([], varied=[], audits=list(left.values()))
            run_audits(left, runner, canaries=1000)
            return [store.get(name) for name in every]

    ledger = Ledger(tmp_path / "ledger")
    found = audited()
    assert looked == [str(tmp_path)]
    assert [entry.status for entry in ledger.entries()] == ["finished", "finished"]
    assert {entry.use.purpose for entry in ledger.entries()} == {"audit"}
    assert [record["plan"]["mode"] for record in found] == ["paper", "moments"]
    assert {record["audit"]["canaries"] for record in found} == {60}  # half of the records
    stored = {record["trial"]["id"]: record for record in Store(tmp_path).records()}
    assert set(stored) == {f"audit-{one.plan.hash}" for one in trials}
    assert all(record["audit"]["verdict"] for record in stored.values())

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert audited() == found
    assert len(ledger.entries()) == 2
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}

    rows = with_outcomes(summarise([]) or [{"method": "dpfp moments", "epsilon": 8.0}], found)
    assert rows[0]["verdict"] == found[1]["audit"]["verdict"]
    assert rows[0]["audit_epsilon"] == found[1]["audit"]["epsilon"]


def test_rows_without_an_audit_stay_as_they_are() -> None:
    assert with_outcomes([{"method": "rgp", "epsilon": 3.0}], []) == [
        {"method": "rgp", "epsilon": 3.0}
    ]


@pytest.mark.parametrize(("save_every", "saved"), [(1000.0, False), (0.0, True)])
def test_states_are_saved_now_and_then(
    tiny_task: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save_every: float,
    saved: bool,
) -> None:
    take = Steps.take
    killed_at = 3

    def take_or_die(self: Steps, step: int) -> Any:
        return take(self, step) if step < killed_at else sys.exit()

    monkeypatch.setattr(Steps, "take", take_or_die)
    plan, seeds = make_plan({**tiny_task, "scope": "head"}), {"seed": 1, "membership_seed": 2}
    with pytest.raises(SystemExit):
        audits.audit_task(plan, Settings(10), str(tmp_path), 1, None, seeds, save_every)
    assert (tmp_path / "unfinished" / "resume.pt").exists() == saved


def test_an_audit_without_a_folder_works_in_a_private_one_and_removes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders: list[Path] = []

    def open_audit(folder: Path, *_: Any) -> Any:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folders.append(folder)
        return SimpleNamespace(record={})

    monkeypatch.setattr(audits, "open_audit", open_audit)
    seeds = {"seed": 1, "membership_seed": 2}
    for _ in range(2):
        audits.audit_task(Plan(), Settings(10), None, 1, None, seeds, 30.0)
    assert folders[0] != folders[1]
    assert not any(folder.exists() for folder in folders)
