"""Records become flat rows of fixed shape, whatever they hold."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpfp_ray.plan.plan import FIELDS
from dpfp_ray.results import rows
from dpfp_ray.results.query import filter_rows
from dpfp_ray.results.rows import flatten
from tests.support.result_records import make_record


def test_parquet_types_do_not_depend_on_the_values() -> None:
    empty = dict.fromkeys(rows.COLUMNS)
    names = list(rows.COLUMNS)
    full = pq.read_schema(pa.BufferReader(rows.to_parquet([flatten(make_record("a"))], names)))
    assert pq.read_schema(pa.BufferReader(rows.to_parquet([empty], names))) == full


def test_a_flat_row_says_what_the_record_says() -> None:
    record = make_record("t1", accuracy=0.83, batch_size=64, micro_batches=8, learning_rate=1e-4)
    record["audit"] = {"epsilon": 3.09, "verdict": "refuted"}
    row = flatten(record)
    expected = {
        "id": "t1",
        "sweep": "s",
        "status": "finished",
        "method": "dpfp",
        "mode": "paper",
        "epsilon": 3.0,
        "epsilon_gdp": 1.0,
        "epsilon_pld": 3.0,
        "guarantee": "nominal",
        "accuracy": 0.83,
        "accuracy_dev": 0.83,
        "batch_size": 64,
        "micro_batches": 8,
        "clip": 1.0,
        "learning_rate": 1e-4,
        "delta": 5e-5,
        "sigma": 0.4,
        "noise_coordinates": 384,
        "steps": record["privacy"]["steps"],
        "records": 10_000,
        "peak_memory_bytes": 300 * 2**20,
        "plan_hash": record["plan_hash"],
        "node": "10.0.0.1",
        "seed_index": 0,
        "audit_epsilon": 3.09,
        "verdict": "refuted",
        "error": None,
    }
    assert {name: row[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("plan", "name", "value"),
    [
        ({"mode": "moments"}, "ridge", 2.5),
        ({"mode": "moments"}, "ridge", "auto"),
        ({"mode": "moments"}, "shrinkage", 0.25),
        ({"method": "rgp"}, "rank", 3),
        ({"method": "dpsgd", "scope": "lora"}, "lora_rank", 4),
        ({"method": "dpsgd", "scope": "lora"}, "lora_freeze_a", True),
        ({"method": "dpsgd"}, "weight_decay", 0.1),
        ({"method": "dpsgd"}, "max_length", 64),
        ({"method": "dpsgd"}, "schedule", "constant"),
        ({}, "labels", ("no", "yes")),
    ],
)
def test_every_plan_field_is_a_column(plan: dict[str, Any], name: str, value: Any) -> None:
    shown = {True: "yes", ("no", "yes"): "no,yes"}.get(value, value)
    assert flatten(make_record(**plan, **{name: value}))[name] == shown
    assert set(FIELDS) <= set(rows.COLUMNS)


def test_a_column_of_numbers_and_words_can_be_compared_with_numbers() -> None:
    ridges = [0.5, 2.5, "auto"]
    found = [flatten(make_record(f"t{r}", mode="moments", ridge=r)) for r in ridges]
    assert [row["ridge"] for row in filter_rows(found, "ridge > 1")] == [2.5]


def test_of_a_path_only_the_last_part_is_shown() -> None:
    row = flatten(make_record(train_file="/home/me/secret/mine.csv"))
    assert row["train_file"] == "mine.csv"


def test_columns_have_a_fixed_order_with_the_splits_after_accuracy() -> None:
    first, second = make_record("a"), make_record("b")
    second["history"][-1]["dev"]["mismatched"] = {"accuracy": 0.5}
    both = [flatten(first), flatten(second)]
    names = rows.columns(both)
    at = names.index("accuracy")
    assert names[at : at + 4] == [
        "accuracy",
        "accuracy_dev",
        "accuracy_last",
        "accuracy_mismatched",
    ]
    assert [name for name in names if name in rows.COLUMNS] == list(rows.COLUMNS)
    assert list(both[1]) == names


def test_fields_that_a_method_does_not_use_are_unknown() -> None:
    row = flatten(make_record(method="non_private"))
    assert (row["mode"], row["accountant"], row["epsilon"]) == (None, None, None)


def test_a_stopped_run_says_so() -> None:
    assert flatten({**make_record(), "finished": False})["status"] == "stopped"
