"""Encoders of many architectures behind one interface, and clear words where that cannot work."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel

from dpfp_ray.models.classifier import count_parameters, set_dropout, trainable_parameters
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.models.representations import OwnEncoder
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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_last_is_the_last_real_token_whichever_side_is_padded(
    zoo: Path, architecture: str, side: str
) -> None:
    classifier = build_classifier(str(zoo / architecture), "last", 2)
    short, long = (encode(str(zoo / architecture), [text]) for text in ("dull", TEXTS[0]))
    missing = long["input_ids"].shape[1] - short["input_ids"].shape[1]
    assert missing > 0
    ends = (missing, 0) if side == "left" else (0, missing)
    padded = {name: torch.nn.functional.pad(value, ends) for name, value in short.items()}
    if side == "left":
        hidden = classifier.encoder(**classifier._inputs(padded)).last_hidden_state
        torch.testing.assert_close(classifier.represent(padded)[0], hidden[0, -1])
        return
    batch = {name: torch.cat([padded[name], long[name]]) for name in padded}
    found = classifier.represent(batch)
    for row, alone in enumerate((short, long)):
        hidden = classifier.encoder(**classifier._inputs(alone)).last_hidden_state
        torch.testing.assert_close(found[row], hidden[0, -1], atol=1e-5, rtol=1e-4)


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


# Encoders in which one row can reach another are refused, in the mode in which they train.


class Words(nn.Module):
    """One vector a token; subclasses add what must be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 16)
        self.mix = nn.Linear(16, 16)
        self.add()

    def add(self) -> None: ...

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embed(input_ids)))
        self.note(input_ids)
        return self.change(x)

    def note(self, ids: Tensor) -> None: ...

    def change(self, x: Tensor) -> Tensor:
        return x


class BatchNorm(Words):
    def add(self) -> None:
        self.norm = nn.BatchNorm1d(16)

    def change(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


class UntrackedBatchNorm(BatchNorm):
    def add(self) -> None:
        self.norm = nn.BatchNorm1d(16, track_running_stats=False)


# What a row's vectors become, by the module's mode and all rows' vectors.
CHANGES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "centred in training": lambda m, x: x - x.mean(0, keepdim=True) if m.training else x,
    "hardly centred": lambda m, x: x - 1e-4 * x.mean(0, keepdim=True),
    "centred from three rows on": lambda m, x: x - x.mean(0, keepdim=True) * (len(x) > 2),
    "centred in large batches": lambda m, x: x - x.mean(0, keepdim=True) * (len(x) > 64),
    "looks at one position": lambda m, x: torch.cat([x[:, :5], x[:, 5:] + x[:1, 5:6]], 1),
    "looks at the row before": lambda m, x: x + 0.1 * x.roll(1, 0),
    "looks under gradients": lambda m, x: x - x.mean(0, keepdim=True) * torch.is_grad_enabled(),
    "functional dropout": lambda m, x: functional.dropout(x, 0.1, m.training),
    "noisy": lambda m, x: x + 0.01 * torch.randn_like(x),
}
CHANGED = {name: type(name, (Words,), {"change": change}) for name, change in CHANGES.items()}


class CountsTokens(Words):
    """In training; the counts are used in evaluation only."""

    def add(self) -> None:
        self.register_buffer("counts", torch.zeros(1000))

    def note(self, ids: Tensor) -> None:
        if self.training:
            self.counts += ids.flatten().bincount(minlength=1000)

    def change(self, x: Tensor) -> Tensor:
        return x if self.training else x * (1 + self.counts.sum())


class CountsUnseen(CountsTokens):
    def change(self, x: Tensor) -> Tensor:
        return x


class KeepsAList(Words):
    def add(self) -> None:
        self._seen: list[int] = []

    def note(self, ids: Tensor) -> None:
        self._seen += ids.flatten().tolist()


class KeepsTheLastBatch(Words):
    def note(self, ids: Tensor) -> None:
        self.last = ids


SEEN: Counter[int] = Counter()


class RemembersElsewhere(Words):
    """Not in the module; what it saw in training shows in evaluation."""

    def note(self, ids: Tensor) -> None:
        if self.training:
            SEEN.update(ids.flatten().tolist())

    def change(self, x: Tensor) -> Tensor:
        return x if self.training else x + SEEN.total()


