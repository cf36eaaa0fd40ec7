"""What is compared with what: never different data, models, sizes, accountants or tuning."""

import copy
from typing import Any

import pytest

from dpfp_ray.reports.headline import idle
from dpfp_ray.results.cells import cells_of
from dpfp_ray.results.contests import Contest, contests_of, turned
from dpfp_ray.results.runs import read_runs
from tests.support.samples import sample


def contests(records: Any, **options: Any) -> list[Contest]:
    return contests_of(cells_of(read_runs(records, **options)))


def seeds(name: str, accuracy: float, count: int = 5, **fields: Any) -> list[dict[str, Any]]:
    return [
        sample(name, seed=seed, accuracy=accuracy + 0.001 * seed, **fields) for seed in range(count)
    ]


def test_methods_of_known_unequal_accuracy_have_a_winner_and_equal_ones_tie() -> None:
    (found,) = contests([*seeds("a", 0.86, method="dpsgd"), *seeds("b", 0.80, method="rgp")])
    assert (found.outcome, found.winner and found.winner.key.method) == ("won", "dpsgd")
    assert [found.standing(cell) for cell in found.ranked] == ["best", "behind"]
    (found,) = contests([*seeds("a", 0.86, method="dpsgd"), *seeds("b", 0.86, method="rgp")])
    assert found.outcome == "tie"
    assert {found.standing(cell) for cell in found.ranked} == {"tie"}
    assert found.as_json()["winner"] is None


@pytest.mark.parametrize(
    "fields",
    [{"accountant": "rdp"}, {"model": "roberta-base"}, {"max_train": 500}, {"task": "sst2"}],
    ids=str,
)
def test_different_accountants_models_sizes_and_tasks_are_not_one_comparison(
    fields: dict[str, Any],
) -> None:
    found = contests([*seeds("a", 0.8, method="dpsgd"), *seeds("b", 0.9, method="rgp", **fields)])
    assert len(found) == 2
    assert {contest.outcome for contest in found} == {"alone"}


def test_a_file_that_grew_is_another_task_by_its_number_of_records() -> None:
    old = seeds("a", 0.8, method="dpsgd", train_file="x.csv")
    new = copy.deepcopy(seeds("b", 0.9, method="rgp", train_file="x.csv"))
    for record in new:
        record["plan"]["records"] = 6_000
    assert {contest.task for contest in contests([*old, *new])} == {
        "custom: x.csv (D = 9,512)",
        "custom: x.csv (D = 6,000)",
    }


def test_answers_to_other_dev_rows_are_not_compared() -> None:
    other = copy.deepcopy(seeds("b", 0.9, method="rgp"))
    for record in other:
        record["predictions"][0]["dev"]["dev"]["fingerprint"] = "f" * 16
    (found,) = contests([*seeds("a", 0.8, method="dpsgd"), *other])
    assert (found.outcome, found.winner) == ("untested", None)
    assert "same dev rows" in found.why_not


def test_the_best_of_a_sweep_is_marked_and_compared_with_nothing() -> None:
    swept = [sample(f"s{rate}", accuracy=0.95, learning_rate=rate) for rate in (1e-4, 1e-5)]
    found = contests([*swept, *seeds("b", 0.8, method="rgp"), *seeds("c", 0.8, method="dpsgd")])
    tuned = next(contest for contest in found if contest.tuning)
    assert (tuned.tuning, tuned.winner) == ("picked", None)
    assert tuned.standing(tuned.ranked[0]) == "tuned"
    rest = next(contest for contest in found if not contest.tuning)
    assert {cell.key.method for cell in rest.ranked} == {"rgp", "dpsgd"}


def test_settings_tuned_alike_and_run_anew_are_compared() -> None:
    records = []
    for method, accuracy in (("dpsgd", 0.9), ("rgp", 0.8)):
        candidate = sample(f"t{method}", accuracy=0.99, method=method, learning_rate=1e-2)
        candidate["trial"]["group"] = "tune"
        records += [candidate, *seeds(method, accuracy, method=method)]
    (found,) = contests(records)
    assert (found.tuning, found.outcome) == ("retrained", "won")


def test_holm_counts_the_pairs_of_every_budget_of_a_table() -> None:
    def table(*budgets: float) -> list[dict[str, Any]]:
        return [
            record
            for budget in budgets
            for method, accuracy in (("dpsgd", 0.85), ("rgp", 0.84))
            for record in seeds(f"{method}{budget}", accuracy, method=method, epsilon=budget)
        ]

    (alone,) = contests(table(3.0))
    first = next(c for c in contests(table(3.0, 8.0)) if c.budget and c.budget.epsilon == 3.0)
    assert alone.statistics is not None
    assert first.statistics is not None
    one, two = alone.statistics.pairs[0], first.statistics.pairs[0]
    assert one.p == one.p_holm == two.p
    assert two.p_holm == pytest.approx(min(1.0, 2 * two.p))
    assert two.simultaneous[0] < one.simultaneous[0]


def test_a_pair_turned_twice_is_the_pair() -> None:
    (found,) = contests([*seeds("a", 0.9, method="dpsgd"), *seeds("b", 0.8, method="rgp")])
    pair = found.pair(found.ranked[1], found.ranked[0])
    assert pair is not None
    assert (pair.first, pair.call) == ("rgp", "worse")
    assert turned(turned(pair)) == pair


def test_a_copied_run_counts_once() -> None:
    (record,) = seeds("a", 0.8, count=1, method="dpsgd")
    again = copy.deepcopy(record)
    again["trial"]["id"] = "copy"
    (cell,) = cells_of(read_runs([record, again]))
    assert len(cell.runs) == 1


def test_old_non_private_records_are_read_by_the_rule_of_all_others() -> None:
    old = sample("a", method="non_private", accuracy=0.8, epochs=3)
    old["history"][0]["dev"]["dev"]["accuracy"] = 0.85
    old["metrics"] |= {"accuracy": 0.85, "epoch": 1, "rule": "best epoch on dev"}
    (cell,) = cells_of(read_runs([old]))
    assert cell.accuracy == 0.8
    (cell,) = cells_of(read_runs([old], select="best"))
    assert cell.accuracy == 0.85
    assert cell.interval is None, "the answers of that epoch were not kept"


@pytest.mark.parametrize(("accuracy", "said"), [(0.86, []), (0.80, ["DP-SGD"])])
def test_a_method_is_told_from_no_private_data_or_its_epsilon_bought_nothing(
    accuracy: float, said: list[str]
) -> None:
    floor = [sample(f"p{i}", method="public", seed=i, accuracy=0.80) for i in range(5)]
    (contest,) = contests([*seeds("a", accuracy, method="dpsgd"), *floor])
    assert contest.floor is not None
    assert contest.ranked[0].key.method == "dpsgd"
    assert contest.plain is None
    pair = contest.pair(contest.ranked[0], contest.floor)
    assert pair is not None
    assert (pair.call == "better") == (not said)
    assert [name for name in said if name not in " ".join(idle([contest]))] == []
    assert bool(idle([contest])) == bool(said)


def test_what_is_reached_without_private_data_is_no_training_without_privacy() -> None:
    floor = seeds("p", 0.8, method="public")
    plain = seeds("n", 0.9, method="non_private")
    (contest,) = contests([*seeds("a", 0.86, method="dpsgd"), *plain, *floor])
    assert contest.plain is not None
    assert contest.plain.key.method == "non_private"
    assert [cell.key.method for cell in contest.beside] == ["non_private", "public head"]
