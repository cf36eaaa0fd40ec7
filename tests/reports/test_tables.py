"""What stands in which table: ours, the paper's, the difference, and what is missing."""

from typing import Any

import pytest

from dpfp_ray.reports.cell_tables import (
    accounting_table,
    audit_table,
    cost_table,
    noise_table,
    overview,
    runs_table,
)
from dpfp_ray.reports.main_table import main_table
from dpfp_ray.reports.paper import paper_table
from dpfp_ray.reports.tables import MISSING, Row, Table, duration, number, percent, text
from dpfp_ray.results.cells import cells_of
from dpfp_ray.results.runs import read_runs
from tests.support.samples import audited, comparison, failed, sample, with_statement

FOUR = ("mnli", "qqp", "qnli", "sst2")


def cells(records: Any) -> Any:
    return cells_of(read_runs(records))


def find(table: Table, *words: str) -> dict[str, str]:
    """The first row that starts with these words, by column."""
    for row in (*table.rows, *table.foot):
        if [entry.text for entry in row.entries[: len(words)]] == list(words):
            return as_dict(table, row)
    raise AssertionError(f"no row {words}")


def as_dict(table: Table, row: Row) -> dict[str, str]:
    names = [f"{c.group}: {c.title}" if c.group else c.title for c in table.columns]
    return {name: entry.text for name, entry in zip(names, row.entries, strict=True)}


def test_the_papers_number_stands_below_ours_with_the_difference() -> None:
    made = sample("a", task="sst2", model="roberta-base", epsilon=3.0, accuracy=0.92)
    table = main_table(cells([made]))
    column = "ε = 3 (PLD): SST-2"
    assert find(table, "roberta-base", "DP-FP†", "ours")[column] == "92.00"
    assert find(table, "roberta-base", "DP-FP†", "paper")[column] == "93.23"
    assert find(table, "roberta-base", "DP-FP†", "ours − paper")[column] == "−1.23"
    assert any("another accountant is not the same noise" in note for note in table.notes)


def test_the_same_budget_by_the_papers_accountant_needs_no_warning() -> None:
    fields = {"task": "sst2", "model": "roberta-base", "epsilon": 1.73, "accountant": "gdp"}
    table = main_table(cells([sample("a", **fields)]))
    assert find(table, "roberta-base", "DP-FP†", "paper")["ε = 1.73 (GDP + CLT): SST-2"] == "93.23"
    assert not any("another accountant" in note for note in table.notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "minilm"},
        {"task": "demo"},
        {"epsilon": 5.0},
        {"max_train": 1_000},
        {"max_dev": 100},
        {"method": "dpfp", "adjacency": "replace_one"},
        {"method": "dpsgd", "scope": "head"},
    ],
    ids=str,
)
def test_without_the_same_model_task_and_budget_there_is_no_number_of_the_papers(
    fields: dict[str, Any],
) -> None:
    usual = {"task": "sst2", "model": "roberta-base", "epsilon": 3.0}
    table = main_table(cells([sample("a", **(usual | fields))]))
    assert all(row.entries[2].text == "ours" for row in (*table.rows, *table.foot))


def test_it_is_said_that_the_paper_did_not_run_a_model() -> None:
    assert any("did not run minilm" in note for note in main_table(cells(comparison())).notes)


