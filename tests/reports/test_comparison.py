"""From the records of a comparison to its rows, its table and what is said of it."""

from typing import Any

import pytest

from dpfp_ray.reports.comparison import Compared, compared
from dpfp_ray.reports.tables import MISSING
from tests.support.result_records import make_record
from tests.support.samples import audited, sample


def record(method: str, accuracy: float, seed: int = 0, **fields: Any) -> dict[str, Any]:
    trial = f"{method}-{fields.get('epsilon')}-{fields.get('mode')}-{seed}"
    return make_record(trial, accuracy=accuracy, method=method, **fields)


@pytest.fixture
def few() -> Compared:
    slow = record("dpsgd", 0.7, epsilon=3)
    slow["cost"] |= {"examples_per_second": 617.25, "peak_memory_bytes": 600 * 2**20}
    failed = record("dpsgd", 0.7, seed=1, epsilon=3)
    failed |= {"finished": False, "history": []}
    failed["trial"]["status"] = "failed"
    records = [
        record("dpfp", 0.78, epsilon=8),
        record("dpfp", 0.74, epsilon=3),
        record("dpfp", 0.76, seed=1, epsilon=3),
        slow,
        failed,
        record("non_private", 0.9),
        record("non_private", 0.8, seed=1),
    ]
    return Compared(records)  # type: ignore[arg-type]


def named(made: Compared, method: str, epsilon: float | None = 3) -> dict[str, Any]:
    return next(r for r in made.rows if (r["method"], r["epsilon"]) == (method, epsilon))


def entries(made: Compared, method: str) -> dict[str, str]:
    table = made.overview
    at = [column.title for column in table.columns]
    rows = ([entry.text for entry in row.entries] for row in (*table.rows, *table.foot))
    return next(dict(zip(at, row, strict=True)) for row in rows if row[0] == method)


def seeded(method: str, accuracy: float, count: int = 5, **fields: Any) -> list[Any]:
    return [
        sample(method, seed=seed, accuracy=accuracy + 0.001 * seed, method=method, **fields)
        for seed in range(count)
    ]


def test_rows_are_ordered_by_budget(few: Compared) -> None:
    ordered = [("non_private", None), ("dpfp", 3), ("dpsgd", 3), ("dpfp", 8)]
    assert [(row["method"], row["epsilon"]) for row in few.rows] == ordered


def test_mean_spread_and_gap(few: Compared) -> None:
    row = named(few, "dpfp")
    assert row["runs"] == 2
    assert row["accuracy"] == pytest.approx(0.75)
    assert row["accuracy_sd"] == pytest.approx(0.01414, abs=1e-4)
    assert row["gap"] == pytest.approx(-0.10)
    assert named(few, "dpfp", 8)["accuracy_sd"] is None


def test_speed_and_memory_are_relative_to_non_private(few: Compared) -> None:
    row = named(few, "dpsgd")
    assert row["relative_speed"] == pytest.approx(0.5)
    assert row["relative_memory"] == pytest.approx(2)


def test_failed_runs_are_counted_left_out_and_said(few: Compared) -> None:
    row = named(few, "dpsgd")
    assert (row["runs"], row["failed"]) == (1, 1)
    assert row["accuracy"] == pytest.approx(0.7)
    assert "1 runs have no result" in few.to_markdown()


def test_the_overview_has_six_columns_and_marks_what_is_nominal(few: Compared) -> None:
    assert len(few.overview.columns) == 4, "no audit, no standing: no column of dashes"
    shown = entries(few, "DP-FP†")
    assert (shown["ε"], shown["Accuracy (%)"]) == ("3†", "75.00")
    assert entries(few, "DP-SGD")["ε"] == "3"
    assert entries(few, "Non-DP")["ε"] == MISSING


def test_a_few_cells_of_another_task_say_so_beside_the_method() -> None:
    records: Any = [
        *(record(method, 0.7, epsilon=3) for method in ("dpfp", "dpsgd", "rgp")),
        record("dpfp", 0.6, epsilon=3, task="sst2"),
    ]
    made = Compared(records)
    assert entries(made, "DP-FP† on SST-2")["Accuracy (%)"] == "60.00"
    assert len(made.overview.columns) <= 6


def test_without_a_non_private_run_there_is_no_gap() -> None:
    made = Compared([sample("a")])
    assert "gap" not in made.rows[0]
    assert "Against non-private" not in entries(made, "DP-FP†")