@pytest.fixture(scope="module")
def tokenizer(zoo: Path) -> Any:
    return load_tokenizer(str(zoo / "bert"))


def build(module: nn.Module, tokenizer: Any, scope: str = "all", dropout: float = 0.0) -> Any:
    own = OwnEncoder(module, tokenizer)
    return own.classifier("mean", 2, dropout=dropout, head_seed=0, scope=scope)


BESIDE = (UntrackedBatchNorm, *list(CHANGED.values())[:7])
REMEMBERING = (BatchNorm, CountsTokens, CountsUnseen, KeepsAList, KeepsTheLastBatch)


@pytest.mark.parametrize("arrives_in_training_mode", [False, True])
@pytest.mark.parametrize("kind", BESIDE)
def test_an_encoder_whose_rows_reach_each_other_is_refused(
    kind: type[Words], arrives_in_training_mode: bool, tokenizer: Any
) -> None:
    with pytest.raises(UserError, match="depends on the other rows of the batch"):
        build(kind().train(arrives_in_training_mode), tokenizer)


@pytest.mark.parametrize("kind", REMEMBERING)
def test_an_encoder_that_remembers_rows_is_refused(kind: type[Words], tokenizer: Any) -> None:
    with pytest.raises(UserError, match="remembers something of the rows"):
        build(kind().eval(), tokenizer)


def test_an_encoder_that_remembers_rows_outside_itself_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="same rows again"):
        build(RemembersElsewhere().eval(), tokenizer)


@pytest.mark.parametrize("kind", [CHANGED["functional dropout"], CHANGED["noisy"]])
def test_an_encoder_that_is_random_in_training_is_refused(
    kind: type[Words], tokenizer: Any
) -> None:
    with pytest.raises(UserError, match=r"same rows again; switch off .* \(dropout\)"):
        build(kind().eval(), tokenizer)


@pytest.mark.parametrize(
    "kind", [BatchNorm, CHANGED["centred in training"], CHANGED["functional dropout"]]
)
def test_a_frozen_encoder_is_asked_in_evaluation_mode(kind: type[Words], tokenizer: Any) -> None:
    build(kind().train(), tokenizer, scope="head")


@pytest.mark.parametrize("kind", [CHANGED["hardly centred"], KeepsAList, CHANGED["noisy"]])
def test_a_frozen_encoder_is_refused_too(kind: type[Words], tokenizer: Any) -> None:
    with pytest.raises(UserError):
        build(kind().eval(), tokenizer, scope="head")


def test_a_batch_norm_in_a_folder_is_refused(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_batch_norm(*args: Any, **options: Any) -> Any:
        encoder, report = load(*args, **options)
        encoder.embeddings.LayerNorm = Transposed(32)
        return encoder.eval(), report

    class Transposed(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    load = AutoModel.from_pretrained
    monkeypatch.setattr(AutoModel, "from_pretrained", with_batch_norm)
    with pytest.raises(UserError, match=r"LayerNorm.running_mean; .* or scope: head"):
        build_classifier(str(zoo / "bert"), "mean", 2)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_dropout_is_off_in_an_encoder_of_transformers_in_memory(
    zoo: Path, architecture: str
) -> None:
    """Whatever its own config says."""
    folder = str(zoo / architecture)
    config = AutoConfig.from_pretrained(folder)
    for name, value in config.to_dict().items():
        if "dropout" in name and isinstance(value, float):
            setattr(config, name, 0.5)
    encoder = AutoModel.from_pretrained(folder, config=config)
    model = build(encoder, load_tokenizer(folder)).train()
    batch = encode(folder, list(TEXTS[:2]))
    assert torch.equal(model(batch), model(batch))


def test_dropout_is_off_in_attention_and_recurrent_layers() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
            self.recurrent = nn.LSTM(16, 16, 2, dropout=0.5, batch_first=True)
            self.plain = nn.Sequential(nn.Dropout1d(0.5), nn.AlphaDropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.plain(self.recurrent(self.attention(x, x, x)[0])[0])
            return out

    module = Both().train()
    set_dropout(module, 0.0)
    x = torch.randn(2, 3, 16)
    assert torch.equal(module(x), module(x))
