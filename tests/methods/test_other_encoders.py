"""Encoders beyond the usual families: each trains with DP-SGD, or one line says why not."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from dpfp_ray.methods.dpsgd import DpSgd
from dpfp_ray.methods.parts.base import make_method
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.models.representations import OwnEncoder
from dpfp_ray.models.scopes import Lora
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.prepare import Data, freeze_unreached
from tests.methods.test_dpsgd import (
    SEED,
    SIGMA,
    assert_same,
    clipped_sum,
    make_plan,
    make_rows,
    naive_sum,
    table,
)
from tests.support.tiny_models import TEXTS, tokenizer_of

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
}
OTHER_NAMES: dict[str, dict[str, Any]] = {
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 2},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
    "longformer": {**SIZES, "attention_window": [4, 4]},
    "convbert": {**SIZES, "embedding_size": 32},
    "fnet": {**SIZES, "tpu_short_seq_length": 64},
    "deberta": {
        **SIZES,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*no gradient per example", "ignore:.*do not affect the output"
)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("others")
    return functools.cache(lambda name: make(root / name, name))


def make(folder: Path, name: str) -> str:
    kind, _, half = name.partition(" ")
    tokenizer = tokenizer_of("bert", list(TEXTS))
    tokenizer.save_pretrained(folder)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(kind, **ids, **OTHER_NAMES.get(kind, SIZES))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModel.from_config(config)
    (model.half() if half else model).save_pretrained(folder)
    return str(folder)


def dpsgd(folder: str, scope: str) -> tuple[Plan, Classifier, DpSgd]:
    plan = make_plan(folder, scope=scope, clip=0.05)
    model = build_classifier(folder, "mean", 2, scope=scope, lora=Lora.of(plan), head_seed=3)
    rows = table(folder)
    freeze_unreached(model, Data(rows, {"dev": rows}))
    return plan, model, DpSgd(plan, model.train(), SIGMA, SEED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("camembert", "lora"),
        ("nomic_bert", "lora"),  # queries, keys and values from one matrix; no biases
        ("bert half", "top:1"),  # weights stored in half precision
        ("xlm", "bias"),  # changes its first norm's output in place
        ("longformer", "bias"),  # changes queries in place, and turns rows and tokens round
        ("deberta", "all"),  # attention has weights of its own beside its parts
        ("mobilebert", "bias"),
    ],
)
def test_it_trains_by_the_naive_sum(made: Callable[[str], str], name: str, scope: str) -> None:
    plan, model, method = dpsgd(made(name), scope)
    rows = make_rows(table(plan.model))
    assert any(n.startswith("encoder.") for n, _ in trainable_parameters(model))
    assert_same(clipped_sum(method, rows), naive_sum(model, rows, plan.C))


def test_parts_of_a_module_train_where_its_own_weights_cannot(made: Callable[[str], str]) -> None:
    _, model, _ = dpsgd(made("deberta"), "all")
    names = [name for name, _ in trainable_parameters(model)]
    assert any(name.endswith("self.in_proj.weight") for name in names)
    assert not any(name.endswith("q_bias") for name in names)


class Reversed(nn.Module):
    """In training, its layer reads the rows in reverse: no row reaches another one's vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(1000, 16), nn.Linear(16, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        mixed: Tensor = self.mix(x.flip(0)).flip(0) if self.training else self.mix(x)
        return mixed


@pytest.fixture
def reversing(made: Callable[[str], str]) -> Classifier:
    own = OwnEncoder(Reversed().eval(), load_tokenizer(made("deberta")))
    return own.classifier("mean", 2, dropout=0.0, head_seed=0, scope="all")


def test_dpsgd_leaves_a_layer_alone_whose_rows_change_places_in_training(
    reversing: Classifier,
) -> None:
    make_method(make_plan("custom:Reversed"), reversing, SIGMA, SEED)
    trained = [name for name, _ in trainable_parameters(reversing)]
    assert trained == ["encoder.inner.embed.weight", "head.weight", "head.bias"]


def test_rgp_refuses_a_layer_whose_rows_change_places_in_training(reversing: Classifier) -> None:
    plan = Plan(method="rgp", representation="mean", batch_size=4, epochs=1, records=24)
    with pytest.raises(UserError, match=r"cannot tell rows apart in encoder\.inner\.mix\.weight"):
        make_method(plan, reversing, SIGMA, SEED)


@pytest.mark.parametrize("name", ["convbert", "fnet"])
def test_rows_that_depend_on_their_padding_are_refused(
    made: Callable[[str], str], name: str
) -> None:
    # Other rows of a batch say how far a row is padded: one more record would change them all.
    with pytest.raises(UserError, match="depends on the other rows of the batch, or on padding"):
        build_classifier(made(name), "mean", 2, scope="head")


@pytest.mark.parametrize(
    ("name", "scope", "why"),
    [
        ("xlnet", "bias", "none of the weights to train has a gradient per example"),
        ("longformer", "lora", "none of the weights to train has a gradient per example"),
        ("xlnet", "lora", "finds no layer in this encoder; its linear layers are: layer_1"),
        ("xlm", "top:1", "needs layers with weights of their own, in one list"),
    ],
)
def test_a_scope_that_an_encoder_does_not_have_is_refused(
    made: Callable[[str], str], name: str, scope: str, why: str
) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        dpsgd(made(name), scope)
