"""A sweep's records as an Optuna study: every varied field, its range, and what has no score."""

from pathlib import Path
from typing import Any

import optuna
import pytest

from dpfp_ray.results.rows import flatten
from dpfp_ray.results.store import Store
from dpfp_ray.results.study import distribution_of, study_of, to_optuna, varied_fields
from dpfp_ray.system.errors import UserError
from tests.support.samples import failed, sample


def trials() -> list[Any]:
    scores = {1e-4: 0.7, 1e-3: 0.8, 1e-2: 0.6}
    made = [
        sample(f"t{rate}", sweep="s", learning_rate=rate, clip=1.0, accuracy=score)
        for rate, score in scores.items()
    ]
    return [*made, failed("bad", "s", "out of memory", learning_rate=1.0)]


def test_the_fields_that_differ_are_the_parameters() -> None:
    rows = [flatten(record) for record in trials()]
    assert "learning_rate" in varied_fields(rows)
    assert "clip" not in varied_fields(rows[:3])
    study = study_of(rows[:3])
    assert study.best_params["learning_rate"] == 1e-3
    assert study.best_value == pytest.approx(0.8, abs=0.01)


def test_a_trial_without_a_score_is_in_the_study_as_failed() -> None:
    study = study_of([flatten(record) for record in trials()], ["learning_rate"])
    states = [trial.state for trial in study.trials]
    assert states.count(optuna.trial.TrialState.FAIL) == 1
    assert states.count(optuna.trial.TrialState.COMPLETE) == 3


@pytest.mark.parametrize(
    ("values", "kind", "log"),
    [
        ([1e-4, 1e-2], "FloatDistribution", True),
        ([0.5, 1.0], "FloatDistribution", False),
        ([16, 256], "IntDistribution", True),
        (["mean", "pooler"], "CategoricalDistribution", None),
        (["auto", 0.5], "CategoricalDistribution", None),
    ],
)
def test_ranges_are_those_of_what_was_tried(values: list[Any], kind: str, log: bool | None) -> None:
    distribution = distribution_of(values)
    assert type(distribution).__name__ == kind
    assert getattr(distribution, "log", None) == log
    assert distribution_of([None]) is None


def test_a_study_on_storage_opens_in_optuna(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    for record in trials():
        store.put(record)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    made = to_optuna(tmp_path / "sweep", storage=url)
    opened = optuna.load_study(study_name=made.study_name, storage=url)
    assert len(opened.trials) == 4
    with pytest.raises(UserError, match="use another file"):
        to_optuna(tmp_path / "sweep", storage=url)
