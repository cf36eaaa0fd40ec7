"""Canaries: what they are made of, how they get in, and that "out" is what the adjacency says."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfp_ray.auditing.canaries import (
    FAMILIES,
    IGNORED,
    Canaries,
    flip_coins,
    hide_empty,
    insert,
    make_canaries,
)
from dpfp_ray.data import Split, Task
from dpfp_ray.data.tokens import TokenTable, tokenise
from dpfp_ray.methods.parts.base import Rows, make_method
from dpfp_ray.models.classifier import trainable_parameters
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.system.errors import UserError
from tests.support.tiny_runs import tiny_classifier, tiny_plan, tiny_split

RECORDS, COUNT = 60, 20


@pytest.fixture(scope="module")
def tokenizer(model_folder: str) -> Any:
    return load_tokenizer(model_folder)


@pytest.fixture(scope="module")
def train(tokenizer: Any) -> TokenTable:
    return tokenise(tiny_split(RECORDS), tokenizer, 32)


@pytest.fixture(scope="module", params=FAMILIES)
def canaries(request: pytest.FixtureRequest, train: TokenTable, tokenizer: Any) -> Canaries:
    return make(request.param, train, tokenizer)


def task_of(split: Split, classes: int = 2) -> Task:
    dev = {"dev": tiny_split(10, seed=2)}
    return Task("tiny", tuple(f"class {number}" for number in range(classes)), split, dev)


def make(family: str, train: TokenTable, tokenizer: Any, count: int = COUNT) -> Canaries:
    return make_canaries(family, count, task_of(tiny_split(len(train))), tokenizer, 32)


def row(table: TokenTable, number: int) -> list[int]:
    ids = table.columns["input_ids"]
    return [int(i) for i in ids[table.offsets[number] : table.offsets[number + 1]]]


# --- coins --------------------------------------------------------------------------------------


def test_coins_are_fair_and_follow_from_their_seed_alone() -> None:
    coins = flip_coins(10_000, 5)
    assert np.array_equal(coins, flip_coins(10_000, 5))
    assert abs(coins.mean() - 0.5) < 0.02
    assert 0.45 < np.mean(coins == flip_coins(10_000, 6)) < 0.55
    assert 0.45 < np.mean(coins[1:] == coins[:-1]) < 0.55


# --- what they are made of ----------------------------------------------------------------------


def test_mislabelled_canaries_are_displaced_records_of_another_class(
    train: TokenTable, tokenizer: Any
) -> None:
    canaries = make("mislabelled", train, tokenizer)
    for number, place in enumerate(canaries.places):
        assert row(canaries.table, number) == row(train, place)
        assert canaries.table.labels[number] != train.labels[place]
        assert 0 <= canaries.table.labels[number] < 2


def test_a_mislabelled_canary_may_be_of_every_wrong_class(
    train: TokenTable, tokenizer: Any
) -> None:
    canaries = make_canaries("mislabelled", 30, task_of(tiny_split(RECORDS), 5), tokenizer, 32)
    assert set(canaries.table.labels.tolist()) == {0, 1, 2, 3, 4}
    assert not np.any(canaries.table.labels == train.labels[canaries.places])


def test_an_unused_token_is_in_one_canary_and_in_no_record(
    train: TokenTable, tokenizer: Any
) -> None:
    canaries = make("unused_token", train, tokenizer)
    assert canaries.tokens is not None
    names = tokenizer.convert_ids_to_tokens(canaries.tokens.tolist())
    assert names == [f"[unused{number}]" for number in range(COUNT)]
    assert not set(canaries.tokens.tolist()) & set(train.columns["input_ids"].tolist())
    for number, token in enumerate(canaries.tokens.tolist()):
        assert row(canaries.table, number).count(token) == 1
        others = {*canaries.tokens.tolist()} - {token}
        assert not others & set(row(canaries.table, number))
    assert canaries.table.columns["input_ids"].dtype == train.columns["input_ids"].dtype
    rows, own = [row(canaries.table, number) for number in range(COUNT)], canaries.tokens.tolist()
    assert len({tuple(i for i in ids if i not in own) for ids in rows}) == 1  # else the same


def test_after_unused_entries_come_words_that_no_record_has(
    train: TokenTable, tokenizer: Any
) -> None:
    split = tiny_split(300)
    table = tokenise(split, tokenizer, 32)
    canaries = make_canaries("unused_token", 110, task_of(split), tokenizer, 32)
    assert canaries.tokens is not None
    assert len(set(canaries.tokens.tolist())) == 110
    assert not set(canaries.tokens.tolist()) & set(table.columns["input_ids"].tolist())
    assert not set(canaries.tokens.tolist()) & set(tokenizer.all_special_ids)


def test_of_a_pair_the_first_text_is_marked(tokenizer: Any) -> None:
    single = tiny_split(40)
    split = Split(single.texts, single.texts[::-1], single.labels)
    canaries = make_canaries("unused_token", 10, task_of(split), tokenizer, 32)
    assert canaries.tokens is not None
    for number, token in enumerate(canaries.tokens.tolist()):
        ids = row(canaries.table, number)
        assert ids.index(token) < ids.index(tokenizer.sep_token_id)
        assert ids.count(token) == 1


def test_a_vocabulary_can_be_too_small(tokenizer: Any) -> None:
    split = tiny_split(2000)
    with pytest.raises(UserError, match="tokens of the vocabulary"):
        make_canaries("unused_token", 900, task_of(split), tokenizer, 32)


# --- how they get in ----------------------------------------------------------------------------


@pytest.mark.parametrize("absence", ["add_remove", "zero_out", "replace_one", "none"])
def test_everyone_stands_where_they_should(
    train: TokenTable, canaries: Canaries, absence: str
) -> None:
    members = flip_coins(COUNT, 3)
    table = insert(train, canaries, members, absence)
    assert len(table) == RECORDS
    for place in np.setdiff1d(np.arange(RECORDS), canaries.places):
        assert row(table, place) == row(train, place)
        assert table.labels[place] == train.labels[place]
    for number, place in enumerate(canaries.places):
        label = canaries.table.labels[number]
        if members[number]:
            assert row(table, place) == row(canaries.table, number)
            assert table.labels[place] == label
        elif absence == "zero_out":
            assert row(table, place) == []
            assert table.labels[place] == label
        elif absence == "replace_one":
            assert row(table, place) == row(train, canaries.places[number - 1])
            assert table.labels[place] == label
        else:
            assert table.labels[place] == IGNORED
            assert set(row(table, place)) == {table.pad_token_id}


def test_left_out_rows_are_gone(train: TokenTable, canaries: Canaries) -> None:
    members = flip_coins(COUNT, 3)
    table = insert(train, canaries, members, "left_out")
    assert len(table) == RECORDS - int(np.sum(~members))
    assert IGNORED not in table.labels


def test_representations_are_inserted_as_tokens_are() -> None:
    rng = np.random.default_rng(1)
    h, labels = rng.random((30, 4), dtype=np.float32), np.arange(30) % 2
    train = RepresentationTable(h, labels, "train")
    table = RepresentationTable(h[:6] + 1, 1 - labels[:6], "canaries")
    canaries = Canaries("mislabelled", table, np.arange(0, 18, 3), None)
    members = np.array([True, False, True, False, False, True])
    for absence in ("add_remove", "zero_out", "replace_one", "left_out"):
        found = insert(train, canaries, members, absence)
        assert isinstance(found, RepresentationTable)
        if absence == "left_out":
            assert np.array_equal(found.h[0], h[0] + 1)
            assert np.array_equal(found.h[1:3], h[1:3])
            assert np.array_equal(found.h[3:5], h[4:6])
            assert len(found) == 27
            continue
        assert np.array_equal(found.h[canaries.places[members]], table.h[members])
        out = found.h[canaries.places[~members]]
        stand_in = h[np.roll(canaries.places, 1)[~members]]
        assert np.array_equal(out, stand_in if absence == "replace_one" else np.zeros((3, 4)))
        kept = np.full(3, IGNORED) if absence == "add_remove" else table.labels[~members]
        assert np.array_equal(found.labels[canaries.places[~members]], kept)


def test_other_coins_are_another_table_to_the_noise() -> None:
    """Two releases that differ in a record must not share their noise."""
    h, labels = np.ones((10, 2), np.float32), np.zeros(10, np.int64)
    train = RepresentationTable(h, labels, "train")
    table = RepresentationTable(h[:3], labels[:3], "canaries")
    canaries = Canaries("mislabelled", table, np.array([1, 4, 7]), None)
    coins = [np.array([(number >> bit) & 1 for bit in range(3)], bool) for number in range(8)]
    keys = {insert(train, canaries, one, "zero_out").key for one in coins}  # type: ignore[attr-defined]
    assert len(keys) == 8


# --- "out" is what the adjacency says -----------------------------------------------------------


def gradients(method_name: str, model_folder: str, rows: Rows, **settings: Any) -> list[Tensor]:
    """What a method hands to the optimizer for these rows, without noise."""
    plan = tiny_plan(method_name, batch_size=8, **settings)
    model = tiny_classifier(model_folder, plan)
    method = make_method(plan, model, 0.0, seed=4)
    method.begin(0, 200)
    method.backward(rows)
    method.gradients()
    method.finish(0)
    return [p.grad.clone() for _, p in trainable_parameters(model) if p.grad is not None]


@pytest.mark.parametrize(
    ("method", "settings"),
    [("dpsgd", {}), ("dpsgd", {"clipping": "hooks"}), ("rgp", {}), ("non_private", {})],
)
def test_a_removed_canary_adds_nothing_at_all(
    model_folder: str, train: TokenTable, canaries: Canaries, method: str, settings: Any
) -> None:
    """The same as if the row had not been drawn."""
    members = flip_coins(COUNT, 3)
    table = insert(train, canaries, members, "add_remove")
    out, drawn = canaries.places[~members][:3], np.arange(12)
    there = drawn[table.labels[drawn] != IGNORED]
    with_out = np.concatenate([there, out])

    def rows(chosen: np.ndarray) -> Rows:
        labels = torch.from_numpy(table.labels[chosen])
        return Rows(np.arange(len(chosen)), table.collate(chosen), labels)

    ours = gradients(method, model_folder, rows(with_out), **settings)
    expected = gradients(method, model_folder, rows(there), **settings)
    assert any(tensor.any() for tensor in expected)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("representation", ["mean", "cls", "pooler"])
def test_a_zeroed_canary_has_the_representation_zero(
    model_folder: str, train: TokenTable, canaries: Canaries, representation: str
) -> None:
    table = insert(train, canaries, np.zeros(COUNT, bool), "zero_out")
    alone = hide_empty(build_classifier(model_folder, representation, 2))
    nothing = alone.represent(table.collate(canaries.places))  # a batch of nobody else
    assert nothing.shape == (COUNT, 32)
    assert not nothing.any()
    rows = np.concatenate([canaries.places[:2], np.arange(6)])
    out = np.isin(rows, canaries.places)
    plain = build_classifier(model_folder, representation, 2)
    with torch.no_grad():
        expected = plain.represent(train.collate(rows))
    model = hide_empty(build_classifier(model_folder, representation, 2))
    h = model.represent(table.collate(rows))
    assert not h[out].any()
    torch.testing.assert_close(h[~out], expected[~out], rtol=1e-4, atol=1e-5)
    h.square().sum().backward()
    weights = [p.grad for _, p in trainable_parameters(model)]
    assert all(w is None or bool(torch.isfinite(w).all()) for w in weights)
