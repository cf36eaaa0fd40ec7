"""Encoders as they come: found, checked and loaded, with clear words where that cannot work."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dpfp_ray.data import Split
from dpfp_ray.data.tokens import tokenise_once
from dpfp_ray.models.download import encoder_identity
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer, resolve_representation
from dpfp_ray.system.errors import UserError
from tests.support.tiny_models import NO_POOLER


def without_pooler(source: Path, target: Path) -> str:
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "pooler" not in name}
    assert len(kept) < len(weights)
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return str(target)


@pytest.mark.parametrize("architecture", ["bert", "deberta-v2"])
def test_building_leaves_the_global_random_state_alone(zoo: Path, architecture: str) -> None:
    before = torch.random.get_rng_state()
    build_classifier(str(zoo / architecture), "auto", 2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_missing_pooler_is_announced_and_reproducible(zoo: Path, tmp_path: Path) -> None:
    folder = without_pooler(zoo / "bert", tmp_path / "bare")
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="no pooler"):
        first = build_classifier(folder, "pooler", 2, head_seed=5)
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match="no pooler"):
        again = build_classifier(folder, "pooler", 2, head_seed=5)
    for (name, weight), (_, twin) in zip(
        first.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(weight, twin), name


def test_auto_takes_the_pooler_only_where_the_checkpoint_has_one(zoo: Path, tmp_path: Path) -> None:
    assert resolve_representation(str(zoo / "bert"), "auto") == "pooler"
    bare = without_pooler(zoo / "bert", tmp_path / "bare")
    assert resolve_representation(bare, "auto") == "cls"
    assert resolve_representation(str(zoo / "distilbert"), "auto") == "cls"
    assert resolve_representation(str(zoo / "gpt2"), "auto") == "mean"


def test_auto_reads_the_pooling_of_a_sentence_encoder(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sentence"
    shutil.copytree(zoo / "bert", folder)
    (folder / "1_Pooling").mkdir()
    declared = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(declared))
    assert resolve_representation(str(folder), "auto") == "mean"


@pytest.mark.parametrize(
    ("architecture", "representation", "says"),
    [
        *((name, "pooler", "use cls or mean") for name in NO_POOLER),
        ("gpt2", "cls", "only the first token; use mean or last"),
        ("t5", "mean", "encoder-decoder"),
        ("bart", "mean", "encoder-decoder"),
        ("bert", "layers:0,99", r"layers:0,99 .* its layers are 1 to"),
    ],
)
def test_what_an_encoder_cannot_give_is_refused(
    zoo: Path, architecture: str, representation: str, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        build_classifier(str(zoo / architecture), representation, 2)


@pytest.mark.parametrize(
    ("keep", "message"), [((), r"no config\.json"), (("config.json",), "no weights")]
)
def test_an_incomplete_folder_is_named(
    zoo: Path, tmp_path: Path, keep: tuple[str, ...], message: str
) -> None:
    for name in keep:
        shutil.copy(zoo / "bert" / name, tmp_path)
    with pytest.raises(UserError, match=message):
        build_classifier(str(tmp_path), "cls", 2)
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("representation", ["auto", "mean"])
@pytest.mark.parametrize("left", [0, 1000])
def test_damaged_weights_are_one_line(
    zoo: Path, tmp_path: Path, representation: str, left: int
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(zoo / "bert", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left] or b"not weights")
    with pytest.raises(UserError, match="cannot load the weights in") as caught:
        build_classifier(str(folder), representation, 2)
    assert "\n" not in str(caught.value)


def test_weights_of_another_architecture_are_refused(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(zoo / "bert", folder)
    shutil.copy(zoo / "gpt2" / "model.safetensors", folder)
    with pytest.raises(UserError, match="lacks"):
        build_classifier(str(folder), "mean", 2)


def test_identity_follows_the_content(zoo: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(zoo / "bert", twin)
    first = encoder_identity(str(zoo / "bert"))
    assert encoder_identity(str(twin)) == first
    weights = load_file(twin / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name] + 1e-3
    save_file(weights, twin / "model.safetensors", {"format": "pt"})
    assert encoder_identity(str(twin)) != first


def test_a_tokenizer_without_padding_gets_it(zoo: Path) -> None:
    tokenizer = load_tokenizer(str(zoo / "gpt2"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_a_token_beyond_the_vocabulary_is_one_line(zoo: Path) -> None:
    split = Split(["a warm film"], None, np.zeros(1, np.int64))
    tokens = tokenise_once(split, load_tokenizer(str(zoo / "bert")), 16)
    model = build_classifier(str(zoo / "bert"), "mean", 2)
    model.encoder.resize_token_embeddings(7)
    with pytest.raises(UserError, match="no embedding for a token"):
        model(tokens.collate(np.arange(1)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", -1),
        ("hidden_size", 10**12),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("vocab_size", 10**12),
    ],
)
@pytest.mark.parametrize("representation", ["auto", "mean", "layers"])
def test_a_size_that_the_weights_cannot_have_is_one_line(
    zoo: Path, tmp_path: Path, name: str, value: int, representation: str
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(zoo / "bert", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(UserError, match=name) as caught:
        build_classifier(str(folder), representation, 2)
    assert "\n" not in str(caught.value)
