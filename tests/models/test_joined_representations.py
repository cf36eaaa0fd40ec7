"""`layers`, `pair` and centring: the same vectors from the cache, the classifier and the export."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dpfp_ray.data import Split
from dpfp_ray.data.tokens import PairTable, TokenTable, tokenise, tokenise_sides
from dpfp_ray.models import row_store
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer, resolve_representation
from dpfp_ray.models.representations import public_centre, represent
from dpfp_ray.system.errors import UserError
from tests.support.tiny_models import ENCODERS, TEXTS, build_tiny
from tests.support.tiny_runs import tiny_split, tiny_world


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tiny_world(tmp_path_factory.mktemp("world")) as folder:
        yield folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tokens(model: str, rows: int = 20, seed: int = 1) -> TokenTable:
    return tokenise(tiny_split(rows, seed), load_tokenizer(model), 32)


def pairs(model: str, rows: int = 10) -> PairTable:
    first, second = tiny_split(rows, 1), tiny_split(rows, 2)
    return tokenise_sides(Split(first.texts, second.texts, first.labels), load_tokenizer(model), 32)


@torch.no_grad()
def hidden_means(model: str, table: TokenTable) -> np.ndarray:
    """(rows, layers + 1, width), row by row, by transformers alone: the slow twin."""
    encoder = build_classifier(model, "mean", 2, scope="head").encoder.eval()
    found = []
    for row in range(len(table)):
        batch = table.collate(np.array([row]))
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        output = encoder(**inputs, output_hidden_states=True)
        found.append([hidden[0].mean(0).double().numpy() for hidden in output.hidden_states])
    return np.array(found)


def scaled(parts: np.ndarray) -> np.ndarray:
    return parts / np.linalg.norm(parts, axis=-1, keepdims=True)


def joined(parts: np.ndarray) -> np.ndarray:
    return parts.reshape(len(parts), -1) / np.sqrt(parts.shape[1])


def test_layers_are_every_layers_mean_scaled_and_joined(model: str) -> None:
    table = tokens(model)
    means = scaled(hidden_means(model, table))
    np.testing.assert_allclose(represent(table, model, "layers").h, joined(means), atol=1e-3)
    some = represent(table, model, "layers:0").h
    np.testing.assert_allclose(some, joined(means[:, [0]]), atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(some.astype(float), axis=1), 1, atol=1e-3)


def test_a_pair_is_both_means_their_distance_and_their_product(model: str) -> None:
    table = pairs(model)
    u, v = (scaled(hidden_means(model, side)[:, -1]) for side in (table.first, table.second))
    expected = joined(scaled(np.stack([u, v, abs(u - v), u * v], axis=1)))
    np.testing.assert_allclose(represent(table, model, "pair").h, expected, atol=2e-3)


def test_centred_parts_are_scaled_again(model: str) -> None:
    table = tokens(model)
    plain = represent(table, model, "layers")
    centre = public_centre([plain])
    np.testing.assert_allclose(centre, plain.h.astype(float).mean(0), atol=1e-6)
    count = plain.width // 32
    parts = (plain.h.astype(float) - centre).reshape(len(table), count, -1)
    found = represent(table, model, "layers", centre=centre)
    np.testing.assert_allclose(found.h, joined(scaled(parts)), atol=5e-3)
    assert found.key != plain.key  # other rows must get other noise


@pytest.mark.parametrize("representation", ["mean", "layers", "layers:1", "pair"])
@pytest.mark.parametrize("centred", [False, True])
def test_the_classifier_gives_what_the_cache_holds(
    model: str, representation: str, centred: bool
) -> None:
    table = pairs(model) if representation == "pair" else tokens(model)
    cached = represent(table, model, representation)
    classifier = build_classifier(model, representation, 2, scope="head").eval()
    if centred:
        centre = public_centre([cached])
        cached = represent(table, model, representation, centre=centre)
        classifier.centre = torch.from_numpy(centre)
    rows = np.arange(len(table))
    h = classifier.represent(table.collate(rows))
    np.testing.assert_allclose(cached.h, h.numpy(), atol=5e-3)
    np.testing.assert_allclose(cached.collate(rows)["representation"].numpy(), cached.h)


def test_one_pass_serves_subsets_other_layers_and_pairs(
    model: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    whole = tokens(model, rows=20)
    first = represent(whole, model, "mean")
    monkeypatch.setattr(row_store.Encoder, "shard", None)  # calling it would fail
    layers = represent(whole, model, "layers")
    split = tiny_split(20, 1)
    part = split.take(np.array([7, 3, 3, 11]))
    few = tokenise(part, load_tokenizer(model), 32)
    np.testing.assert_array_equal(represent(few, model, "mean").h, first.h[[7, 3, 3, 11]])
    np.testing.assert_array_equal(represent(few, model, "layers").h, layers.h[[7, 3, 3, 11]])
    both = Split(split.texts, split.texts[::-1], split.labels)
    assert len(represent(tokenise_sides(both, load_tokenizer(model), 32), model, "pair")) == 20
    for path in (cache / "encoded").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0  # private data in another form


def test_a_damaged_shard_is_made_again(model: str, cache: Path) -> None:
    first = np.array(represent(tokens(model), model, "layers:1").h)
    for path in (cache / "encoded").rglob("layers.npy"):
        path.write_bytes(path.read_bytes()[:100])
    again = represent(tokens(model, rows=19), model, "layers:1")
    np.testing.assert_allclose(again.h, first[:19], atol=1e-3)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_every_family_has_layers_and_pairs(architecture: str, tmp_path: Path) -> None:
    folder = str(build_tiny(tmp_path / architecture, architecture))
    split = Split(list(TEXTS[:4]), list(TEXTS[4:8]), np.zeros(4, np.int64))
    tokenizer = load_tokenizer(folder)
    assert resolve_representation(folder, "layers") == "layers"
    firsts = tokenise(Split(split.texts, None, split.labels), tokenizer, 32)
    layers, means = (represent(firsts, folder, name) for name in ("layers", "mean"))
    width = means.width
    np.testing.assert_allclose(  # the last part is what the encoder gives in the end
        scaled(layers.h[:, -width:].astype(float)), scaled(means.h), atol=2e-3
    )
    assert represent(tokenise_sides(split, tokenizer, 32), folder, "pair").width == 4 * width


def test_layers_that_an_encoder_does_not_have_are_refused(model: str) -> None:
    with pytest.raises(UserError, match=r"layers:0,99 .* its layers are 1 to"):
        resolve_representation(model, "layers:0,99")
