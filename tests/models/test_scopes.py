"""Which weights each scope leaves to train."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.nn import Embedding, Module, TransformerEncoder, TransformerEncoderLayer

from dpfp_ray.models.classifier import Classifier, count_parameters, trainable_parameters
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.models.representations import OwnEncoder
from dpfp_ray.models.scopes import Lora, initialise, weights_to_keep, woken
from dpfp_ray.system.errors import UserError
from tests.support.tiny_models import TEXTS, build_tiny, encode


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_tiny(tmp_path_factory.mktemp("scopes") / "bert", "bert", layers=3)


def training(model: Module) -> list[str]:
    return [name for name, _ in trainable_parameters(model)]


def test_bias_trains_biases_norms_and_the_head(bert: str) -> None:
    names = training(build_classifier(bert, "mean", 2, scope="bias"))
    everything = [name for name, _ in build_classifier(bert, "mean", 2).named_parameters()]
    wanted = [n for n in everything if n.endswith(".bias") or "LayerNorm" in n or "head" in n]
    assert names == wanted


@pytest.mark.parametrize(
    ("scope", "numbers"), [("bias", 31_490), ("lora", 74_498), ("top:2", 3_549_698), ("head", 770)]
)
def test_how_many_numbers_train_in_minilm(scope: str, numbers: int) -> None:
    model = build_classifier("minilm", "mean", 2, scope=scope)
    assert count_parameters(model, trainable_only=True) == numbers


@pytest.mark.parametrize("representation", ["mean", "pooler"])
def test_top_trains_the_last_layers_and_the_pooler_if_it_is_used(
    bert: str, representation: str
) -> None:
    names = training(build_classifier(bert, representation, 2, scope="top:2"))
    assert {n.split(".")[3] for n in names if ".layer." in n} == {"1", "2"}
    assert any("pooler" in n for n in names) == (representation == "pooler")
    assert not any("embeddings" in n for n in names)
    assert {"head.weight", "head.bias"} <= set(names)


def test_more_layers_than_there_are_are_refused(bert: str) -> None:
    with pytest.raises(UserError, match=re.escape("top:4: this encoder has 3 layers")):
        build_classifier(bert, "mean", 2, scope="top:4")


@pytest.mark.parametrize(
    ("architecture", "after"), [("modernbert", "final_norm"), ("gpt2", "ln_f"), ("deberta-v2", "")]
)
def test_top_finds_what_comes_after_the_layers(
    tmp_path: Path, architecture: str, after: str
) -> None:
    names = training(build_classifier(build_tiny(tmp_path, architecture), "mean", 2, scope="top:1"))
    outside = {n.split(".")[1] for n in names if not re.search(r"\.(layer|layers|h)\.1\.", n)}
    assert outside == {"weight", "bias", after} - {""}


def test_lora_starts_as_the_encoder_it_changes(bert: str) -> None:
    batch = encode(bert, list(TEXTS[:4]))
    plain = build_classifier(bert, "mean", 2, head_seed=5)
    changed = build_classifier(bert, "mean", 2, head_seed=5, scope="lora")
    with torch.no_grad():
        torch.testing.assert_close(changed(batch), plain(batch))
        with woken(changed):
            assert not torch.allclose(changed(batch), plain(batch), atol=1e-6)
        torch.testing.assert_close(changed(batch), plain(batch))


def test_lora_changes_queries_and_values_or_what_is_asked_for(bert: str) -> None:
    def changed(targets: tuple[str, ...]) -> set[str]:
        model = build_classifier(bert, "mean", 2, scope="lora", lora=Lora(targets=targets))
        return {n.split(".lora_")[0].rpartition(".")[2] for n in training(model) if "lora" in n}

    assert changed(()) == {"query", "value"}
    assert changed(("key", "intermediate.dense")) == {"key", "dense"}
    with pytest.raises(UserError, match=r"lora_targets q_proj finds no layer .* dense, key"):
        changed(("q_proj",))


def test_lora_has_the_rank_and_the_scale_asked_for(bert: str) -> None:
    lora = Lora(rank=3, alpha=7.5)
    model = build_classifier(bert, "mean", 2, scope="lora", lora=lora)
    query = model.encoder.get_submodule("encoder.layer.0.attention.self.query")
    assert query.lora_A["default"].weight.shape == (3, 32)  # type: ignore[union-attr,index]
    assert query.scaling == {"default": 2.5}


def test_lora_is_drawn_with_the_runs_seed_and_nothing_else(bert: str) -> None:
    def first(seed: int) -> dict[str, torch.Tensor]:
        model = build_classifier(bert, "mean", 2, scope="lora", head_seed=seed)
        return {name: p.detach().clone() for name, p in trainable_parameters(model)}

    state = torch.get_rng_state()
    one, again, other = first(1), first(1), first(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert all(
        torch.equal(one[name], other[name]) == ("lora_B" in name or name == "head.bias")
        for name in one
    )


def test_a_shared_skeleton_is_drawn_anew_for_each_seed(bert: str) -> None:
    # What sweeps do: one copy a node, new weights a trial.
    model = build_classifier(bert, "mean", 2, scope="lora", head_seed=1)
    copied: Classifier = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    initialise(copied, 2)
    fresh = build_classifier(bert, "mean", 2, scope="lora", head_seed=2)
    assert training(copied) == training(fresh)
    for one, two in zip(copied.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_fixed_a_is_kept_with_the_trained_weights(bert: str) -> None:
    lora = Lora(freeze_a=True)
    model = build_classifier(bert, "mean", 2, scope="lora", lora=lora, head_seed=1)
    assert not any("lora_A" in name for name in training(model))
    with torch.no_grad():
        for _, parameter in trainable_parameters(model):
            parameter.add_(0.1)
    other = build_classifier(bert, "mean", 2, scope="lora", lora=lora, head_seed=2)
    other.load_state_dict(weights_to_keep(model), strict=False)
    batch = encode(bert, list(TEXTS[:4]))
    with torch.no_grad():
        assert torch.equal(model(batch), other(batch))


class Own(Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(600, 16)
        layer = TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body = TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(
            self.embedding(input_ids), src_key_padding_mask=attention_mask == 0
        )
        return found


def test_an_encoder_of_ones_own_has_scopes_too(bert: str) -> None:
    own = OwnEncoder(Own(), load_tokenizer(bert))

    def names(scope: str, lora: Lora | None = None) -> list[str]:
        return training(own.classifier("mean", 2, dropout=0.0, head_seed=0, scope=scope, lora=lora))

    assert {n.split(".")[4] for n in names("top:1") if "layers" in n} == {"2"}
    assert not any(n.endswith("linear1.weight") for n in names("bias"))
    assert any("lora_B" in n for n in names("lora", Lora(targets=("linear1",))))


class Tied(Own):
    """One layer, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.body.layers = torch.nn.ModuleList([self.body.layers[0]] * 3)


def test_top_of_layers_that_are_one_layer_is_refused(bert: str) -> None:
    own = OwnEncoder(Tied(), load_tokenizer(bert))
    with pytest.raises(UserError, match="layers with weights of their own"):
        own.classifier("mean", 2, dropout=0.0, head_seed=0, scope="top:1")
