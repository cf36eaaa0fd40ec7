import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dpfp_ray.data import Split
from dpfp_ray.data import tokens as tokens_module
from dpfp_ray.data.tokens import TokenTable, tokenise
from dpfp_ray.system import terminal
from dpfp_ray.system.errors import UserError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(50))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path))
    return tmp_path


def bert_like(words: list[str] = WORDS, **options: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        }
        | options,
    )


def gpt_like(**options: Any) -> PreTrainedTokenizerFast:
    """No special tokens around a text, no pad token, no token types."""
    backend = Tokenizer(models.WordLevel({"w0": 0, "w1": 1, "<end>": 2}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **options)


def some_split(rows: int = 40, pairs: bool = False) -> Split:
    random = np.random.default_rng(7)

    def texts() -> list[str]:
        sizes = random.integers(1, 12, rows)
        return [" ".join(f"w{w}" for w in random.integers(0, 50, size)) for size in sizes]

    return Split(texts(), texts() if pairs else None, random.integers(0, 3, rows))


def naive_batch(table: TokenTable, rows: list[int]) -> dict[str, list[list[int]]]:
    """One list per row, padded by hand."""
    width = max([1, *(int(table.lengths[i]) for i in rows)])
    batch: dict[str, list[list[int]]] = {name: [] for name in [*table.columns, "attention_mask"]}
    for i in rows:
        start, stop = int(table.offsets[i]), int(table.offsets[i + 1])
        gap = width - (stop - start)
        for name, column in table.columns.items():
            pad = table.pad_token_id if name == "input_ids" else 0
            batch[name].append(column[start:stop].tolist() + [pad] * gap)
        batch["attention_mask"].append([1] * (stop - start) + [0] * gap)
    return batch


@pytest.mark.parametrize("pairs", [False, True])
def test_tokens_are_those_of_the_tokenizer(pairs: bool) -> None:
    split = some_split(pairs=pairs)
    table = tokenise(split, bert_like(), 9)
    assert len(table) == 40
    for i, text in enumerate(split.texts):
        pair = split.pairs[i] if split.pairs is not None else None
        alone = bert_like()(text, pair, truncation="longest_first", max_length=9)
        part = slice(table.offsets[i], table.offsets[i + 1])
        assert table.columns["input_ids"][part].tolist() == alone["input_ids"]
        assert table.columns["token_type_ids"][part].tolist() == alone["token_type_ids"]
    assert table.labels.tolist() == split.labels.tolist()


def test_rows_over_several_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = tokenise(some_split(), bert_like(), 9)
    monkeypatch.setattr(tokens_module, "CHUNK", 7)
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "other"))
    chunked = tokenise(some_split(), bert_like(), 9)
    assert np.array_equal(whole.columns["input_ids"], chunked.columns["input_ids"])
    assert np.array_equal(whole.offsets, chunked.offsets)


@pytest.mark.parametrize("rows", [[3], [5, 5, 0], list(range(40)), [39, 1, 7, 7]])
def test_collate_is_the_naive_padded_batch(rows: list[int]) -> None:
    table = tokenise(some_split(pairs=True), bert_like(), 20)
    batch = table.collate(np.array(rows))
    assert {name: tensor.tolist() for name, tensor in batch.items()} == naive_batch(table, rows)
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_collate_of_no_rows() -> None:
    table = tokenise(some_split(), bert_like(), 9)
    batch = table.collate(np.array([], dtype=np.int64))
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(0, 1)}


def test_second_call_reads_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenise(some_split(), bert_like(), 9)
    monkeypatch.setattr(tokens_module, "_encode", None)
    second = tokenise(some_split(), bert_like(), 9)
    assert np.array_equal(first.columns["input_ids"], second.columns["input_ids"])
    assert isinstance(second.columns["input_ids"].base, np.memmap)


def test_key_does_not_depend_on_earlier_calls(cache: Path) -> None:
    tokenizer = bert_like()
    tokenise(some_split(), tokenizer, 9)
    tokenizer("w1 w2", truncation=True, max_length=4, padding="max_length")
    tokenise(some_split(), tokenizer, 9)
    assert len(list((cache / "tokens").iterdir())) == 1


