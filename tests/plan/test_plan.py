"""A plan is valid, complete and hashable, or its author is told what to change."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.plan.method_spec import METHODS
from dpfp_ray.plan.plan import FIELDS, Plan
from dpfp_ray.plan.values import make_plan, read_plan_file
from dpfp_ray.system.errors import UserError

SST2 = 67_349


def refuse(values: dict[str, Any], words: str) -> None:
    """`values` make no plan, and the one-line reason contains `words`."""
    with pytest.raises(UserError) as caught:
        make_plan(values)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message


# Derived quantities


def test_the_papers_defaults_give_the_papers_numbers() -> None:
    plan = Plan(task="sst2").bind(records=SST2)
    assert (plan.B, plan.M, plan.C, plan.epochs) == (32, 32, 1.0, 3.0)
    assert plan.p == 1 / SST2
    assert (plan.steps, plan.draws) == (6313, 202_016)
    assert plan.delta == 1 / (2 * SST2)
    assert (plan.epsilon, plan.accountant, plan.adjacency) == (3.0, "pld", "zero_out")


@pytest.mark.parametrize(
    ("records", "batch", "epochs"), [(67_349, 32, 3), (104_374, 32, 3), (100, 7, 2.5), (10, 10, 1)]
)
def test_steps_are_whole_batches_within_the_epochs(records: int, batch: int, epochs: float) -> None:
    plan = Plan(batch_size=batch, micro_batches=1, epochs=epochs, records=records)
    assert plan.steps * batch <= epochs * records < (plan.steps + 1) * batch


@pytest.mark.parametrize("batch", [1, 5, 31, 32, 1024])
def test_micro_batches_default_to_32_or_to_a_smaller_batch(batch: int) -> None:
    assert min(32, batch) == Plan(batch_size=batch).M


@pytest.mark.parametrize("method", [method for method in METHODS if method != "dpfp"])
def test_only_dpfp_has_micro_batches(method: str) -> None:
    assert Plan(method=method).M == 1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_complete_default_plan(method: str) -> None:
    plan = Plan(method=method).bind(records=SST2)
    for name in ("batch_size", "micro_batches", "clip", "learning_rate", "schedule", "epochs"):
        assert getattr(plan, name) is not None
    assert plan.adjacency == plan.spec.adjacencies[0]
    assert plan.private == (plan.epsilon is not None) == (plan.delta is not None)


def test_epochs_end_where_their_records_have_been_drawn() -> None:
    plan = Plan(batch_size=30, micro_batches=1, epochs=3, records=100)
    assert plan.epoch_ends() == [3, 6, 10]


def test_a_part_of_an_epoch_ends_with_the_run() -> None:
    plan = Plan(batch_size=10, micro_batches=1, epochs=2.5, records=100)
    assert plan.epoch_ends() == [10, 20, 25]
    assert dataclasses.replace(plan, epochs=0.5).epoch_ends() == [5]


def test_epochs_shorter_than_a_step_end_once() -> None:
    plan = Plan(batch_size=100, micro_batches=2, epochs=5, records=50)
    assert plan.epoch_ends() == [1, 2]


# Binding to the data


def test_nothing_derived_is_known_before_binding() -> None:
    with pytest.raises(ValueError, match="records is not known"):
        _ = Plan().p


def test_binding_fills_what_depends_on_the_data() -> None:
    plan = Plan(method="dpsgd")
    assert plan.batch_size is None
    bound = plan.bind(records=SST2, representation="mean")
    assert (bound.B, bound.epochs, bound.representation) == (1000, 3.0, "mean")


def test_binding_keeps_what_was_given() -> None:
    bound = Plan(method="dpsgd", batch_size=64, epochs=1, delta=1e-5).bind(records=SST2)
    assert (bound.B, bound.epochs, bound.delta) == (64, 1.0, 1e-5)


def test_binding_twice_changes_nothing() -> None:
    bound = Plan().bind(records=SST2, representation="mean")
    assert bound.bind(records=SST2) == bound


def test_binding_to_other_data_is_refused() -> None:
    with pytest.raises(UserError, match="says D = 100 records, the data have 101"):
        Plan(records=100).bind(records=101)


def test_binding_to_too_few_records_is_refused() -> None:
    with pytest.raises(UserError, match="make no whole step of B = 32"):
        Plan(epochs=1).bind(records=10)


# Bad values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"M": 64, "B": 32}, "micro_batches M = 64 is more than batch_size B = 32"),
        ({"epsilon": 0}, "epsilon is 0.0; give a number above 0"),
        ({"epsilon": -1}, "epsilon is -1.0; give a number above 0"),
        ({"epsilon": "inf"}, "epsilon is inf; give a number above 0"),
        ({"epsilon": "nan"}, "epsilon is nan; give a number above 0"),
        ({"delta": 1}, "delta is 1.0; give a number between 0 and 1"),
        ({"delta": 0}, "delta is 0.0; give a number between 0 and 1"),
        ({"delta": 1.5}, "delta is 1.5; give a number between 0 and 1"),
        ({"clip": 0}, "clip is 0.0; give a number above 0"),
        ({"clip": -2}, "clip is -2.0; give a number above 0"),
        ({"lr": 0}, "learning_rate is 0.0; give a number above 0"),
        ({"epochs": 0}, "epochs is 0.0; give a number above 0"),
        ({"B": 0}, "batch_size is 0; give a whole number of 1 or more"),
        ({"B": -32}, "batch_size is -32; give a whole number of 1 or more"),
        ({"M": 0}, "micro_batches is 0; give a whole number of 1 or more"),
        ({"max_train": 0}, "max_train is 0; give a whole number of 1 or more"),
        ({"max_dev": -1}, "max_dev is -1; give a whole number of 1 or more"),
        ({"max_physical_batch": 0}, "max_physical_batch is 0; give a whole number of 1 or more"),
        ({"records": 0}, "records is 0; give a whole number from 1 to 10,000,000,000"),
        ({"records": 10**20}, f"records is {10**20}; give a whole number from 1 to 10,000,000,000"),
        ({"max_length": 2}, "max_length is 2; give 3 or more"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; give 0 or more"),
        ({"weight_decay": "inf"}, "weight_decay is inf; give 0 or more"),
        ({"dropout": 1}, "dropout is 1.0; give from 0 to below 1"),
        ({"method": "dpsdg"}, "unknown method 'dpsdg'; did you mean 'dpsgd'?"),
        ({"method": "zzz"}, "unknown method 'zzz'; use one of non_private, dpsgd, rgp, dpfp"),
        ({"accountant": "pdl"}, "unknown accountant 'pdl'; did you mean 'pld'?"),
        ({"representation": "pool"}, "unknown representation 'pool'; did you mean 'pooler'?"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"adjacency": "add_remove"}, "use zero_out or replace_one"),
        ({"method": "dpsgd", "adjacency": "zero_out"}, "use add_remove"),
        ({"method": "dpsgd", "M": 2}, "micro_batches is 2, but dpsgd does not use it"),
        ({"method": "non_private", "epsilon": 3}, "non_private spends no budget"),
        ({"method": "non_private", "delta": 1e-5}, "non_private spends no budget"),
        ({"task": "custom"}, "task custom needs train_file"),
    ],
)
def test_a_bad_value_gets_one_clear_line(values: dict[str, Any], words: str) -> None:
    refuse(values, words)


def test_a_sampling_probability_above_one_is_refused() -> None:
    refuse(
        {"B": 300, "M": 2, "records": 100},
        "p = B/(M D) = 1.5 is above 1 with B = 300, M = 2, D = 100; use a batch_size of 200",
    )


def test_a_sampling_probability_of_one_is_allowed() -> None:
    assert make_plan({"B": 200, "M": 2, "records": 100}).p == 1.0


def test_a_budget_of_one_hair_is_allowed() -> None:
    assert make_plan({"epsilon": "1e-9", "delta": "1e-300"}).epsilon == 1e-9


# Values as files and flags give them


@pytest.mark.parametrize("text", ["5e-6", "5E-6", "0.000005", " 5e-6 "])
def test_numbers_in_strings_are_numbers(text: str) -> None:
    assert make_plan({"lr": text}).learning_rate == 5e-6


@pytest.mark.parametrize("value", ["64", 64, 64.0, "64.0", "6.4e1"])
def test_whole_numbers_may_be_written_in_any_way(value: Any) -> None:
    batch = make_plan({"batch_size": value}).batch_size
    assert batch == 64
    assert isinstance(batch, int)


@pytest.mark.parametrize(
    "value", ["many", "", True, False, [32], {"a": 1}, 32.5, "32.5", "nan", "inf", 10**400, "1_0_x"]
)
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    refuse({"batch_size": value}, "; give a whole number")


@pytest.mark.parametrize("value", ["much", "", True, [3], {"a": 1}, 10**400])
def test_what_is_no_number_is_refused(value: Any) -> None:
    refuse({"epsilon": value}, "; give a number")


@pytest.mark.parametrize("value", [["a"], {"a": 1}])
def test_what_is_no_text_is_refused(value: Any) -> None:
    refuse({"model": value}, "model is")


def test_a_word_that_yaml_made_a_boolean_is_refused() -> None:
    refuse({"text_column": True}, "put the word in quotes")
    refuse({"labels": [False, True]}, "put the word in quotes")


def test_a_number_may_name_a_column() -> None:
    assert make_plan({"text_column": 0}).text_column == "0"


@pytest.mark.parametrize("name", FIELDS)
def test_a_key_without_a_value_means_the_default(name: str) -> None:
    assert make_plan({name: None}) == Plan()


@pytest.mark.parametrize("value", ["no,yes", " no , yes ", ["no", "yes"], ("no", "yes")])
def test_labels_are_a_list_or_words_between_commas(value: Any) -> None:
    assert make_plan({"labels": value}).labels == ("no", "yes")


@pytest.mark.parametrize("value", [[], 5, {"a": 1}])
def test_labels_must_be_a_list(value: Any) -> None:
    refuse({"labels": value}, "give a list such as negative,positive")


def test_a_number_of_a_million_digits_does_not_hang() -> None:
    refuse({"batch_size": "9" * 5000}, "give a whole number")


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("B", "batch_size"),
        ("M", "micro_batches"),
        ("C", "clip"),
        ("E", "epochs"),
        ("lr", "learning_rate"),
    ],
)
def test_the_papers_symbols_are_keys(short: str, long: str) -> None:
    assert make_plan({short: 4}) == make_plan({long: 4})


def test_dashes_are_underscores() -> None:
    assert make_plan({"batch-size": 8}).batch_size == 8


@pytest.mark.parametrize("twice", [("B", "batch_size"), ("batch-size", "batch_size")])
def test_a_field_given_twice_is_refused(twice: tuple[str, str]) -> None:
    refuse(dict.fromkeys(twice, 8), "batch_size is given twice")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("batchsize", "batch_size"),
        ("epsilom", "epsilon"),
        ("eps", "epsilon"),
        ("learning_rat", "learning_rate"),
        ("microbatches", "micro_batches"),
        ("acountant", "accountant"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one(key: str, nearest: str) -> None:
    refuse({key: 1}, f"unknown key '{key}'; did you mean '{nearest}'?")


@pytest.mark.parametrize("key", ["zzzzzzzz", "", 7, True, ("a", "b")])
def test_a_key_like_no_other_gets_the_list(key: Any) -> None:
    refuse({key: 1}, "use one of task, data_dir")


def test_own_files_make_a_custom_task() -> None:
    assert make_plan({"train_file": "x.csv"}).task == "custom"


# Plan files


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "plan.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_plan_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "task: sst2\nlr: 5e-6  # as YAML 1.1 has it, a string\nB: 64\nmodel:\n")
    plan = make_plan(read_plan_file(path))
    assert (plan.task, plan.learning_rate, plan.B, plan.model) == ("sst2", 5e-6, 64, "minilm")


def test_the_record_of_a_run_is_a_plan_file(tmp_path: Path) -> None:
    plan = Plan(task="sst2", method="rgp", epsilon=1).bind(records=67_349, classes=2)
    record = {"schema": 1, "plan": plan.to_dict(), "plan_hash": plan.hash, "finished": True}
    assert make_plan(read_plan_file(write(tmp_path, json.dumps(record)))) == plan


def test_an_empty_plan_file_is_the_default_plan(tmp_path: Path) -> None:
    assert make_plan(read_plan_file(write(tmp_path, "# nothing\n"))) == Plan()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", "must hold `key: value` lines, not a list"),
        ("just words", "must hold `key: value` lines, not a str"),
        ("a: [1, 2", "is not valid YAML"),
        ("? [a, b]\n: 1\n", "is not valid YAML"),
        ("a: !!python/object:os.system {}", "is not valid YAML"),
        (b"\xff\xfe\xfa", "is not valid YAML"),
    ],
)
def test_a_bad_plan_file_is_named(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_plan_file(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_plan_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        read_plan_file(tmp_path / "nowhere.yaml")


def test_a_folder_is_no_plan_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Is a directory"):
        read_plan_file(tmp_path)


# The hash


def test_the_hash_is_the_same_in_another_process() -> None:
    code = (
        "from dpfp_ray.plan import Plan;"
        "print(Plan(task='sst2', labels=('é', 'b'), learning_rate=5e-6, records=67_349).hash)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "77", "LC_ALL": "C", "PYTHONPATH": os.getcwd()}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    plan = Plan(task="sst2", labels=("é", "b"), learning_rate=5e-6, records=67_349)
    assert other.stdout.strip() == plan.hash
    assert len(plan.hash) == 16


def test_the_hash_survives_a_journey_through_json() -> None:
    plan = Plan(labels=("no", "yes"), epsilon=1 / 3, records=1000)
    assert make_plan(json.loads(json.dumps(plan.to_dict()))).hash == plan.hash


def test_a_given_default_has_the_hash_of_the_default() -> None:
    given = make_plan({"epochs": 3, "clip": 1, "epsilon": 3, "dropout": 0, "B": 32, "M": 32})
    assert given.hash == Plan().hash
    assert Plan(epochs=3, clip=1, epsilon=3).hash == Plan().hash


@pytest.mark.parametrize("change", [{"data_dir": "/elsewhere"}, {"max_physical_batch": 7}])
def test_the_hash_ignores_what_does_not_change_the_result(change: dict[str, Any]) -> None:
    assert dataclasses.replace(Plan(records=SST2), **change).hash == Plan(records=SST2).hash


@pytest.mark.parametrize("method", ["dpfp", "dpsgd", "rgp"])
def test_a_private_plan_with_dropout_is_not_run(method: str) -> None:
    with pytest.raises(UserError, match=rf"dropout is 0.1, .*; use dropout 0 with {method}"):
        Plan(method=method, dropout=0.1).bind(records=SST2)


def test_a_plan_without_privacy_may_have_dropout() -> None:
    assert Plan(method="non_private", dropout=0.1).bind(records=SST2).dropout == 0.1


CHANGES: dict[str, Any] = {
    "task": "sst2",
    "train_file": "a.csv",
    "dev_file": "b.csv",
    "text_column": "text",
    "pair_column": "pair",
    "label_column": "label",
    "labels": ("a", "b"),
    "max_train": 50_000,
    "max_dev": 10,
    "bad_rows": "skip",
    "model": "mpnet",
    "representation": "cls",
    "max_length": 64,
    "dropout": 0.1,
    "method": "non_private",
    "scope": "head",
    "batch_size": 64,
    "micro_batches": 16,
    "clip": 0.5,
    "learning_rate": 1e-5,
    "schedule": "constant",
    "weight_decay": 0.1,
    "epochs": 4,
    "epsilon": 8,
    "delta": 1e-6,
    "accountant": "gdp",
    "adjacency": "replace_one",
    "precision": "bf16",
    "records": 60_000,
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_hash_follows_everything_else(name: str) -> None:
    assert make_plan({"records": SST2, name: CHANGES[name]}).hash != Plan(records=SST2).hash


@pytest.mark.parametrize(
    ("values", "known"),
    [
        ({}, "d90227f526a3b3d4"),
        ({"method": "dpsgd"}, "0193e3bc02746fbb"),
        ({"method": "dpsgd", "scope": "head"}, "018844fa005346fb"),
        ({"mode": "moments"}, "a8af87d8c363e0b3"),
        ({"method": "rgp", "records": 5000}, "006bd3f79656d2e7"),
        ({"method": "non_private", "task": "sst2", "records": SST2}, "7b32be98c8d71542"),
    ],
)
def test_hashes_in_stores_are_still_found(values: dict[str, Any], known: str) -> None:
    assert Plan(**values).hash == known


def test_the_hash_follows_the_scope_and_what_belongs_to_it() -> None:
    dpsgd = {"method": "dpsgd", "records": SST2}
    changes: list[dict[str, Any]] = [
        *({"scope": scope} for scope in ("all", "head", "bias", "lora", "top:1", "top:2")),
        {"scope": "lora", "lora_rank": 4},
        {"scope": "lora", "lora_alpha": 8},
        {"scope": "lora", "lora_targets": "key"},
        {"scope": "lora", "lora_freeze_a": "yes"},
        {"clip_style": "automatic"},
    ]
    assert len({make_plan(dpsgd | change).hash for change in changes}) == len(changes)
    assert make_plan(dpsgd | {"scope": "lora", "lora_rank": 8, "lora_freeze_a": "no"}).hash == (
        make_plan(dpsgd | {"scope": "lora"}).hash
    )


# Scopes


@pytest.mark.parametrize("scope", ["top:K", "top:0", "top:", "top:-1", "top:02", "top", "biases"])
def test_a_scope_that_is_none_is_refused_with_those_there_are(scope: str) -> None:
    with pytest.raises(UserError, match="scope"):
        Plan(method="dpsgd", scope=scope)


@pytest.mark.parametrize("values", [{"method": "rgp"}, {"mode": "moments"}, {"method": "objpert"}])
def test_a_method_without_a_scope_says_which_it_has(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="use scope"):
        Plan(**values, scope="bias")


def test_loras_fields_belong_to_lora() -> None:
    with pytest.raises(UserError, match="lora_rank is 4, but scope is bias"):
        Plan(method="dpsgd", scope="bias", lora_rank=4)
    with pytest.raises(UserError, match="lora_freeze_a is 'perhaps'; give yes or no"):
        make_plan({"method": "dpsgd", "scope": "lora", "lora_freeze_a": "perhaps"})
    with pytest.raises(UserError, match="lora_rank is 0"):
        Plan(method="dpsgd", scope="lora", lora_rank=0)


def test_only_methods_that_clip_gradients_have_a_clip_style() -> None:
    assert Plan(method="rgp", clip_style="automatic").clip_style == "automatic"
    with pytest.raises(UserError, match="clip_style is automatic, but dpfp"):
        Plan(clip_style="automatic")


def test_a_plan_can_be_a_key_and_cannot_be_changed() -> None:
    assert len({Plan(), Plan()}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().clip = 2.0  # type: ignore[misc]
