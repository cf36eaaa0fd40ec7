"""From the records of a comparison to its rows and its table."""

from typing import Any

import pytest

from dpfp_ray.sweeps.compare_table import (
    AUDIT_HEADING,
    HEADINGS,
    audit_mark,
    entries,
    markdown,
    summarise,
)
from tests.support.result_records import make_record
from tests.support.samples import sample


def record(method: str, accuracy: float, seed: int = 0, **fields: Any) -> dict[str, Any]:
    trial = f"{method}-{fields.get('epsilon')}-{fields.get('mode')}-{seed}"
    return make_record(trial, accuracy=accuracy, method=method, **fields)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    slow = record("dpsgd", 0.7, epsilon=3)
    slow["cost"] |= {"examples_per_second": 617.25, "peak_memory_bytes": 600 * 2**20}
    failed = record("dpsgd", 0.7, seed=1, epsilon=3)
    failed |= {"finished": False, "history": []}
    failed["trial"]["status"] = "failed"
    return summarise(
        [
            record("dpfp", 0.78, epsilon=8),
            record("dpfp", 0.74, epsilon=3),
            record("dpfp", 0.76, seed=1, epsilon=3),
            slow,
            failed,
            record("non_private", 0.9),
            record("non_private", 0.8, seed=1),
        ]
    )


def named(rows: list[dict[str, Any]], method: str, epsilon: float | None) -> dict[str, Any]:
    return next(r for r in rows if (r["method"], r["epsilon"]) == (method, epsilon))


def test_rows_are_ordered_by_budget(rows: list[dict[str, Any]]) -> None:
    assert [(row["method"], row["epsilon"]) for row in rows] == [
        ("non_private", None),
        ("dpfp", 3),
        ("dpsgd", 3),
        ("dpfp", 8),
    ]


def test_mean_spread_and_gap(rows: list[dict[str, Any]]) -> None:
    row = named(rows, "dpfp", 3)
    assert row["runs"] == 2
    assert row["accuracy"] == pytest.approx(0.75)
    assert row["accuracy_sd"] == pytest.approx(0.01414, abs=1e-4)
    assert row["gap"] == pytest.approx(-0.10)
    assert named(rows, "dpfp", 8)["accuracy_sd"] is None


def test_speed_and_memory_are_relative_to_non_private(rows: list[dict[str, Any]]) -> None:
    row = named(rows, "dpsgd", 3)
    assert row["relative_speed"] == pytest.approx(0.5)
    assert row["relative_memory"] == pytest.approx(2)


def test_failed_runs_are_counted_and_left_out(rows: list[dict[str, Any]]) -> None:
    row = named(rows, "dpsgd", 3)
    assert (row["runs"], row["failed"]) == (1, 1)
    assert row["accuracy"] == pytest.approx(0.7)
    failed = record("dpsgd", 0.7, epsilon=3)
    failed |= {"finished": False, "metrics": {}, "history": []}
    (only,) = summarise([failed])
    assert "failed" in entries(only)


def test_cells_show_spread_and_mark_what_is_nominal(rows: list[dict[str, Any]]) -> None:
    headings = [*HEADINGS, AUDIT_HEADING]
    shown = dict(zip(headings, entries(named(rows, "dpfp", 3)), strict=True))
    assert shown["accuracy"] == "0.7500 ± 0.0141"
    assert shown["ε"] == "3†"
    assert shown["ε pld"] == "3.00†"
    assert shown["gap"] == "-0.1000"
    shown = dict(zip(headings, entries(named(rows, "dpsgd", 3)), strict=True))
    assert shown["ε"] == "3"
    shown = dict(zip(headings, entries(named(rows, "non_private", None)), strict=True))
    assert shown["ε"] == shown["ε pld"] == "—"


def test_markdown_is_a_table_with_notes(rows: list[dict[str, Any]]) -> None:
    lines = markdown(rows).splitlines()
    assert {line.count("|") for line in lines[:6]} == {len(HEADINGS) + 1}
    assert any(line.startswith("† nominal") for line in lines)
    assert "†" not in markdown([named(rows, "dpsgd", 3)])


