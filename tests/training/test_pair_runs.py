"""Sentence pairs on a frozen encoder, from a file to a prediction elsewhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray import UserError, audit, load_model
from dpfp_ray.models.export import export_model
from dpfp_ray.plan.values import make_plan
from dpfp_ray.training.train import TrainedRun, train
from tests.models.test_export import same
from tests.support.stranger import Stranger
from tests.support.tiny_models import build_tiny
from tests.support.tiny_runs import tiny_split


def write_pairs(path: Path, rows: int, seed: int) -> str:
    """The label says whether both texts are of one class: what a joint mean cannot tell."""
    one, other = tiny_split(rows, seed), tiny_split(rows, seed + 50)
    order = np.random.default_rng(seed).permutation(rows)
    same_class = one.labels == other.labels[order]
    lines = [
        f"{one.texts[i]},{other.texts[order[i]]},{('different', 'same')[int(same_class[i])]}"
        for i in range(rows)
    ]
    path.write_text("\n".join(["text,other,label", *lines, ""]))
    return str(path)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pairs")
    return {
        "train_file": write_pairs(folder / "train.csv", 80, 1),
        "dev_file": write_pairs(folder / "dev.csv", 20, 2),
        "text_column": "text",
        "pair_column": "other",
        "label_column": "label",
        "model": build_tiny(folder / "model", "bert", layers=1, texts=tiny_split(60).texts),
        "epsilon": 8.0,
    }


def run(task: dict[str, Any], folder: Path, **changes: Any) -> TrainedRun:
    plan = make_plan({**task, **changes})
    return train(plan, output=folder, seed=5, threads=1, reporter="silent")


@pytest.mark.slow
def test_a_pair_is_the_default_and_answers_everywhere_alike(
    task: dict[str, Any], tmp_path: Path
) -> None:
    found = run(task, tmp_path / "run", method="objpert", centring="dev")
    assert found.record["plan"]["representation"] == "pair"
    assert found.record["cost"]["trainable_parameters"] == 2 * (4 * 32 + 1)
    model = load_model(tmp_path / "run")
    pairs = [["great film", "dull plot"], ["dull", "great " * 60], ["a", "b"]]
    tuples = [(first, second) for first, second in pairs]
    np.testing.assert_allclose(
        model.probabilities(tuples), found.model.probabilities(tuples), atol=1e-6
    )
    first, turned = model.probabilities([tuples[0], tuples[0][::-1]])
    assert not np.allclose(first, turned)
    export_model(model, tmp_path / "model", lambda _: None)
    with Stranger(tmp_path) as stranger:
        answers = stranger.ask(pairs, tmp_path / "model")
    same(model, answers[str(tmp_path / "model")], tuples)
    with pytest.raises(UserError, match="trained on pairs of texts"):
        model.predict(["one text"])


@pytest.mark.slow
def test_pairs_are_audited_text_by_text(task: dict[str, Any], tmp_path: Path) -> None:
    for family in ("mislabelled", "unused_token"):
        plan = make_plan({**task, "method": "dpfp", "mode": "moments"})
        found = audit(plan, output=tmp_path / family, canaries=20, family=family, threads=1)
        assert found.record["plan"]["representation"] == "pair"
        assert found.outcome != "refuted"
