"""What a sweep costs as a whole."""

from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.cost import composed_cost, write_cost


def record(identity: str, *, release: str | None = None, **values: Any) -> dict[str, Any]:
    plan = Plan(**{"task": "demo", "method": "dpsgd", "records": 5000, **values})
    privacy: dict[str, Any] = {"steps": plan.steps, "noise_multiplier": noise_multiplier(plan)}
    if release:
        privacy["release_id"] = release
    trial = {"id": identity, "status": "finished"}
    return {
        "plan": plan.to_dict(),
        "plan_hash": plan.hash,
        "privacy": privacy,
        "trial": trial,
        "statement": {"tuning": {"epsilon": None, "text": "none"}},
    }


def test_one_trial_costs_what_it_says() -> None:
    (cost,) = composed_cost([record("a")])
    assert cost.epsilon == pytest.approx(3.0, rel=0.01)
    assert cost.trials == 1


def test_trials_on_the_same_records_compose() -> None:
    alone = record("a")
    (cost,) = composed_cost([alone, record("b", learning_rate=1e-3)])
    plan = Plan(**alone["plan"])
    twice = accounting.mechanism(plan, alone["privacy"]["noise_multiplier"], 2 * plan.steps)
    assert plan.delta is not None
    exact = accounting.epsilon(twice, plan.delta, "pld")
    assert cost.epsilon == pytest.approx(exact, rel=0.01)


def test_trials_that_read_one_release_cost_no_more_than_one() -> None:
    values = {"method": "dpfp", "mode": "moments", "clip": 1.0}
    many = [record(str(n), release="same", ridge=0.1 * (n + 1), **values) for n in range(5)]
    (cost,) = composed_cost(many)
    assert cost.trials == 5
    assert cost.epsilon == pytest.approx(3.0, rel=0.01)


def test_other_releases_are_charged_for() -> None:
    values = {"method": "dpfp", "mode": "moments"}
    one, two = record("a", release="x", **values), record("b", release="y", **values)
    (cost,) = composed_cost([one, two])
    assert cost.epsilon > 4.0


def test_randomised_labels_add_up() -> None:
    values = {"method": "dpfp", "mode": "release_once"}
    plain = [record(name, release=name, **values) for name in "ab"]
    with_labels = [record(name, release=name, label_epsilon=1.0, **values) for name in "ab"]
    for one, other in zip(plain, with_labels, strict=True):  # the same noise on the texts
        other["privacy"]["noise_multiplier"] = one["privacy"]["noise_multiplier"]
    (without,), (cost,) = composed_cost(plain), composed_cost(with_labels)
    assert cost.epsilon == pytest.approx(without.epsilon + 2 * 1.0)


def test_other_records_do_not_compose() -> None:
    costs = composed_cost([record("a"), record("b", task="sst2")])
    assert [cost.trials for cost in costs] == [1, 1]


def test_the_paper_mode_is_marked_nominal() -> None:
    (cost,) = composed_cost([record("a", method="dpfp")])
    assert "†" in cost.sentence()


def test_trials_that_never_started_cost_nothing() -> None:
    refused = {"plan": {"method": "dpsgd", "epsilon": 3}, "trial": {"id": "r"}}
    assert composed_cost([refused]) == []


def test_the_cost_reaches_every_statement(tmp_path: Path) -> None:
    records = [record("a"), record("b", learning_rate=1e-3)]
    costs = composed_cost(records)
    write_cost(str(tmp_path), records, costs)
    for kept in Store(tmp_path).records():
        assert kept["statement"]["tuning"]["epsilon"] == costs[0].epsilon
