"""The end of a sweep: the best setting in words, whether it is told apart, and what was lost."""

from typing import Any

import pytest

from dpfp_ray.reports.best_setting import SweepOutcome, next_command, settings_table
from dpfp_ray.results.runs import read_runs
from dpfp_ray.system.errors import UserError
from tests.support.samples import failed, sample


def outcome(*accuracies: float, seeds: int = 1, lost: int = 0) -> SweepOutcome:
    records: list[Any] = [
        sample(
            f"t{at}",
            seed=seed,
            sweep="s",
            learning_rate=10.0 ** -(at + 1),
            batch_size=2 ** (at + 6),
            accuracy=score,
        )
        for at, score in enumerate(accuracies)
        for seed in range(seeds)
    ]
    records += [failed(f"f{at}", "s", "out of memory", learning_rate=1.0) for at in range(lost)]
    return SweepOutcome(read_runs(records))


def test_the_best_setting_is_told_in_words_with_its_interval_and_the_majority_class() -> None:
    first, second, *_ = outcome(0.7, 0.9, 0.6).lines
    assert first.startswith("Best of 3 settings: ")
    assert "B = 128" in first
    assert "learning rate = 0.01" in first
    assert "90." in first
    assert "always the largest class: 55.0%" in first
    assert second.startswith("Next: ")


def test_a_lead_is_told_apart_only_by_the_paired_test() -> None:
    assert "not told apart" in outcome(0.80, 0.805, 0.79).verdict
    far = outcome(0.6, 0.95, 0.55, seeds=5)
    assert far.verdict.startswith("told apart")
    assert far.headline.endswith("; told apart from the next.")


def test_a_best_setting_below_the_majority_class_says_so() -> None:
    assert "no better than that" in outcome(0.5, 0.45, 0.4).lines[0]


def test_trials_without_a_result_are_counted_by_reason() -> None:
    assert outcome(0.8, 0.7, lost=2).lines[-1] == "2 of 4 trials failed: out of memory"


def test_the_best_plan_is_that_of_the_best_trial() -> None:
    assert outcome(0.7, 0.9, 0.6).best_plan["batch_size"] == 128
    with pytest.raises(UserError, match="no trial of this sweep has finished"):
        _ = outcome(lost=1).best_plan


def test_the_table_has_what_was_varied_and_why_a_setting_wins() -> None:
    table = settings_table(outcome(0.7, 0.9, 0.6))
    assert [column.title for column in table.columns] == [
        "B",
        "learning rate",
        "Accuracy (%)",
        "Noise ÷ signal",
    ]
    assert table.rows[0].entries[0].text == "128"


def test_the_command_quotes_the_place() -> None:
    assert next_command("runs/a b") == "dpfp train --best 'runs/a b' --output 'runs/a b-best'"
