from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dpfp_ray.data import Split
from dpfp_ray.data.tokens import PairTable, TokenTable, tokenise, tokenise_sides
from dpfp_ray.models import representations, row_store
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer, resolve_representation
from dpfp_ray.models.representations import HeadClassifier, public_centre, represent
from dpfp_ray.plan.plan import Plan
from dpfp_ray.training.prepare import load_inputs, prepare
from tests.support.tiny_models import ENCODERS, TEXTS, build_tiny
from tests.support.tiny_runs import (
    Listener,
    run_with,
    tiny_data,
    tiny_plan,
    tiny_split,
    tiny_world,
    train_with,
    write_csv,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tiny_world(tmp_path_factory.mktemp("world")) as folder:
        yield folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "representations"


def tokens(model: str, rows: int = 30, seed: int = 1) -> TokenTable:
    return tokenise(tiny_split(rows, seed), load_tokenizer(model), 32)


@pytest.mark.parametrize("representation", ["mean", "cls", "pooler"])
def test_rows_are_what_the_encoder_gives_one_by_one(model: str, representation: str) -> None:
    """But for rounding, which depends on what else is in the batch."""
    table = tokens(model)
    found = represent(table, model, representation)
    classifier = build_classifier(model, representation, 2, scope="head").eval()
    with torch.no_grad():
        for row in range(len(table)):
            alone = classifier.represent(table.collate(np.array([row])))[0].numpy()
            np.testing.assert_allclose(found.h[row], alone, atol=1e-5)
    np.testing.assert_array_equal(found.labels, table.labels)


def test_the_second_time_nothing_is_encoded(
    model: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    first = represent(tokens(model), model, "mean")
    monkeypatch.setattr(row_store.Encoder, "shard", None)  # calling it would fail
    second = represent(tokens(model), model, "mean")
    np.testing.assert_array_equal(first.h, second.h)
    assert first.key == second.key
    (entry,) = cache.iterdir()
    assert entry.stat().st_mode & 0o077 == 0  # private data in another form


def test_the_key_follows_all_that_h_depends_on_and_nothing_else(model: str) -> None:
    table = tokens(model)
    keys = {
        represent(table, model, "mean").key,
        represent(table, model, "cls").key,
        represent(table, model, "mean", "bf16").key,
        represent(tokens(model, seed=2), model, "mean").key,
        represent(tokens(model, rows=29), model, "mean").key,
    }
    assert len(keys) == 5
    flipped = TokenTable(table.columns, table.offsets, 1 - table.labels, table.pad_token_id)
    assert represent(flipped, model, "mean").key in keys  # labels are not encoded
    np.testing.assert_array_equal(represent(flipped, model, "mean").labels, flipped.labels)


def test_a_damaged_entry_is_made_again(model: str, cache: Path) -> None:
    first = np.array(represent(tokens(model), model, "mean").h)
    (entry,) = cache.iterdir()
    for damage in (b"", entry.read_bytes()[:200], b"not numpy"):
        entry.write_bytes(damage)
        np.testing.assert_array_equal(represent(tokens(model), model, "mean").h, first)


def test_a_cache_that_cannot_be_written_costs_only_time(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(representations, "whole_file", full)
    with pytest.warns(UserWarning, match="not cached"):
        assert represent(tokens(model), model, "mean").h.shape == (30, 32)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["non_private", "dpfp", "dpsgd"])
def test_training_on_the_cache_is_training_on_a_frozen_encoder(
    model: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same draws and noise, which otherwise depend on what is trained on."""
    from dpfp_ray.training.prepare import Data

    monkeypatch.setattr("dpfp_ray.training.loop.run_seed", lambda seed, *_: seed)
    data = tiny_data(model)
    plan = tiny_plan(method, scope="head", learning_rate=0.1)
    cached = Data(
        represent(data.train, model, "mean"),
        {name: represent(table, model, "mean") for name, table in data.dev.items()},
    )
    whole = build_classifier(model, "mean", 2, scope="head", head_seed=3)
    head = HeadClassifier(32, 2, "mean", head_seed=3)
    for classifier, tables in ((whole, data), (head, cached)):
        train_with(plan, 0.5, classifier, tables, seed=5)
    torch.testing.assert_close(whole.head.weight, head.head.weight, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["moments", "release_once"])
def test_a_run_from_plan_to_record(model: str, mode: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "train.csv", 300)
    plan = Plan(train_file=file, model=model, mode=mode, epsilon=8.0, delta=1e-3)
    prepared = prepare(plan, load_inputs(plan))
    listener = Listener()
    record, trained = run_with(prepared, listener, seed=1)
    again, _ = run_with(prepared, seed=1)
    other, _ = run_with(prepared, seed=2)
    assert listener.steps == [1]
    assert record["finished"]
    assert record["privacy"]["guarantee"] == "proved"
    assert record["privacy"]["p"] == record["privacy"]["draws"] == 1
    assert record["privacy"]["epsilon"]["pld"] == pytest.approx(8.0, rel=1e-3)
    assert record["history"][0]["train_loss"] is None
    assert record["metrics"] == again["metrics"]
    assert record["privacy"]["release_id"] == again["privacy"]["release_id"]
    assert record["privacy"]["release_id"] != other["privacy"]["release_id"]
    # The saved head, in a whole classifier with the same bound, gives the reported accuracy.
    tokens_of_dev = tokenise(
        tiny_split(10, seed=3), load_tokenizer(model), 32
    )  # any rows: the two classifiers must agree on them
    whole = build_classifier(model, prepared.plan.representation, 2, scope="head").eval()
    whole.bounded = trained.bounded
    whole.load_state_dict(trained.state_dict(), strict=False)
    cached = represent(tokens_of_dev, model, prepared.plan.representation)
    rows = np.arange(10)
    with torch.no_grad():
        expected = trained(cached.collate(rows))
        torch.testing.assert_close(
            whole(tokens_of_dev.collate(rows)), expected, atol=1e-3, rtol=1e-3
        )


# --- `layers`, `pair` and centring: the same vectors from the cache and the classifier -----------


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
    table = tokens(model, 20)
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
    table = tokens(model, 20)
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
    table = pairs(model) if representation == "pair" else tokens(model, 20)
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
    for path in (cache.parent / "encoded").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0  # private data in another form


def test_a_damaged_shard_is_made_again(model: str, cache: Path) -> None:
    first = np.array(represent(tokens(model, 20), model, "layers:1").h)
    for path in (cache.parent / "encoded").rglob("layers.npy"):
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