def test_an_audits_outcome_and_its_power_are_shown() -> None:
    weak = audited(sample("a"), 1.0, "consistent")
    weak["audit"]["ceiling"] = 2.0
    shown = entries(Compared([sample("a"), weak]), "DP-FP†")
    assert shown["Audit"] == "ε ≥ 1.00 ○"
    made = Compared([sample("a"), audited(sample("a"), 3.09, "refuted")])
    assert entries(made, "DP-FP†‡")["Audit"] == "ε ≥ 3.09 refuted"
    assert made.rows[0]["verdict"] == "refuted"


def test_a_winner_a_tie_and_the_pairs_are_in_the_rows_and_in_the_text() -> None:
    made = Compared([*seeded("dpfp", 0.90), *seeded("dpsgd", 0.80), *seeded("rgp", 0.80)])
    standings = {row["method"]: row["standing"] for row in made.rows}
    assert standings == {"dpfp": "best", "dpsgd": "behind", "rgp": "behind"}
    pair = next(p for p in named(made, "rgp")["pairs"] if p["against"] == "dpsgd")
    assert pair["call"] == "tie"
    text = made.to_markdown()
    assert text.startswith("DP-FP† is best on demo at ε = 3")
    assert "dpsgd − rgp" in text
    assert entries(made, "majority class")["Accuracy (%)"] == "55.00"
    low, high = named(made, "dpfp")["accuracy_interval"]
    assert low < 0.902 < high


def test_with_few_seeds_the_difference_has_no_interval() -> None:
    plain = seeded("non_private", 0.9, count=2)
    made = Compared([*plain, *seeded("dpfp", 0.8, count=2), *seeded("dpsgd", 0.79, count=2)])
    assert {row["standing"] for row in made.rows} == {None, "few seeds"}
    assert entries(made, "DP-FP†")["Against non-private"] == "−10.00"


def test_what_the_private_records_added_has_a_column_and_the_idle_have_a_line() -> None:
    cells = [*seeded("dpfp", 0.90), *seeded("dpsgd", 0.80), *seeded("public", 0.80)]
    made = Compared([*cells, *seeded("non_private", 0.95)])
    assert entries(made, "DP-FP†")["Private records added"].startswith("+10.00 [")
    assert entries(made, "Without private data (head)")["Private records added"] == "—"
    assert len(made.overview.columns) <= 6
    (line,) = [text for text in made.remarks if "spent for nothing" in text]
    assert line.startswith("DP-SGD on demo at ε = 3")


def test_one_class_is_said() -> None:
    constant = [sample("dpfp", seed=s, method="dpfp", one_class=True) for s in range(3)]
    made = Compared([*constant, *seeded("dpsgd", 0.40)])
    assert named(made, "dpfp")["standing"] == "one class"
    assert "answers one class" in made.to_markdown()


def test_the_best_epoch_is_taken_only_when_asked_for_and_said() -> None:
    records = seeded("dpfp", 0.80, epochs=3)
    for one in records:
        one["history"][0]["dev"]["dev"]["accuracy"] = 0.9
    assert named(Compared(records), "dpfp")["accuracy"] == pytest.approx(0.802)
    best = Compared(records, "best")
    assert named(best, "dpfp")["accuracy"] == pytest.approx(0.9)
    assert "best epoch on dev" in best.to_markdown()


def test_a_rate_from_less_than_a_second_is_not_compared() -> None:
    records = [*seeded("non_private", 0.9), *seeded("dpsgd", 0.8)]
    assert named(Compared(records), "dpsgd")["relative_speed"] is not None
    for one in records:
        one["cost"]["train_seconds"] = 0.4
    assert named(Compared(records), "dpsgd")["relative_speed"] is None


def test_a_comparison_is_of_the_trials_asked_for_and_of_tuning() -> None:
    first, second = seeded("dpfp", 0.8, count=2)
    tried = sample("t", method="dpfp", learning_rate=1.0)
    tried["trial"]["group"] = "tune"
    made = compared([first, second, tried], [first["trial"]["id"]], "last")
    assert len(made.records) == 2
    assert made.cells[0].tuning == "retrained"


def test_the_terminal_shows_headline_table_and_privacy(
    few: Compared, capsys: pytest.CaptureFixture[str]
) -> None:
    few.show()
    brief = capsys.readouterr().out
    assert brief.index("majority" if "majority" in brief else "DP-SGD") < brief.index("privacy")
    few.show(wide=True)
    assert "What each accountant says was spent" in capsys.readouterr().out
