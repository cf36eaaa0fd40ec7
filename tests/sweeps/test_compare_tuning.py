"""Cells of a comparison: repeated for each seed, and tuned beforehand."""

from pathlib import Path
from typing import Any

from dpfp_ray.sweeps.compare_tuning import bind_cells, drawn
from dpfp_ray.sweeps.sweep_trials import InputsOnce
from dpfp_ray.sweeps.trial import Trial


def test_repetitions_come_round_by_round(tiny_task: dict[str, Any]) -> None:
    cells = [tiny_task, {**tiny_task, "epsilon": 3.0}]
    trials = bind_cells(cells, 2, InputsOnce())
    assert [(t.plan.epsilon, t.seed_index) for t in trials] == [(8, 0), (3, 0), (8, 1), (3, 1)]


FREE = ("batch_size", "micro_batches", "learning_rate")


def test_tuning_starts_from_the_papers_settings(tiny_task: dict[str, Any]) -> None:
    cell = {k: v for k, v in tiny_task.items() if k not in FREE}
    found = drawn(cell, 6, InputsOnce())
    first: Trial = found[0][1]
    assert (first.plan.B, first.plan.M, first.plan.learning_rate) == (32, 32, 5e-6)
    assert len({trial.id for _, trial in found}) == 6
    assert all(trial.group == "tune" for _, trial in found)
    assert len({trial.plan.B for _, trial in found}) > 1
    assert all(trial.plan.B <= 120 * trial.plan.M for _, trial in found), "only what can run"


def test_tuning_leaves_alone_what_the_user_has_fixed(tiny_task: dict[str, Any]) -> None:
    cell = {k: v for k, v in tiny_task.items() if k != "learning_rate"}
    found = drawn(cell, 4, InputsOnce())
    assert {(trial.plan.B, trial.plan.M) for _, trial in found} == {(8, 2)}
    assert len({trial.plan.learning_rate for _, trial in found}) == 4


def test_every_method_has_a_space_to_tune_in(tiny_task: dict[str, Any], tmp_path: Path) -> None:
    free = (*FREE, "epsilon", "accountant", "epochs")
    cell = {k: v for k, v in tiny_task.items() if k not in free}
    for method in ("non_private", "dpsgd", "rgp"):
        assert len(drawn({**cell, "method": method}, 3, InputsOnce())) == 3
