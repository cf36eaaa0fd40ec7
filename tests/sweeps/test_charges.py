"""Trials of sweeps and comparisons in the ledger, as the driver sees them; no Ray is needed."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_cost import RdpCurve
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.driver import Charges
from dpfp_ray.sweeps.trial import InputsOnce, SweepState, Trial, bind_trial, settle
from dpfp_ray.system.errors import UserError

Values = dict[str, Any]
SEED = 7
inputs = InputsOnce()


@pytest.fixture(scope="module")
def head(tiny_task: Values) -> Values:
    chosen = {**tiny_task, "method": "dpsgd", "scope": "head", "epsilon": 2.0}
    return {name: value for name, value in chosen.items() if name != "micro_batches"}


def charges(tmp_path: Path, ledger: str = "ledger") -> Charges:
    return Charges(Ledger(tmp_path / ledger), str(tmp_path / "store"), inputs)


def trials(values: Values, *rates: float, **changes: Any) -> list[Trial]:
    return [bind_trial({**values, "learning_rate": r, **changes}, inputs) for r in rates]


def put(tmp_path: Path, trial: Trial, status: str, steps: int | None, **facts: Any) -> None:
    """What a trial's process leaves in the store."""
    privacy = {"noise_multiplier": trial.noise_multiplier, "steps": steps}
    record = {
        "plan": trial.plan.to_dict(),
        "plan_hash": trial.plan.hash,
        "finished": status == "finished",
        "trial": {"id": trial.id, "status": status, "ledger_entry": trial.entry, **facts},
        "history": [],
        **({"privacy": privacy} if steps is not None else {}),
    }
    Store(tmp_path / "store").put(record)


def begun(head: Values, tmp_path: Path) -> tuple[Charges, Trial]:
    """A driver and the one trial that it has entered."""
    driver = charges(tmp_path)
    (trial,) = driver.begin(trials(head, 1e-3), SEED)
    return driver, trial


def ends(tmp_path: Path, ledger: str = "ledger") -> list[tuple[str, int | None]]:
    return [(entry.status, entry.done) for entry in Ledger(tmp_path / ledger).entries()]


@pytest.mark.parametrize(("facts", "steps"), [({"steps_drawn": 5}, 5), ({}, None)])
def test_a_failed_trial_is_charged_for_the_steps_it_drew_or_without_a_count_in_full(
    head: Values, tmp_path: Path, facts: Values, steps: int | None
) -> None:
    driver, trial = begun(head, tmp_path)
    SweepState(driver.storage).mark_drawn(trial.id)
    settle(driver.storage, trial, "failed", "its node was lost", facts)
    driver.settle()
    assert ends(tmp_path) == [("failed", steps or trial.plan.steps)]


def test_a_stopped_trial_is_charged_for_its_last_epoch_and_a_killed_one_for_its_plan(
    head: Values, tmp_path: Path
) -> None:
    driver, trial = begun(head, tmp_path)
    put(tmp_path, trial, "running", 4)
    driver.settle()
    (entry,) = Ledger(tmp_path / "ledger").entries()
    assert (entry.status, entry.charged) == ("open", trial.plan.steps)
    put(tmp_path, trial, "stopped", 15)
    driver.settle()
    assert ends(tmp_path) == [("stopped", 15)]


def test_a_driver_that_was_killed_after_a_record_is_made_up_for_and_another_ledger_pays_once(
    head: Values, tmp_path: Path
) -> None:
    first, trial = begun(head, tmp_path)
    put(tmp_path, trial, "finished", trial.plan.steps)
    charges(tmp_path).settle()
    assert ends(tmp_path) == [("finished", trial.plan.steps)]
    other = charges(tmp_path, "other")
    other.people(trial.plan)
    for _ in range(2):
        other.settle()
    assert ends(tmp_path, "other") == [("finished", trial.plan.steps)]
    assert other.spent()[0].epsilon == pytest.approx(first.spent()[0].epsilon)


def test_a_winner_brings_the_price_of_its_selection_to_another_ledger(
    head: Values, tmp_path: Path
) -> None:
    """One trial of it would cost far less."""
    (trial,) = trials(head, 1e-3)
    part = RdpCurve((2.0, 4.0, 8.0), (3.0, 4.0, 5.0))
    put(tmp_path, trial, "finished", trial.plan.steps)
    store = Store(tmp_path / "store")
    (record,) = store.records()
    store.put({**record, "selection": {"kind": "geometric:4", "part": asdict(part)}})
    other = charges(tmp_path)
    other.people(trial.plan)
    other.settle()
    (entry,) = Ledger(tmp_path / "ledger").entries()
    assert (entry.use.parts, entry.done) == ((part,), 1)


def test_a_trial_that_went_on_after_another_driver_ended_it_is_charged(
    head: Values, tmp_path: Path
) -> None:
    """Two drivers on one store: the second fails early, the first one goes on."""
    first, second = charges(tmp_path), charges(tmp_path)
    (trial,) = first.begin(trials(head, 1e-3), SEED)
    (again,) = second.begin(trials(head, 1e-3), SEED)
    put(tmp_path, again, "failed", None, steps_drawn=1)
    second.settle()
    assert {done for _, done in ends(tmp_path)} == {1}
    put(tmp_path, trial, "finished", trial.plan.steps)
    first.settle()
    assert first.spent()[0].entries[0].charged == trial.plan.steps


def test_a_record_of_another_driver_s_run_does_not_end_ours(head: Values, tmp_path: Path) -> None:
    """Two seeds in one store: the same trial twice, and only the last record of it is left."""
    first, second = charges(tmp_path), charges(tmp_path)
    (ours,) = first.begin(trials(head, 1e-3), SEED)
    (theirs,) = second.begin(trials(head, 1e-3), SEED + 1)
    put(tmp_path, ours, "finished", ours.plan.steps)
    put(tmp_path, theirs, "failed", None, steps_drawn=1)
    first.settle()
    assert {entry.id: entry.charged for entry in Ledger(tmp_path / "ledger").entries()} == {
        ours.entry: ours.plan.steps,
        theirs.entry: 1,
    }


def test_heads_from_one_release_cost_one_release(tiny_task: Values, tmp_path: Path) -> None:
    steps = ("micro_batches", "learning_rate", "batch_size", "epochs")
    moments = {k: v for k, v in tiny_task.items() if k not in steps} | {"mode": "moments"}
    driver = charges(tmp_path)
    made = [bind_trial({**moments, "ridge": ridge}, inputs) for ridge in (0.1, 0.2, 0.3)]
    driver.begin(made[:1], SEED)
    alone = driver.spent()[0].epsilon
    driver.begin(made[1:], SEED)
    assert driver.spent()[0].epsilon == pytest.approx(alone)


def test_a_list_that_would_pass_the_total_is_refused_as_a_whole(
    head: Values, tmp_path: Path
) -> None:
    driver = charges(tmp_path)
    driver.ledger.set_total(4.0, 1e-5)
    with pytest.raises(UserError, match=r"these 5 runs would bring .* above the total of 4"):
        driver.begin(trials(head, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1), SEED, "list")
    assert ends(tmp_path) == [("refused", 0)] * 5
