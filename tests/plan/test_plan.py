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
NO_WHOLE_NUMBERS: tuple[Any, ...] = (
    *("many", "", True, False, [32], {"a": 1}, 32.5, "32.5", "nan", "inf", 10**400, "1_0_x"),
    "9" * 5000,
)
NO_SCOPES = ("top:K", "top:0", "top:", "top:-1", "top:02", "top", "biases")
BIAS, LORA = ({"method": "dpsgd", "scope": scope} for scope in ("bias", "lora"))


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


@pytest.mark.parametrize(
    ("batch", "micro", "epochs", "records", "ends"),
    [
        (30, 1, 3, 100, [3, 6, 10]),
        (10, 1, 2.5, 100, [10, 20, 25]),
        (10, 1, 0.5, 100, [5]),
        (100, 2, 5, 50, [1, 2]),  # epochs shorter than a step
    ],
)
def test_epochs_end_where_their_records_have_been_drawn(
    batch: int, micro: int, epochs: float, records: int, ends: list[int]
) -> None:
    plan = Plan(batch_size=batch, micro_batches=micro, epochs=epochs, records=records)
    assert plan.epoch_ends() == ends


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


@pytest.mark.parametrize(
    ("fields", "records", "says"),
    [
        ({"epochs": 1}, 10, "make no whole step of B = 32"),
        ({"records": 100}, 101, "says D = 100 records, the data have 101"),
        *(
            ({"method": method, "dropout": 0.1}, SST2, f"dropout is 0.1, .*; use .* with {method}")
            for method in ("dpfp", "dpsgd", "rgp")
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_data_is_refused(
    fields: dict[str, Any], records: int, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        Plan(**fields).bind(records=records)


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
        ({"method": "zzz"}, "unknown method 'zzz'; use one of non_private, dpsgd, opacus,"),
        ({"accountant": "pdl"}, "unknown accountant 'pdl'; did you mean 'pld'?"),
        ({"representation": "pool"}, "unknown representation 'pool'; did you mean 'pooler'?"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"adjacency": "add_remove"}, "use zero_out or replace_one"),
        ({"method": "dpsgd", "adjacency": "zero_out"}, "use add_remove"),
        ({"method": "dpsgd", "M": 2}, "micro_batches is 2, but dpsgd does not use it"),
        ({"method": "non_private", "epsilon": 3}, "non_private spends no budget"),
        ({"method": "non_private", "delta": 1e-5}, "non_private spends no budget"),
        ({"task": "custom"}, "task custom needs train_file"),
        ({"cache_gb": -1}, "cache_gb is -1.0; give a number of gigabytes"),
        ({"B": 300, "M": 2, "records": 100}, "p = B/(M D) = 1.5 is above 1 with B = 300, M = 2"),
        *(({"batch_size": value}, "; give a whole number") for value in NO_WHOLE_NUMBERS),
        *(({"epsilon": value}, "; give a number") for value in ("much", "", True, [3], 10**400)),
        *(({"model": value}, "model is") for value in (["a"], {"a": 1})),
        *(({"labels": value}, "give a list such as") for value in ([], 5, {"a": 1})),
        ({"text_column": True}, "put the word in quotes"),
        ({"labels": [False, True]}, "put the word in quotes"),
        ({"B": 8, "batch_size": 8}, "batch_size is given twice"),
        ({"batch-size": 8, "batch_size": 8}, "batch_size is given twice"),
        ({"batchsize": 1}, "unknown key 'batchsize'; did you mean 'batch_size'?"),
        ({"eps": 1}, "unknown key 'eps'; did you mean 'epsilon'?"),
        ({"acountant": 1}, "unknown key 'acountant'; did you mean 'accountant'?"),
        *(({key: 1}, "use one of task, data_dir") for key in ("zzzzzzzz", "", 7, True, ("a", "b"))),
        ({"clip_style": "automatic"}, "clip_style is automatic, but dpfp"),
        *(({"method": "dpsgd", "scope": scope}, "scope") for scope in NO_SCOPES),
        ({"method": "rgp", "scope": "bias"}, "use scope"),
        ({"mode": "moments", "scope": "bias"}, "use scope"),
        ({"method": "objpert", "scope": "bias"}, "use scope"),
        ({**BIAS, "lora_rank": 4}, "lora_rank is 4, but scope is bias"),
        ({**LORA, "lora_freeze_a": "perhaps"}, "lora_freeze_a is 'perhaps'; give yes or no"),
        ({**LORA, "lora_rank": 0}, "lora_rank is 0"),
    ],
)
def test_a_bad_value_gets_one_clear_line(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_plan(values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "name", "read"),
    [
        ({"B": 200, "M": 2, "records": 100}, "p", 1.0),
        ({"epsilon": "1e-9", "delta": "1e-300"}, "epsilon", 1e-9),
        *(({"lr": text}, "learning_rate", 5e-6) for text in ("5e-6", "5E-6", "0.000005", " 5e-6 ")),
        *(({"B": value}, "batch_size", 64) for value in ("64", 64, 64.0, "64.0", "6.4e1")),
        *(({key: 4}, "batch_size", 4) for key in ("B", "batch-size")),
        ({"M": 4}, "micro_batches", 4),
        ({"C": 4}, "clip", 4.0),
        ({"E": 4}, "epochs", 4.0),
        ({"text_column": 0}, "text_column", "0"),
        *(
            ({"labels": value}, "labels", ("no", "yes"))
            for value in ("no,yes", " no , yes ", ["no", "yes"], ("no", "yes"))
        ),
        ({"train_file": "x.csv"}, "task", "custom"),
        ({"method": "rgp", "clip_style": "automatic"}, "clip_style", "automatic"),
        ({"method": "non_private", "dropout": 0.1, "records": SST2}, "dropout", 0.1),
    ],
)
def test_values_are_read_as_people_write_them(values: Any, name: str, read: Any) -> None:
    value = getattr(make_plan(values), name)
    assert value == read
    assert type(value) is type(read)


# Values as files and flags give them


@pytest.mark.parametrize("name", FIELDS)
def test_a_key_without_a_value_means_the_default(name: str) -> None:
    assert make_plan({name: None}) == Plan()


# Plan files


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "plan.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_plan_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "task: sst2\nlr: 5e-6  # as YAML 1.1 has it, a string\nB: 64\nmodel:\n")
    plan = make_plan(read_plan_file(path))
    assert (plan.task, plan.learning_rate, plan.B, plan.model) == ("sst2", 5e-6, 64, "minilm")
    assert make_plan(read_plan_file(write(tmp_path, "# nothing\n"))) == Plan()


def test_the_record_of_a_run_is_a_plan_file(tmp_path: Path) -> None:
    plan = Plan(task="sst2", method="rgp", epsilon=1).bind(records=67_349, classes=2)
    record = {"schema": 1, "plan": plan.to_dict(), "plan_hash": plan.hash, "finished": True}
    assert make_plan(read_plan_file(write(tmp_path, json.dumps(record)))) == plan


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


@pytest.mark.parametrize(("name", "says"), [("nowhere.yaml", "No such file"), ("", "Is a direct")])
def test_a_plan_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=f"{name}: {says}"):
        read_plan_file(tmp_path / name)


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


def test_a_plan_can_be_a_key_and_cannot_be_changed() -> None:
    assert len({Plan(), Plan()}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().clip = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("method", ["dpfp", "dpsgd", "rgp"])
def test_a_private_plan_with_dropout_is_not_run(method: str) -> None:
    with pytest.raises(UserError, match=rf"dropout is 0.1, .*; use dropout 0 with {method}"):
        Plan(method=method, dropout=0.1).bind(records=SST2)


def test_a_plan_without_privacy_may_have_dropout() -> None:
    assert Plan(method="non_private", dropout=0.1).bind(records=SST2).dropout == 0.1
