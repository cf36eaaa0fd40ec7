"""A finished run answers again as it did at its last evaluation, whatever method made it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpfp_ray import UserError, load_model
from dpfp_ray.data.tasks import load_task
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.pretrained import load_tokenizer
from dpfp_ray.training.record import plan_of
from dpfp_ray.training.run_folder import RESULT, WEIGHTS
from dpfp_ray.training.train import TrainedRun, train
from tests.support.finished_runs import KINDS, finished
from tests.support.states import flip_byte
from tests.support.tiny_models import build_tiny
from tests.training.test_train import Words, quick_plan, rows


@pytest.fixture(scope="module", params=KINDS)
def run(
    request: pytest.FixtureRequest,
    tiny_task: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> TrainedRun:
    return finished(tiny_task, request.param, tmp_path_factory.mktemp("run"))


def dev_score(model: Any, run: TrainedRun) -> dict[str, float]:
    dev = load_task(plan_of(run.record)).dev["dev"]
    shares = model.probabilities(dev.texts)
    right = shares[np.arange(len(dev)), dev.labels]
    accuracy = float((shares.argmax(1) == dev.labels).mean())
    return {"accuracy": accuracy, "loss": float(-np.log(right).mean())}


def test_the_saved_model_has_the_runs_own_dev_score(run: TrainedRun) -> None:
    last = run.record["history"][-1]["dev"]["dev"]
    assert run.folder is not None
    score = dev_score(load_model(run.folder), run)
    assert score["accuracy"] == last["accuracy"]
    assert score["loss"] == pytest.approx(last["loss"], rel=1e-5)


def test_the_model_in_memory_answers_as_the_saved_one(run: TrainedRun) -> None:
    assert run.model is not None
    assert run.folder is not None
    texts = ["a great story", "dull, tedious and boring", "x" * 500]
    assert run.model.predict(texts)[0].label in run.record["labels"]
    theirs = load_model(run.folder).probabilities(texts)
    np.testing.assert_allclose(run.model.probabilities(texts), theirs, atol=1e-6)


@pytest.mark.slow
def test_a_pooler_that_the_checkpoint_lacks_comes_back(
    tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    model = build_tiny(tmp_path / "model", "bert")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    left = {name: value for name, value in weights.items() if "pooler" not in name}
    save_file(left, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    changes = {"model": model, "representation": "pooler"}
    for kind in ("dpsgd", "dpsgd head"):
        run = finished(tiny_task, kind, tmp_path / kind, **changes)
        last = run.record["history"][-1]["dev"]["dev"]
        score = dev_score(load_model(tmp_path / kind), run)
        assert score["loss"] == pytest.approx(last["loss"], rel=1e-5), kind


@pytest.mark.slow
def test_pairs_are_predicted_as_pairs(tiny_task: dict[str, Any], tmp_path: Path) -> None:
    texts, labels = rows()
    data = {"sentence1": texts, "sentence2": texts[::-1], "label": labels}
    plan = quick_plan("non_private", model=tiny_task["model"])
    run = train(plan, data=data, output=tmp_path, seed=5, threads=1, reporter="silent")
    assert run.model is not None
    first, second = run.model.probabilities([("great", "dull"), ("great", "superb")])
    assert not np.array_equal(first, second)  # random weights: they differ by little


@pytest.mark.slow
def test_an_encoder_in_memory_is_given_again(tiny_task: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_task["model"])
    own = {"encoder": Words(len(tokenizer)), "tokenizer": tokenizer}
    for plan in (quick_plan(), quick_plan(scope="head")):
        run = train(
            plan, data=rows(), output=tmp_path / plan.scope, seed=5, threads=1,
            reporter="silent", **own,
        )  # fmt: skip
        assert run.model is not None
        texts = rows(20, 3)[0]
        theirs = load_model(tmp_path / plan.scope, **own).probabilities(texts)
        np.testing.assert_allclose(run.model.probabilities(texts), theirs, atol=1e-6)
    with pytest.raises(UserError, match="give encoder= and tokenizer= to load_model"):
        load_model(tmp_path / "head")


@pytest.fixture(scope="module")
def folder(tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moments")
    finished(tiny_task, "moments", folder)
    return folder


def test_texts_and_pairs_do_not_mix(folder: Path) -> None:
    with pytest.raises(UserError, match="all of them alike"):
        load_model(folder).predict(["one", ("two", "three")])


def test_a_run_of_another_version_of_the_encoder_is_refused(
    folder: Path, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    wider = build_tiny(tmp_path / "wider", "bert", hidden=48)
    text = (folder / RESULT).read_text().replace(tiny_task["model"], wider)
    (tmp_path / RESULT).write_text(text)
    (tmp_path / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    with pytest.raises(UserError, match=r"do not fit the model at 'head\.weight'"):
        load_model(tmp_path).predict("a great story")


def test_weights_of_another_plan_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text((folder / RESULT).read_text())
    torch_weights = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}
    from safetensors.torch import save_file

    save_file(torch_weights, tmp_path / WEIGHTS, metadata={"plan_hash": "0" * 16})
    with pytest.raises(UserError, match="belongs to plan 0000"):
        load_model(tmp_path)


@pytest.mark.parametrize("where", [0.6, 0.99])
def test_one_wrong_byte_in_the_weights_is_refused(
    folder: Path, tmp_path: Path, where: float
) -> None:
    for name in (RESULT, WEIGHTS):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    flip_byte(tmp_path / WEIGHTS, where)
    with pytest.raises(UserError, match=r"weights\.safetensors is damaged"):
        load_model(tmp_path)


def test_nothing_is_loaded_before_the_first_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Classifier:
        raise AssertionError("an encoder was loaded")

    monkeypatch.setattr("dpfp_ray.training.load_model.build_classifier", refuse)
    assert load_model(folder).labels == ("negative", "positive")
