"""Encoders of many architectures behind one interface, and clear words where that cannot work."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from dpfp_ray.models.classifier import count_parameters, trainable_parameters
from dpfp_ray.models.pretrained import build_classifier
from dpfp_ray.system.errors import UserError
from tests.support.tiny_models import ENCODERS, NO_POOLER, TEXTS, encode


@pytest.mark.parametrize("architecture", [*ENCODERS, "gpt2"])
def test_explicit_inputs_give_what_the_encoder_gives_by_default(
    zoo: Path, architecture: str
) -> None:
    batch = encode(zoo / architecture, [TEXTS[0], "dull"], ["who wrote this?", "nobody"])
    classifier = build_classifier(str(zoo / architecture), "mean", 2)
    plain = AutoModel.from_pretrained(zoo / architecture)
    with torch.no_grad():
        expected = plain(**batch).last_hidden_state
        inputs = classifier._inputs(batch)
        found = classifier.encoder(**inputs).last_hidden_state
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real])
    assert inputs["position_ids"].shape == batch["input_ids"].shape
    assert inputs["position_ids"].is_contiguous()


@pytest.mark.parametrize("architecture", ENCODERS)
def test_cls_and_mean_are_what_they_say(zoo: Path, architecture: str) -> None:
    folder = str(zoo / architecture)
    batch = encode(folder, [TEXTS[0], "dull"])
    plain = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        hidden = plain(**batch).last_hidden_state
        cls = build_classifier(folder, "cls", 2).represent(batch)
        mean = build_classifier(folder, "mean", 2).represent(batch)
    torch.testing.assert_close(cls, hidden[:, 0])
    length = int(batch["attention_mask"][1].sum())
    assert length < hidden.shape[1]
    torch.testing.assert_close(mean[1], hidden[1, :length].mean(0))


@pytest.mark.parametrize("architecture", [name for name in ENCODERS if name not in NO_POOLER])
def test_pooler_is_the_encoders_own(zoo: Path, architecture: str) -> None:
    folder = str(zoo / architecture)
    batch = encode(folder, list(TEXTS[:3]))
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder)(**batch).pooler_output
        found = build_classifier(folder, "pooler", 2).represent(batch)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_row_does_not_depend_on_its_neighbours_or_its_padding(
    zoo: Path, architecture: str
) -> None:
    folder = str(zoo / architecture)
    classifier = build_classifier(folder, "auto", 2)
    with torch.no_grad():
        together = classifier(encode(folder, ["dull", TEXTS[0], TEXTS[6]]))
        alone = classifier(encode(folder, ["dull"]))
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scope", ["all", "head"])
def test_zero_rows_are_a_normal_batch(zoo: Path, scope: str) -> None:
    classifier = build_classifier(str(zoo / "bert"), "cls", 3, scope=scope)
    empty = {key: torch.zeros((0, 1), dtype=torch.long) for key in ("input_ids", "attention_mask")}
    assert classifier.represent(empty).shape == (0, classifier.width)
    logits = classifier(empty)
    assert logits.shape == (0, 3)
    logits.sum().backward()
    assert classifier.head.weight.grad is not None
    assert not classifier.head.weight.grad.any()


def test_scope_head_freezes_the_encoder(zoo: Path) -> None:
    classifier = build_classifier(str(zoo / "roberta"), "mean", 2, scope="head")
    assert [name for name, _ in trainable_parameters(classifier)] == ["head.weight", "head.bias"]
    assert count_parameters(classifier, trainable_only=True) == 2 * 32 + 2
    assert count_parameters(classifier) > 10_000
    assert not classifier.represent(encode(zoo / "roberta", ["dull"])).requires_grad


def test_the_head_is_a_function_of_its_seed_alone(zoo: Path) -> None:
    folder = str(zoo / "bert")
    torch.manual_seed(1)
    first = build_classifier(folder, "cls", 2, head_seed=5).head
    torch.manual_seed(2)
    again = build_classifier(folder, "mean", 2, head_seed=5).head
    other = build_classifier(folder, "cls", 2, head_seed=6).head
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert not first.bias.any()
    assert 0.01 < float(first.weight.detach().std()) < 0.03


def test_rows_longer_than_the_encoder_reads_are_refused(zoo: Path) -> None:
    classifier = build_classifier(str(zoo / "roberta"), "cls", 2)
    ids = torch.full((1, 65), 7)
    with pytest.raises(UserError, match="at most 64"):
        classifier({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    classifier({"input_ids": ids[:, :64], "attention_mask": torch.ones_like(ids[:, :64])})
