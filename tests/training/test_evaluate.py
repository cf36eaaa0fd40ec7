"""Scores against a loop over single rows."""

import numpy as np
import pytest
import torch

from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.training import loop as module
from dpfp_ray.training.loop import evaluate
from dpfp_ray.training.machine import SoloComm
from tests.support.tiny_runs import in_threads, tiny_classifier, tiny_data, tiny_plan


@pytest.fixture
def model(model_folder: str) -> Classifier:
    """A head large enough for scores that differ between rows."""
    model = tiny_classifier(model_folder, tiny_plan(dropout=0.5))
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(model.head.weight, generator=generator)
    return model


@pytest.fixture
def table(model_folder: str) -> TokenTable:
    return tiny_data(model_folder, dev_rows=41).dev["dev"]


def naive(model: Classifier, table: TokenTable) -> dict[str, float]:
    model.eval()
    right, loss = 0, 0.0
    for row in range(len(table)):
        with torch.no_grad():
            logits = model(table.collate(np.array([row])))[0]
        label = int(table.labels[row])
        right += int(logits.argmax()) == label
        loss -= float(torch.log_softmax(logits, 0)[label])
    return {"accuracy": right / len(table), "loss": loss / len(table)}


@pytest.mark.parametrize("rows_at_once", [1, 7, 256])
def test_scores_are_those_of_a_naive_loop(
    model: Classifier, table: TokenTable, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVAL_ROWS", rows_at_once)
    expected = naive(model, table)
    assert 0 < expected["accuracy"] < 1
    scores = evaluate(model, table, SoloComm())
    assert scores["accuracy"] == expected["accuracy"]
    assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_is_put_back(
    model: Classifier, table: TokenTable, training: bool
) -> None:
    model.train(training)
    assert evaluate(model, table, SoloComm()) == evaluate(model, table, SoloComm())
    assert model.training is training


@pytest.mark.parametrize("world_size", [2, 3, 50])
def test_workers_share_the_rows_and_agree(
    model: Classifier, table: TokenTable, world_size: int
) -> None:
    expected = naive(model, table)
    for scores in in_threads(world_size, lambda comm: evaluate(model, table, comm)):
        assert scores["accuracy"] == expected["accuracy"]
        assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_bf16_scores_with_a_head_in_fp32(model: Classifier, table: TokenTable) -> None:
    """Eight bits would make ties of close scores, and a tie is class 0."""
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda *found: seen.append(found[2].dtype))
    scores = evaluate(model, table, SoloComm(), "bf16")
    assert set(seen) == {torch.float32}
    assert scores["loss"] == pytest.approx(naive(model, table)["loss"], rel=0.05)
    assert scores["loss"] != evaluate(model, table, SoloComm(), "fp32")["loss"]
