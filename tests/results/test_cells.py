"""Which runs are averaged, and which one stands for a cell."""

import copy

import pytest

from dpfp_ray.results.cells import budgets_of, cells_of
from dpfp_ray.results.runs import Budget, Run, label, read_runs
from tests.support.samples import audited, comparison, failed, sample


def test_seeds_of_one_setting_are_averaged_with_their_spread() -> None:
    records = [sample("a", seed=seed, accuracy=0.8 + 0.01 * seed) for seed in range(3)]
    (cell,) = cells_of(read_runs(records))
    assert cell.accuracy == pytest.approx(0.81)
    assert cell.spread == pytest.approx(0.01)
    assert cell.settings == 1


def test_of_several_settings_the_best_stands_and_their_number_is_kept() -> None:
    records = [
        sample("a", seed=0, accuracy=0.9, learning_rate=1e-5),
        sample("a", seed=1, accuracy=0.7, learning_rate=1e-5),
        sample("b", accuracy=0.85, learning_rate=1e-4),
    ]
    (cell,) = cells_of(read_runs(records))
    assert cell.accuracy == pytest.approx(0.85)
    assert cell.settings == 2


def test_no_run_is_compared_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service makes cells of 50,000 runs."""
    runs = read_runs([sample("a", seed=seed) for seed in range(40)])
    compared: list[object] = []
    monkeypatch.setattr(Run, "__eq__", lambda one, other: compared.append(one) or one is other)
    assert len(cells_of(runs)) == 1
    assert len(compared) <= len(runs)


def test_candidates_of_a_tuning_do_not_stand_for_the_comparison() -> None:
    tuned, final = sample("t", accuracy=0.95, learning_rate=1e-4), sample("f", accuracy=0.8)
    tuned["trial"]["group"] = "tune"
    (cell,) = cells_of(read_runs([tuned, final]))
    assert cell.accuracy == 0.8
    assert cell.settings == 2


def test_an_audited_run_marks_the_cell_but_does_not_score_for_it() -> None:
    plain = sample("a", accuracy=0.8)
    (cell,) = cells_of(read_runs([plain, audited(plain | {"plan_hash": "x"}, 4.0, "refuted")]))
    assert len(cell.runs) == 1
    assert cell.settings == 1
    assert cell.guarantee == "refuted"
    assert (cell.key.method, cell.mark) == ("dpfp", "†‡")


def test_failed_and_stopped_runs_make_no_cell() -> None:
    assert cells_of(read_runs([failed("x", "s", "e"), sample("y", status="stopped")])) == []


def test_a_subset_of_a_task_is_another_task() -> None:
    records = [sample("a"), sample("b", max_train=1_000), sample("c", train_file="/home/x/my.csv")]
    records.append(sample("d", method="dpsgd", user_column="author"))
    tasks = {cell.key.task for cell in cells_of(read_runs(records))}
    assert tasks == {"custom: my.csv", "demo", "demo (1,000 records)", "demo (per person)"}


def test_an_audits_canaries_make_no_other_task() -> None:
    run = audited(sample("a", max_train=400), 1.0, "consistent")
    run["audit"]["real_records"] = 300
    assert read_runs([run])[0].task == "demo (400 records)"


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ({"method": "dpsgd", "mode": "paper", "scope": "all"}, "dpsgd"),
        ({"method": "dpsgd", "scope": "head"}, "dpsgd head"),
        ({"method": "dpsgd", "scope": "top:2"}, "dpsgd top:2"),
        ({"method": "dpsgd", "scope": "lora", "lora_freeze_a": True}, "dpsgd lora frozen-A"),
        ({"method": "rgp", "scope": "all", "clip_style": "automatic"}, "rgp automatic"),
        ({"method": "dpfp", "mode": "moments", "scope": "head"}, "dpfp moments"),
        ({"method": "dpfp", "adjacency": "replace_one"}, "dpfp replace-one"),
        ({}, "unknown"),
    ],
)
def test_a_name_says_what_makes_a_variant(plan: dict[str, str], name: str) -> None:
    assert label(plan) == name


def test_a_folder_is_shown_by_its_own_name_only() -> None:
    record = sample("a")
    record["plan"]["model"] = "/home/someone/secret/roberta-base"
    assert read_runs([record])[0].model == "roberta-base"


def test_the_accountant_of_most_runs_comes_first() -> None:
    records = [*comparison(seeds=1), sample("g", epsilon=0.02, accountant="gdp")]
    budgets = budgets_of(cells_of(read_runs(records)))
    assert budgets == [Budget("pld", 3.0), Budget("pld", 8.0), Budget("gdp", 0.02)]


def test_order_does_not_depend_on_the_order_of_the_records() -> None:
    records = list(comparison(seeds=2))
    keys = [run.row["id"] for run in read_runs(records)]
    assert [run.row["id"] for run in read_runs(copy.deepcopy(records[::-1]))] == keys