@pytest.mark.slow
def test_the_papers_layout_averages_over_its_five_columns() -> None:
    table = main_table(cells(comparison(tasks=FOUR, seeds=1, model="roberta-large")))
    columns = [column.title for column in table.columns]
    wanted = ["MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "Avg."]
    assert columns == ["Model", "Method", "Whose", *wanted, *wanted]
    row = find(table, "roberta-large", "DP-FP†", "paper")
    assert row["ε = 3 (PLD): Avg."] == "91.34"
    assert row["ε = 8 (PLD): Avg."] == "91.57"
    assert find(table, "roberta-large", "Non-DP", "paper")["ε = 3 (PLD): Avg."] == "92.24"


@pytest.mark.slow
def test_an_average_needs_every_task() -> None:
    records = [*comparison(tasks=FOUR, budgets=(3.0,), seeds=1)]
    left = [r for r in records if r["plan"]["method"] != "rgp" or r["plan"]["task"] == "sst2"]
    row = find(main_table(cells(left)), "minilm", "RGP", "ours")
    assert row["ε = 3 (PLD): QNLI"] == row["ε = 3 (PLD): Avg."] == MISSING
    assert row["ε = 3 (PLD): SST-2"] != MISSING


def test_unlike_tasks_have_no_average() -> None:
    records = [*comparison(tasks=("sst2", "demo"), budgets=(3.0,), seeds=1)]
    assert "Avg." not in [column.title for column in main_table(cells(records)).columns]


def test_methods_stand_in_the_papers_order_whatever_their_tasks() -> None:
    records = [sample("a", task="sst2", method="dpfp"), *comparison(seeds=1)]
    methods = [row.entries[1].text for row in main_table(cells(records)).rows]
    assert methods == ["Non-DP", "DP-SGD", "RGP", "DP-FP†"]


def test_the_best_private_method_is_bold_and_no_other() -> None:
    table = main_table(cells(comparison(budgets=(3.0,))))
    bold = [row.entries[1].text for row in table.rows if any(e.bold for e in row.entries)]
    assert bold == ["DP-FP†"]


def test_a_refuted_number_is_red_with_the_bound_in_the_notes() -> None:
    record = sample("a", accuracy=0.8)
    table = main_table(cells([record, audited(record, 3.09, "refuted")]))
    (row,) = table.rows
    assert row.tone == "refuted"
    assert row.entries[3].alarm
    assert row.entries[3].text == "80.00‡"
    assert any("ε ≥ 3.09" in note for note in table.notes)


def test_a_choice_among_settings_is_admitted() -> None:
    records = [sample("a", learning_rate=rate) for rate in (1e-5, 1e-4)]
    assert any("best of 2 settings" in note for note in main_table(cells(records)).notes)


def test_cost_is_measured_and_relative_to_training_without_privacy() -> None:
    table = cost_table(cells(comparison(budgets=(3.0,))))
    row = find(table, "minilm", "demo", "DP-SGD")
    assert float(row["Memory ÷ Non-DP"]) == pytest.approx(1900 / 900, abs=0.05)
    assert row["Memory, paper"] == "O(md)"
    assert find(table, "minilm", "demo", "Non-DP")["ε"] == MISSING


def test_without_a_run_to_compare_with_ratios_are_missing() -> None:
    table = cost_table(cells([sample("a")]))
    assert find(table, "minilm", "demo", "DP-FP†")["Memory ÷ Non-DP"] == MISSING


def test_noise_power_is_compared_at_the_same_batch_only() -> None:
    records = [sample("a", epsilon=3.0), sample("b", method="dpsgd", batch_size=32)]
    row = find(noise_table(cells(records)), "minilm", "demo", "DP-FP†")
    assert float(row["(σ/C)² ÷ DP-SGD’s"]) == pytest.approx((0.4 / 0.77) ** 2, abs=1e-3)
    assert row["Paper’s claim"] == "1/M = 0.0312"
    other = [records[0], sample("b", method="dpsgd", batch_size=64)]
    row = find(noise_table(cells(other)), "minilm", "demo", "DP-FP†")
    assert row["(σ/C)² ÷ DP-SGD’s"] == MISSING


def test_the_statements_numbers_reach_the_accounting_table() -> None:
    table = accounting_table(cells([with_statement(sample("a")), sample("b", method="dpsgd")]))
    row = find(table, "minilm", "demo", "DP-FP†")
    assert row["ε without amplification"] == "17.250†"
    assert row["Proved ε"] == MISSING
    assert row["ε with tuning"] == "5.360†"
    assert row["Guarantee"] == "nominal"
    assert row["ε by RDP"] == "3.840†"
    row = find(table, "minilm", "demo", "DP-SGD")
    assert row["ε without amplification"] == row["ε with tuning"] == MISSING


def test_audits_say_what_was_stated_and_what_was_shown() -> None:
    record = sample("a")
    table = audit_table(read_runs([record, audited(record, 3.09, "refuted")]))
    assert len(table.rows) == 1
    row = as_dict(table, table.rows[0])
    assert (row["Stated ε"], row["Audit: ε at least"], row["Outcome"]) == ("3†", "3.090", "refuted")
    assert table.rows[0].tone == "refuted"


def test_every_record_is_listed_also_failed_ones() -> None:
    table = runs_table(read_runs([sample("a"), failed("b", "s", "out of memory")]))
    found = [as_dict(table, row) for row in table.rows]
    assert {row["Status"] for row in found} == {"finished", "failed"}
    assert any(row["Error"] == "out of memory" and row["Accuracy (%)"] == MISSING for row in found)


def test_the_papers_table_is_whole() -> None:
    table = paper_table()
    assert len(table.rows) == 12
    row = find(table, "RoBERTa-large", "RGP")
    assert row["ε = 3 (RDP): SST-2"] == MISSING
    assert row["ε = 8 (RDP): SST-2"] == "93.00"
    assert find(table, "ε ≈", "Gaussian DP + CLT")["ε = 3 (RDP): QNLI"] == "2.00"


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (number(None), MISSING),
        (number(float("nan")), MISSING),
        (number(float("inf")), "∞"),
        (number(-1.5, "+.2f"), "−1.50"),
        (number(7.42e-6, ".3g"), "7.42e-6"),
        (percent(0.81234, 0.0031), "81.23 ± 0.31"),
        (percent(None), MISSING),
        (duration(3.2), "3.2 s"),
        (duration(75), "1 min 15 s"),
        (duration(7_260), "2 h 01 min"),
        (text(""), MISSING),
        (text("a\n\u202eb"), "a  b"),
    ],
)
def test_entries(entry: Any, shown: str) -> None:
    assert entry.text == shown


def of_opacus(trial: str, version: str, *changed: str) -> Any:
    made = sample(trial, method="opacus", epsilon=3.0, scope="head", seed=int(trial[-1]))
    made["privacy"]["guarantee"] = "claimed"
    made["privacy"]["claim"] = {
        "library": "opacus",
        "version": version,
        "changed_files": list(changed),
    }
    return made


@pytest.mark.parametrize(
    ("records", "note"),
    [
        (
            [of_opacus("a0", "1.6.0", "opacus/optimizers/optimizer.py")],
            "Opacus DP-SGD (head)§: opacus 1.6.0 was not as published: "
            "opacus/optimizers/optimizer.py.",
        ),
        (
            [of_opacus("a0", "1.5.4"), of_opacus("a1", "1.6.0")],
            "Opacus DP-SGD (head)§: runs by different versions: opacus 1.5.4, opacus 1.6.0.",
        ),
    ],
)
def test_a_library_that_was_changed_or_upgraded_is_noted(records: list[Any], note: str) -> None:
    assert note in overview(cells(records), []).notes


def test_a_library_as_published_needs_no_note() -> None:
    table = overview(cells([of_opacus("a0", "1.6.0"), of_opacus("a1", "1.6.0")]), [])
    assert not any("opacus" in note for note in table.notes)
    assert any(note.startswith("§ claimed") for note in table.notes)
