"""The first sentence says who wins, or why nobody does, and what the ε is worth."""

from typing import Any

import pytest

from dpfp_ray.reports.headline import headline
from dpfp_ray.results.cells import cells_of
from dpfp_ray.results.contests import contests_of
from dpfp_ray.results.runs import read_runs
from tests.support.samples import audited, comparison, sample


def said(records: Any) -> str:
    runs = read_runs(records)
    return headline(contests_of(cells_of(runs)), [run for run in runs if run.refuted])


def three(accuracies: tuple[float, float, float], seeds: int = 5) -> list[dict[str, Any]]:
    return [
        sample(f"{method}", seed=seed, method=method, accuracy=accuracy + 0.001 * seed)
        for method, accuracy in zip(("non_private", "dpfp", "dpsgd"), accuracies, strict=True)
        for seed in range(seeds)
    ]


def test_a_winner_is_named_with_what_its_epsilon_is_worth() -> None:
    assert said(three((0.9, 0.88, 0.80))) == (
        "DP-FP† is best on demo at ε = 3 (PLD), but its ε is only nominal."
    )
    assert said(three((0.9, 0.80, 0.88))).endswith("(PLD), and its guarantee is proved.")


def test_a_tie_is_called_a_tie() -> None:
    assert said(three((0.9, 0.881, 0.8805))).startswith("DP-FP† and DP-SGD tie on demo at ε = 3")


def test_of_a_tie_of_many_the_highest_is_named() -> None:
    records = [
        sample(method, seed=seed, method=method, accuracy=accuracy + 0.001 * seed)
        for method, accuracy in zip(
            ("dpfp", "dpsgd", "rgp", "opacus"), (0.88, 0.8811, 0.8805, 0.8802), strict=True
        )
        for seed in range(5)
    ]
    assert said(records) == (
        "DP-SGD has the highest mean on demo at ε = 3 (PLD), but others tie with it."
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_name_no_winner_but_what_was_measured_leads(seeds: int) -> None:
    sentence = said(three((0.9, 0.95, 0.945), seeds=seeds))
    assert sentence.startswith("Too few seeds to tell methods apart (run with --seeds 5).")
    assert "Highest: DP-FP† with 95." in sentence


def test_what_holds_at_several_budgets_is_said_once() -> None:
    sentence = said(list(comparison(budgets=(1.0, 8.0), seeds=5)))
    assert sentence.count("DP-FP† is best") == 1
    assert "at ε = 1 and 8 (PLD)" in sentence


def test_many_comparisons_are_counted() -> None:
    records = list(comparison(budgets=(1.0, 2.0, 3.0, 5.0, 8.0), seeds=1))
    assert said(records).endswith("and 1 more comparisons.")


def test_a_method_refuted_at_one_budget_is_still_one_method() -> None:
    records = list(comparison(budgets=(1.0, 2.0, 3.0, 5.0, 8.0), seeds=5))
    base = next(r for r in records if r["plan"]["method"] == "dpfp")
    sentence = said([*records, audited(base, 9.0, "refuted")])
    assert sentence.startswith("Of 5 comparisons, DP-FP†‡ is best in all 5, but an audit refuted")


def test_records_without_predictions_are_not_tested() -> None:
    records = three((0.9, 0.95, 0.70))
    for record in records:
        record["predictions"] = []
    assert "without dev predictions" in said(records)


def test_one_method_alone_is_told_by_its_accuracy() -> None:
    assert said([sample("a", accuracy=0.8)]).startswith("DP-FP† with 80.0% [")
    assert said([]) == "No private run has finished yet."
