"""Packed rows are all there, once, and an encoder says of each what it says of it alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dpfp_ray.data.batches import (
    FIRST,
    PLACE,
    ROW,
    arrange,
    first_tokens,
    packed,
    spans,
    unpacked,
)
from dpfp_ray.data.tokens import tokenise_once
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from tests.support.tiny_models import ENCODERS
from tests.support.tiny_runs import tiny_split


@pytest.mark.parametrize("tokens", [1, 16, 1000])
def test_rows_do_not_overlap_and_sequences_are_nearly_full(tokens: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 20, 200)
    sequence, start, count, longest = arrange(lengths, tokens)
    taken = np.zeros((count, longest), int)
    for row, length in enumerate(lengths):
        taken[sequence[row], start[row] : start[row] + length] += 1
    assert taken.max() == 1
    assert taken.sum() == lengths.sum()
    if count < 20:
        assert taken.mean() > 0.97


def test_a_sequence_of_long_rows_is_no_longer_than_one_needs() -> None:
    *_, longest = arrange(np.full(40, 100))
    assert longest <= 200


def test_what_is_unpacked_is_what_was_packed(zoo: Path) -> None:
    table = tokenise_once(tiny_split(30), load_tokenizer(str(zoo / "bert")), 16)
    rows = np.array([3, 29, 3, 0, 11, 12])
    batch = packed(table, rows)
    assert set(batch) == {*table.columns, ROW, PLACE, FIRST}
    plain = table.collate(rows)
    assert batch.pop(FIRST).tolist() == first_tokens(batch).tolist()
    found = unpacked(batch)
    assert found.keys() == plain.keys()
    assert torch.equal(found["attention_mask"], plain["attention_mask"])
    real = plain["attention_mask"].bool()
    for name in table.columns:
        assert torch.equal(found[name][real], plain[name][real])


def test_a_rows_span_is_its_own_tokens_in_order(zoo: Path) -> None:
    table = tokenise_once(tiny_split(60), load_tokenizer(str(zoo / "bert")), 16)
    rows = np.array([3, 29, 3, 0, 11, 12, *range(30, 60)])
    batch = packed(table, rows)
    assert len(batch[ROW]) > 1  # of several sequences, with padding in some
    ids = batch["input_ids"].flatten()
    for own, row in zip(spans(batch[ROW]), rows, strict=True):
        alone = table.collate(np.array([row]))["input_ids"][0]
        assert torch.equal(ids[own], alone)


@pytest.mark.parametrize("representation", ["mean", "cls", "last"])
@pytest.mark.parametrize("architecture", ENCODERS)
def test_an_encoder_that_takes_packed_rows_gives_and_learns_the_same(
    zoo: Path, architecture: str, representation: str
) -> None:
    model = build_classifier(str(zoo / architecture), representation, classes=2)
    if not model.packs:
        assert architecture not in ("bert", "roberta")
        return
    tokenizer = load_tokenizer(str(zoo / architecture))
    table = tokenise_once(tiny_split(40), tokenizer, 12)
    rows = np.arange(40)
    found = {}
    for name, batch in {"alone": table.collate(rows), "packed": packed(table, rows)}.items():
        model.zero_grad()
        h = model.represent(batch)
        model.head(h).square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found[name] = [h.detach(), *grads]
    for one, other in zip(found["alone"], found["packed"], strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5 * float(one.abs().max()) + 1e-7)
