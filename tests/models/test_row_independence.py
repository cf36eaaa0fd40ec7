"""Encoders in which one row can reach another are refused, in the mode in which they train."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel

from dpfp_ray.models.classifier import set_dropout
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.models.representations import OwnEncoder
from dpfp_ray.system.errors import UserError
from tests.support.tiny_models import ENCODERS, TEXTS, encode


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


class CentredInTraining(Words):
    def change(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if self.training else x


class HardlyCentred(Words):
    def change(self, x: Tensor) -> Tensor:
        return x - 1e-4 * x.mean(0, keepdim=True)


class CentredFromThreeRowsOn(Words):
    def change(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if len(x) > 2 else x


class CentredInLargeBatches(Words):
    def change(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if len(x) > 64 else x


class LooksAtOnePosition(Words):
    def change(self, x: Tensor) -> Tensor:
        if x.shape[1] < 6:
            return x
        return torch.cat([x[:, :5], x[:, 5:] + x[:1, 5:6]], 1)


class LooksAtTheRowBefore(Words):
    def change(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.roll(1, 0)


class LooksUnderGradients(Words):
    def change(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if torch.is_grad_enabled() else x


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


class FunctionalDropout(Words):
    def change(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.1, self.training)


class Noisy(Words):
    def change(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.randn_like(x)


@pytest.fixture(scope="module")
def tokenizer(zoo: Path) -> Any:
    return load_tokenizer(str(zoo / "bert"))


def build(module: nn.Module, tokenizer: Any, scope: str = "all", dropout: float = 0.0) -> Any:
    own = OwnEncoder(module, tokenizer)
    return own.classifier("mean", 2, dropout=dropout, head_seed=0, scope=scope)


BESIDE = (
    *(
        UntrackedBatchNorm,
        CentredInTraining,
        HardlyCentred,
        CentredFromThreeRowsOn,
        CentredInLargeBatches,
    ),
    *(LooksAtOnePosition, LooksAtTheRowBefore, LooksUnderGradients),
)
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


@pytest.mark.parametrize("kind", [FunctionalDropout, Noisy])
def test_an_encoder_that_is_random_in_training_is_refused(
    kind: type[Words], tokenizer: Any
) -> None:
    with pytest.raises(UserError, match=r"same rows again; switch off .* \(dropout\)"):
        build(kind().eval(), tokenizer)


@pytest.mark.parametrize("kind", [BatchNorm, CentredInTraining, FunctionalDropout])
def test_a_frozen_encoder_is_asked_in_evaluation_mode(kind: type[Words], tokenizer: Any) -> None:
    build(kind().train(), tokenizer, scope="head")


@pytest.mark.parametrize("kind", [HardlyCentred, KeepsAList, Noisy])
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
