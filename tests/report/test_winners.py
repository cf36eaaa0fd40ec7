"""The first screen says who wins, by how much, at what cost, and what the ε is worth."""

from typing import Any

from dpfp_ray.report.plots import cell_label
from dpfp_ray.report.winners import Comparison, comparisons, headline, summary_table
from dpfp_ray.results.summary import cells_of, read_runs
from tests.support.samples import audited, comparison, sample


def judged(records: Any) -> list[Comparison]:
    return comparisons(cells_of(read_runs(records)))


def three(accuracies: tuple[float, float, float], seeds: int = 3) -> list[dict[str, Any]]:
    return [
        sample(f"{method}", seed=seed, method=method, accuracy=accuracy + 0.001 * seed)
        for method, accuracy in zip(("non_private", "dpfp", "dpsgd"), accuracies, strict=True)
        for seed in range(seeds)
    ]


def test_the_winner_its_lead_and_its_price() -> None:
    (found,) = judged(three((0.9, 0.88, 0.80)))
    assert cell_label(found.winner) == "DP-FP†"
    assert found.lead_text == "8.00 points ahead of DP-SGD"
    assert found.price_text == "2.00 points below Non-DP"
    assert "× the memory" in found.cost_text
    assert found.proved is not None
    assert found.proved.key.method == "dpsgd"


def test_a_lead_within_the_noise_is_called_a_tie() -> None:
    (found,) = judged(three((0.9, 0.881, 0.8805)))
    assert found.tie
    assert "a tie" in found.lead_text
    (found,) = judged(three((0.9, 0.87, 0.88), seeds=1))
    assert found.tie, "one point is nothing on 872 dev records"


def test_headlines() -> None:
    assert headline([], []) == "No private run has finished yet."
    found = judged(three((0.9, 0.88, 0.80)))
    assert headline(found, []).endswith("on demo, but its ε is only nominal.")
    found = judged(three((0.9, 0.881, 0.8805)))
    assert headline(found, []).startswith(
        "DP-FP† and DP-SGD tie at ε = 3 (PLD) on demo: 0.05 points"
    )
    found = judged(three((0.9, 0.80, 0.88)))
    assert headline(found, []).endswith("on demo, and its guarantee is proved.")


def test_a_refuted_winner_is_refuted_in_the_headline_card_and_table() -> None:
    records = three((0.9, 0.88, 0.80))
    runs = read_runs([*records, audited(records[3], 3.09, "refuted")])
    found = comparisons(cells_of(runs))
    said = headline(found, [run for run in runs if run.refuted])
    assert said.endswith("but an audit refuted its ε.")
    assert found[0].guarantee_text == "refuted: audit says ε ≥ 3.09"
    assert found[0].proved is not None
    (row,) = summary_table(found).rows
    assert row.tone == "refuted"


def test_a_method_refuted_at_one_budget_is_still_one_method() -> None:
    records = list(comparison(seeds=2))
    base = next(r for r in records if r["plan"]["method"] == "dpfp")
    found = judged([*records, audited(base, 9.0, "refuted")])
    assert (
        headline(found, []) == "DP-FP†‡ is best in all 2 comparisons, but an audit refuted its ε."
    )


def test_where_nobody_was_beaten_nobody_won() -> None:
    records = [*comparison(seeds=1), sample("alone", epsilon=0.02, accountant="gdp")]
    found = judged(records)
    assert len(found) == 3
    assert found[-1].lead_text == "no other private method was run"
    assert "all 2 comparisons" in headline(found, [])


def test_without_a_run_without_privacy_there_is_no_price() -> None:
    (found,) = judged([sample("a")])
    assert found.price is None
    assert found.price_text == "no run without privacy to compare with"
    assert summary_table([found]).rows[0].entries[8].missing


def test_methods_are_only_compared_by_the_same_accountant() -> None:
    found = judged([sample("a", accountant="pld"), sample("b", method="dpsgd", accountant="rdp")])
    assert len(found) == 2
