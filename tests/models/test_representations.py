import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dpfp_ray.data.tokens import TokenTable, tokenise
from dpfp_ray.models import representations, row_store
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.models.representations import HeadClassifier, RepresentationTable, represent
from dpfp_ray.plan.plan import Plan
from dpfp_ray.training.prepare import load_inputs, prepare
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


def test_two_at_once_both_succeed(model: str, cache: Path) -> None:
    found: list[RepresentationTable] = []
    table = tokens(model)
    threads = [
        threading.Thread(target=lambda: found.append(represent(table, model, "mean")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(found[0].h, found[1].h)
    assert [path.suffix for path in cache.iterdir()] == [".npy"]


def test_no_rows_are_a_normal_table(model: str) -> None:
    table = represent(tokens(model), model, "mean")
    batch = table.collate(np.array([], dtype=np.int64))
    assert HeadClassifier(table.width, 3, "mean")(batch).shape == (0, 3)


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