def test_variants_of_a_method_have_rows_of_their_own() -> None:
    found = summarise(
        [
            record("dpfp", 0.7, epsilon=3),
            record("dpfp", 0.8, epsilon=3, mode="moments"),
            record("dpsgd", 0.75, epsilon=3, scope="head"),
        ]
    )
    assert [row["method"] for row in found] == ["dpfp", "dpfp moments", "dpsgd head"]


def test_without_a_non_private_run_there_is_no_gap() -> None:
    (row,) = summarise([record("dpfp", 0.7, epsilon=3)])
    assert "gap" not in row
    assert entries(row)[HEADINGS.index("gap")] == "—"


@pytest.mark.parametrize(
    ("outcome", "ceiling", "mark"),
    [("refuted", 4.0, " ✗"), ("consistent", 4.0, ""), ("consistent", 2.0, " ○")],
)
def test_an_audits_outcome_and_its_power_are_marked(
    outcome: str, ceiling: float, mark: str
) -> None:
    row = {"epsilon": 3.0, "audit_epsilon": 1.0, "audit_ceiling": ceiling, "verdict": outcome}
    assert audit_mark(row) == mark


def seeded(method: str, accuracy: float, count: int = 5, **fields: Any) -> list[dict[str, Any]]:
    return [
        sample(method, seed=seed, accuracy=accuracy + 0.001 * seed, method=method, **fields)
        for seed in range(count)
    ]


def test_a_winner_a_tie_and_the_pairs_are_in_the_rows_and_in_the_table() -> None:
    found = summarise([*seeded("dpfp", 0.90), *seeded("dpsgd", 0.80), *seeded("rgp", 0.80)])
    standings = {row["method"]: row["standing"] for row in found}
    assert standings == {"dpfp": "best", "dpsgd": "behind", "rgp": "behind"}
    pair = next(p for p in named(found, "rgp", 3)["pairs"] if p["against"] == "dpsgd")
    assert pair["call"] == "tie"
    table = markdown(found)
    assert "ε = 3: dpfp is best" in table
    assert "dpsgd − rgp" in table
    assert "| majority class | — | 0.5500 |" in table
    low, high = named(found, "dpfp", 3)["accuracy_interval"]
    assert low < 0.902 < high
    found = summarise([*seeded("dpfp", 0.80), *seeded("dpsgd", 0.80)])
    assert {row["standing"] for row in found} == {"tie"}
    assert "ε = 3: dpfp and dpsgd tie" in markdown(found)


def test_a_comparison_of_one_seed_names_no_winner() -> None:
    found = summarise([*seeded("dpfp", 0.95, count=1), *seeded("dpsgd", 0.70, count=1)])
    assert {row["standing"] for row in found} == {"one seed"}
    assert {pair["call"] for row in found for pair in row["pairs"]} == {"these models only"}
    assert "ε = 3: no winner" in markdown(found)


def test_one_class_is_said_in_the_table() -> None:
    constant = [sample("dpfp", seed=s, method="dpfp", one_class=True) for s in range(3)]
    found = summarise([*constant, *seeded("dpsgd", 0.40)])
    assert named(found, "dpfp", 3)["standing"] == "one class"
    assert "answers one class" in markdown(found)


def test_the_best_epoch_is_taken_only_when_asked_for_and_said() -> None:
    records = seeded("dpfp", 0.80, epochs=3)
    for one in records:
        one["history"][0]["dev"]["dev"]["accuracy"] = 0.9
    assert named(summarise(records), "dpfp", 3)["accuracy"] == pytest.approx(0.802)
    best = summarise(records, "best")
    assert named(best, "dpfp", 3)["accuracy"] == pytest.approx(0.9)
    assert "best epoch on dev" in markdown(best)


def test_a_rate_from_less_than_a_second_is_not_compared() -> None:
    records = [*seeded("non_private", 0.9), *seeded("dpsgd", 0.8)]
    row = named(summarise(records), "dpsgd", 3)
    assert " ± " in entries(row)[HEADINGS.index("speed")]
    assert entries(row)[HEADINGS.index("before")] == "0:41"
    for one in records:
        one["cost"]["train_seconds"] = 0.4
    row = named(summarise(records), "dpsgd", 3)
    assert entries(row)[HEADINGS.index("speed")] == "—"