def test_key_depends_on_everything_that_matters(cache: Path) -> None:
    split = some_split()
    labels, swapped = split.labels, [*WORDS[:-2], WORDS[-1], WORDS[-2]]
    calls: list[tuple[Split, Any, int]] = [
        (split, bert_like(), 9),
        (split, bert_like(), 8),
        (split, bert_like(swapped), 9),
        (split, bert_like(model_input_names=["input_ids", "attention_mask"]), 9),
        (split, bert_like(truncation_side="left"), 9),
        (Split([*split.texts[:-1], "w1"], None, labels), bert_like(), 9),
        (Split(split.texts, None, 2 - labels), bert_like(), 9),
        (Split(split.texts, split.texts, labels), bert_like(), 9),
        (Split(["w1 w2", "w3"], None, labels[:2]), bert_like(), 9),  # where a text ends
        (Split(["w1", " w2w3"], None, labels[:2]), bert_like(), 9),
    ]
    for call in calls:
        tokenise(*call)
    assert len(list((cache / "tokens").iterdir())) == len(calls)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing array": lambda entry: (entry / "input_ids").unlink(),
    "cut short": lambda entry: os.truncate(entry / "input_ids", 8),
    "flipped bytes": lambda entry: (entry / "input_ids").write_bytes(
        bytes((entry / "input_ids").stat().st_size)
    ),
    "empty": lambda entry: (entry / "input_ids").write_bytes(b""),
    "no checksums": lambda entry: (entry / "checksums.json").unlink(),
    "other checksums": lambda entry: (entry / "checksums.json").write_text("[]"),
    "half checksums": lambda entry: (entry / "checksums.json").write_text('{"input_ids"'),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_entry_is_rebuilt(cache: Path, how: str) -> None:
    expected = tokenise(some_split(), bert_like(), 9).columns["input_ids"].tolist()
    (entry,) = (cache / "tokens").iterdir()
    DAMAGE[how](entry)
    assert tokenise(some_split(), bert_like(), 9).columns["input_ids"].tolist() == expected
    assert [path.name for path in (cache / "tokens").iterdir()] == [entry.name]
    assert "input_ids" in json.loads((entry / "checksums.json").read_text())


def test_cache_that_cannot_be_written_is_no_reason_to_stop(cache: Path) -> None:
    (cache / "tokens").write_text("in the way")
    with pytest.warns(UserWarning, match="tokens are not cached"):
        table = tokenise(some_split(), bert_like(), 9)
    assert len(table) == 40


def test_tokenizer_with_a_smaller_limit_of_its_own() -> None:
    table = tokenise(some_split(), bert_like(model_max_length=5), 128)
    assert table.lengths.max() == 5


@pytest.mark.parametrize(("pairs", "length"), [(False, 2), (True, 4)])
def test_length_without_room_for_text(pairs: bool, length: int) -> None:
    with pytest.raises(UserError, match="use a larger max_length"):
        tokenise(some_split(pairs=pairs), bert_like(), length)


@pytest.mark.parametrize(("options", "pad"), [({"eos_token": "<end>"}, 2), ({}, 0)])
def test_tokenizer_without_pad_token(options: dict[str, str], pad: int) -> None:
    table = tokenise(some_split(), gpt_like(**options), 9)
    assert table.pad_token_id == pad


def test_text_without_any_token_gets_one() -> None:
    split = Split(["w1 w1", " "], None, np.array([0, 1]))
    table = tokenise(split, gpt_like(eos_token="<end>"), 9)
    assert table.lengths.tolist() == [2, 1]
    assert table.columns["input_ids"].tolist() == [1, 1, 2]


def test_empty_split() -> None:
    table = tokenise(Split([], None, np.zeros(0, np.int64)), bert_like(), 9)
    assert len(table) == 0
    assert table.offsets.tolist() == [0]


def test_progress_is_on_stderr_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY_SECONDS", 0.0)
    tokenise(some_split(), bert_like(), 9, name="train")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "tokenising train" in printed.err
