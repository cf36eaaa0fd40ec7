"""The first screen says who wins, by how much, at what cost, and what the ε is worth."""

from typing import Any

from dpfp_ray.reports.page import shown_contests
from dpfp_ray.reports.plots import cell_label
from dpfp_ray.reports.score_tables import summary_table
from dpfp_ray.reports.winners import Card, headline
from dpfp_ray.results.cells import cells_of
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import read_runs
from tests.support.samples import audited, comparison, sample


def judged(records: Any) -> list[Contest]:
    return contests_of(cells_of(read_runs(records)))


def three(accuracies: tuple[float, float, float], seeds: int = 5) -> list[dict[str, Any]]:
    return [
        sample(f"{method}", seed=seed, method=method, accuracy=accuracy + 0.001 * seed)
        for method, accuracy in zip(("non_private", "dpfp", "dpsgd"), accuracies, strict=True)
        for seed in range(seeds)
    ]


def test_the_winner_its_lead_and_its_price() -> None:
    (found,) = judged(three((0.9, 0.88, 0.80)))
    card = Card(found)
    assert card.title == "DP-FP†"
    assert card.lead_text.startswith("+8.00 points [+")
    assert card.lead_text.endswith("] against DP-SGD")
    assert card.price_text.startswith("−2.00 points [")
    assert "× the memory" in card.cost_text
    assert "41 s before it" in card.cost_text
    assert card.majority_text.startswith("55.00%")
    assert card.proved is not None
    assert card.proved.key.method == "dpsgd"


def test_a_tie_is_a_tie_in_the_card_the_headline_and_the_table() -> None:
    found = judged(three((0.9, 0.881, 0.8805)))
    card = Card(found[0])
    assert card.title == "Tie: DP-FP† and DP-SGD"
    assert "a tie against DP-SGD" in card.lead_text
    assert headline(found, []).startswith("DP-FP† and DP-SGD tie at ε = 3 (PLD) on demo:")
    (row,) = summary_table(found).rows
    assert row.entries[4].text == "a tie"
    assert row.entries[8].text.endswith("(tie)")


def test_one_seed_names_no_winner_however_large_the_lead() -> None:
    found = judged(three((0.9, 0.95, 0.70), seeds=1))
    card = Card(found[0])
    assert card.title == "No winner: one seed"
    assert headline(found, []).startswith("No winner at ε = 3 (PLD) on demo: the spread over")
    (row,) = summary_table(found).rows
    assert row.entries[4].text == "one seed only"
    many = judged(list(comparison(seeds=1)))
    assert headline(many, []) == (
        "No winner in 2 comparisons: 2 one seed only; run with --seeds 5."
    )


def test_records_without_predictions_are_shown_and_not_tested() -> None:
    records = three((0.9, 0.95, 0.70))
    for record in records:
        record["predictions"] = []
    found = judged(records)
    card = Card(found[0])
    assert card.title == "No winner: not tested"
    assert card.scores[0] == ("DP-FP†", "95.20%")
    assert "without dev predictions" in headline(found, [])


def test_a_model_that_answers_one_class_is_called_that_and_never_wins() -> None:
    records = three((0.9, 0.40, 0.40))
    records = [r for r in records if r["plan"]["method"] != "dpfp"]
    records += [sample("dpfp", seed=s, method="dpfp", one_class=True) for s in range(5)]
    (found,) = judged(records)
    assert found.winner is None, "55% by one class against 40%: no win"
    assert ("DP-FP† (one class)", "55.00% [51.9, 58.1]") in Card(found).scores


def test_headlines() -> None:
    assert headline([], []) == "No private run has finished yet."
    found = judged(three((0.9, 0.88, 0.80)))
    assert headline(found, []).endswith("on demo, but its ε is only nominal.")
    found = judged(three((0.9, 0.80, 0.88)))
    assert headline(found, []).endswith("on demo, and its guarantee is proved.")


def test_a_refuted_winner_is_refuted_in_the_headline_card_and_table() -> None:
    records = three((0.9, 0.88, 0.80))
    runs = read_runs([*records, audited(records[5], 3.09, "refuted")])
    found = contests_of(cells_of(runs))
    said = headline(found, [run for run in runs if run.refuted])
    assert said.endswith("but an audit refuted its ε.")
    assert Card(found[0]).guarantee_text == "DP-FP†‡: refuted: audit says ε ≥ 3.09"
    (row,) = summary_table(found).rows
    assert row.tone == "refuted"


def test_a_method_refuted_at_one_budget_is_still_one_method() -> None:
    records = list(comparison(seeds=5))
    base = next(r for r in records if r["plan"]["method"] == "dpfp")
    said = headline(judged([*records, audited(base, 9.0, "refuted")]), [])
    assert said.startswith("Of 2 comparisons, DP-FP†‡ is best in all 2, but an audit refuted its ε")


def test_cards_are_as_many_as_the_headline_counts() -> None:
    records = [*comparison(seeds=1), sample("alone", epsilon=0.02, accountant="gdp")]
    found = judged(records)
    assert len(found) == 3
    assert Card(found[-1]).lead_text == "no other private method was run"
    assert "2 comparisons" in headline(found, [])
    assert len(shown_contests(found)) == 2


def test_without_a_run_without_privacy_there_is_no_price() -> None:
    (found,) = judged([sample("a")])
    assert Card(found).price_text == "no run without privacy to compare with"
    assert summary_table([found]).rows[0].entries[11].missing


def test_the_label_of_the_winner_carries_its_marks() -> None:
    (found,) = judged(three((0.9, 0.88, 0.80)))
    assert found.winner is not None
    assert cell_label(found.winner) == "DP-FP†"
