"""Sentence pairs on a frozen encoder, from a file to a prediction elsewhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray import UserError, audit, load_model
from dpfp_ray.models.export import export_model
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.training.prepare import TaskFacts, choose_representation
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


# `representation: auto` follows the encoder's shape, the task's and the noise; never a record.


MANY, FEW = TaskFacts(200_000, 2, paired=False), TaskFacts(60, 2, paired=False)
PAIRS = TaskFacts(60, 3, paired=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model", "bert", layers=2)


def plan(model: str, method: str = "objpert", **changes: object) -> Plan:
    return Plan(model=model, method=method, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [{"method": "objpert"}, {"mode": "moments"}, {"method": "dpsgd", "scope": "head"}]
)
def test_many_records_afford_all_layers_and_few_do_not(model: str, method: dict[str, str]) -> None:
    asked = Plan(**{"model": model, "method": "dpfp", **method})  # type: ignore[arg-type]
    assert choose_representation(asked, MANY) == "layers"
    assert choose_representation(asked, FEW) == "pooler"  # what the tiny BERT was made for


def test_pairs_on_a_frozen_encoder_are_read_text_by_text(model: str) -> None:
    for method in ("objpert", "dpsgd", "non_private"):
        assert choose_representation(plan(model, method, scope="head"), PAIRS) == "pair"
    assert choose_representation(plan(model, "dpsgd"), PAIRS) == "pooler"  # trained: jointly
    assert choose_representation(plan(model, representation="mean"), PAIRS) == "mean"


def test_a_pair_needs_two_texts(model: str) -> None:
    with pytest.raises(UserError, match="representation pair needs two texts"):
        choose_representation(plan(model, representation="pair"), FEW)


def test_what_needs_a_frozen_encoder_is_refused_without_one() -> None:
    with pytest.raises(UserError, match="layers is read off a frozen encoder, but scope is all"):
        Plan(method="dpsgd", representation="layers")
    with pytest.raises(UserError, match="centring needs a frozen encoder"):
        Plan(method="dpsgd", scope="bias", centring="dev")
    for wrong in ("layers:", "layers:4,3", "layers:a", "layers:1,1"):
        with pytest.raises(UserError, match="in rising order"):
            Plan(method="objpert", representation=wrong)
    with pytest.raises(UserError, match="unknown representation 'layer'"):
        Plan(method="objpert", representation="layer")
