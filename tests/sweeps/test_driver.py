"""Trials on a real (small) Ray: complete records, the same numbers as a plain run, no secrets."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpfp_ray.sweeps import driver
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.sweeps.driver import Runner, check_deadlock, check_seen_everywhere, until_none
from dpfp_ray.sweeps.trial import RETRIES, InputsOnce, Trial, unfinished
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.prepare import prepare
from tests.support.ray_runs import measured, records, trial
from tests.support.tiny_runs import run_with

SECRET_SEED = 0x1234567890ABCDEF1234567890ABCDEF
OPTIONS = RayOptions(seed=SECRET_SEED, concurrency=1, cpus_per_worker=1)


@dataclass
class Swept:
    storage: Path
    trials: dict[str, Trial]
    records: dict[str, dict[str, Any]]
    found_secrets: list[str]

    def record(self, name: str) -> dict[str, Any]:
        return self.records[self.trials[name].id]


@pytest.fixture(scope="module")
def swept(
    tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, ray_session: None
) -> Swept:
    """Four methods' trials one after the other in one process, and one that breaks in between."""
    storage = tmp_path_factory.mktemp("sweep")
    others = {k: v for k, v in tiny_task.items() if k != "micro_batches"}
    plain = {k: v for k, v in others.items() if k not in ("epsilon", "accountant")}
    broken = trial(tiny_task)
    trials = {
        "dpfp": trial(tiny_task),
        "dpsgd": trial(others, method="dpsgd", learning_rate=1e-2),
        "broken": Trial(replace(broken.plan, records=10**6), broken.noise_multiplier),
        "non_private": trial(plain, method="non_private"),
        "again": trial(tiny_task, seed_index=1),
    }
    with Runner("a-sweep", str(storage), OPTIONS, InputsOnce()) as runner:
        runner.run(list(trials.values()), varied=["method"])
        seeds = [SECRET_SEED, *(t.seed(SECRET_SEED) for t in trials.values())]
        secrets = find_secrets(storage, seeds)
    return Swept(storage, trials, records(storage), secrets)


def find_secrets(storage: Path, seeds: list[int]) -> list[str]:
    """Files that hold a seed: as digits, in hexadecimal, or in the bytes of a pickle."""
    forms = []
    for seed in seeds:
        forms += [str(seed).encode(), f"{seed:x}".encode()]
        forms += [seed.to_bytes(16, "little"), seed.to_bytes(16, "big")]
    paths = [path for path in storage.rglob("*") if path.is_file()]
    assert any(path.name == "tuner.pkl" for path in paths), "Tune's own files should be here, too"
    return [str(p) for p in paths if any(form in p.read_bytes() for form in forms)]


def test_records_are_complete(swept: Swept) -> None:
    record, planned = swept.record("dpfp"), swept.trials["dpfp"].plan
    assert (record["plan"], record["plan_hash"]) == (planned.to_dict(), planned.hash)
    assert record["finished"]
    facts = record["trial"]
    assert (facts["sweep"], facts["status"], facts["error"]) == ("a-sweep", "finished", None)
    assert facts["seconds"] > 0
    assert facts["started_at"] > 1.7e9
    assert "/" in facts["node"]
    assert [entry["epoch"] for entry in record["history"]] == [1, 2]
    assert record["environment"]["threads"] == 1
    assert "statement" in record


@pytest.mark.parametrize("name", ["dpfp", "dpsgd", "non_private", "again"])
def test_same_numbers_as_a_plain_run(swept: Swept, name: str) -> None:
    """Also for the later ones: nothing leaks from one trial into the next in its process."""
    chosen = swept.trials[name]
    torch.set_num_threads(1)
    prepared = prepare(replace(chosen.plan))
    assert prepared.noise_multiplier == chosen.noise_multiplier
    record, _ = run_with(prepared, seed=chosen.seed(SECRET_SEED))
    assert measured(swept.record(name)) == measured(record)


def test_a_trial_that_raises_is_on_record_and_the_sweep_goes_on(swept: Swept) -> None:
    record = swept.record("broken")
    assert record["trial"]["status"] == "failed"
    assert record["trial"]["error"].startswith("IndexError: ")
    assert not record["finished"]
    assert swept.record("again")["finished"]


def test_only_results_stay_behind_and_no_file_held_a_seed(swept: Swept) -> None:
    assert swept.found_secrets == []
    assert [path.name for path in swept.storage.iterdir()] == ["records"]


def test_finished_sweep_needs_no_ray(swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "connected", lambda *_: pytest.fail("Ray was started"))
    trials = list(swept.trials.values())
    assert unfinished(trials, str(swept.storage)) == []
    with Runner("a-sweep", str(swept.storage), OPTIONS, InputsOnce()) as runner:
        runner.run(trials, varied=["method"])


def test_tpe_through_ray_client_is_refused(tmp_path: Path) -> None:
    options = RayOptions(address="ray://far:10001")
    searcher: Any = SimpleNamespace(left=3, read=lambda: None)
    runner = Runner("s", str(tmp_path), options, InputsOnce())
    with runner, pytest.raises(UserError, match="--address auto"):
        runner.search(searcher, [], varied=[])


@pytest.mark.parametrize("nodes", [1, 2])
def test_it_asks_every_node_for_the_store_where_there_are_several(
    nodes: int, ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    asked: list[str] = []
    living = ray.nodes() * nodes
    monkeypatch.setattr(ray, "nodes", lambda: living)
    monkeypatch.setattr(driver, "check_seen_everywhere", lambda *facts: asked.append(facts[0]))
    with Runner("test", str(tmp_path), RayOptions(seed=5), InputsOnce()) as runner:
        runner.check_storage()
    assert asked == [str(tmp_path)] * (nodes - 1)


def test_a_store_that_a_living_node_does_not_see_is_refused(
    ray_session: None, tmp_path: Path
) -> None:
    import ray

    check_seen_everywhere(str(tmp_path), "marker", [{"NodeID": "ab" * 28}])  # it has left since
    with pytest.raises(UserError, match=r"is not the same folder on .*; use one that all machines"):
        check_seen_everywhere(str(tmp_path), "marker", ray.nodes())
    (tmp_path / "marker").touch()
    check_seen_everywhere(str(tmp_path), "marker", ray.nodes())


def test_trials_that_are_left_again_and_again_are_an_error() -> None:
    rounds = until_none(lambda: [1])
    for _ in range(1 + RETRIES):
        next(rounds)
    with pytest.raises(UserError, match="the same command continues"):
        next(rounds)


def test_nested_scheduler_without_dashboard_is_refused(ray_session: None) -> None:
    with pytest.raises(UserError, match="dashboard"):
        check_deadlock(object(), workers=2)
    check_deadlock(object(), workers=1)
    check_deadlock(None, workers=2)
