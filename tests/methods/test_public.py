"""Method `public` and heads that start from words: what is known before a record is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from dpfp_ray.data import Split
from dpfp_ray.methods import objpert
from dpfp_ray.methods.parts.label_words import SHARPNESS, head_of_words, phrases_of
from dpfp_ray.methods.parts.one_release import bounded
from dpfp_ray.methods.parts.perturbed_minimum import Objective, linear_head, theta_of, with_bias
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.ledger import open_ledger
from dpfp_ray.privacy.statement import first_line, one_line, statement
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.load_model import load_model
from dpfp_ray.training.train import train
from tests.support.one_release import make_table
from tests.support.tiny_runs import tiny_split

WORDS = ("dull|boring", "great|superb")


def public_plan(tiny_task: dict[str, Any], **changes: Any) -> Plan:
    names = ("train_file", "dev_file", "model")
    return Plan(method="public", **{name: tiny_task[name] for name in names}, **changes)


def words_table(width: int = 6, classes: int = 2) -> RepresentationTable:
    return make_table(4 * classes, width, classes, seed=5)


def with_words(table: RepresentationTable) -> RepresentationTable:
    return replace(table, words=words_table(table.width))


def starting_plan(records: int, **changes: Any) -> Plan:
    plan = Plan(method="objpert", representation="mean", start="words", **changes)
    return plan.bind(records=records, classes=2)


def test_phrases_are_labelled_by_their_class() -> None:
    split = phrases_of(WORDS, ("negative", "positive"))
    assert split.texts == ["dull", "boring", "great", "superb"]
    assert split.labels.tolist() == [0, 0, 1, 1]


def test_class_names_are_the_words_where_none_are_given() -> None:
    assert phrases_of(None, ("sci_tech", "Sports")).texts == ["sci tech", "sports"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("good",), "1 entries for 2 classes"), (("good|", "bad"), "empty phrase in 'good|'")],
)
def test_words_that_fit_no_classes_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("|", r"\|")):
        phrases_of(words, ("negative", "positive"))


def test_the_head_of_words_scores_by_cosines_with_class_means() -> None:
    rng = np.random.default_rng(0)
    u, labels = rng.standard_normal((9, 4)), np.arange(9) % 3
    text = rng.standard_normal(4)
    head = head_of_words(u, labels, 3)
    means = [np.mean([u[i] for i in range(9) if labels[i] == c], axis=0) for c in range(3)]
    cosines = [float(text @ mean) / float(np.linalg.norm(mean)) for mean in means]
    expected = [SHARPNESS * (cosine - np.mean(cosines)) for cosine in cosines]
    assert_allclose(head.weight @ text + head.bias, expected, rtol=1e-12)


def test_no_private_record_has_an_effect(tiny_task: dict[str, Any]) -> None:
    """The strongest neighbours: every text and every label is another one."""
    plan = Plan(method="public", model=tiny_task["model"], label_words=WORDS)
    dev = (tiny_split(20, seed=2).texts, tiny_split(20, seed=2).labels)
    others = [f"{text} again" for text in tiny_split(60, seed=7).texts]
    first, second = (
        train(plan, data=data, dev=dev, seed=1, reporter="silent")
        for data in (
            (tiny_split(60).texts, tiny_split(60).labels),
            (others, 1 - tiny_split(60).labels),
        )
    )
    for name in ("metrics", "statement"):
        assert first.record[name] == second.record[name]
    texts = ["a great film", "a dull film"]
    assert first.model is not None
    assert second.model is not None
    assert [a.probabilities for a in first.model.predict(texts)] == [
        a.probabilities for a in second.model.predict(texts)
    ]


def test_a_ledger_charges_nothing_for_it(tiny_task: dict[str, Any], tmp_path: Path) -> None:
    run = train(public_plan(tiny_task), ledger=tmp_path, reporter="silent", total_epsilon=0.1)
    assert run.record["privacy"]["steps"] == 1
    (spent,) = open_ledger(tmp_path).groups()
    assert (spent.epsilon, spent.guarantee, spent.labels_protected) == (0.0, "proved", True)


def test_its_statement_says_that_nothing_was_read() -> None:
    facts = statement(Plan(method="public").bind(records=100, classes=2), 0.0)
    assert first_line(facts) == one_line(facts) == "proved, ε = 0: no private record was read"


def test_a_finished_run_answers_again(tiny_task: dict[str, Any], tmp_path: Path) -> None:
    run = train(public_plan(tiny_task, label_words=WORDS), output=tmp_path, reporter="silent")
    assert run.model is not None
    kept = load_model(tmp_path).predict(["a great film"])[0]
    assert kept.probabilities == run.model.predict(["a great film"])[0].probabilities


def test_two_texts_a_record_are_refused(tiny_task: dict[str, Any]) -> None:
    split = tiny_split(60)
    plan = Plan(method="public", model=tiny_task["model"])
    data = {"first": split.texts, "second": split.texts, "label": split.labels}
    with pytest.raises(UserError, match="words for the classes say nothing of two texts"):
        train(plan, data=data, text="first", pair="second", reporter="silent")


def test_words_without_a_use_are_refused() -> None:
    with pytest.raises(UserError, match="label_words is given, but start is zero"):
        Plan(method="objpert", label_words=WORDS)
    with pytest.raises(UserError, match="start is words, but rgp does not use it"):
        Plan(method="rgp", start="words")


@pytest.mark.parametrize("classes", [2, 3])
def test_theta_of_gives_the_head_back(classes: int) -> None:
    weight = np.random.default_rng(0).standard_normal((classes, 5))
    weight -= weight.mean(0)
    assert_allclose(linear_head(theta_of(weight))[0], weight, atol=1e-12)


def test_a_start_shifts_the_minimum_of_the_objective_and_nothing_else() -> None:
    """∇J at θ, against the sum that the definition says."""
    rng = np.random.default_rng(0)
    table = make_table(50, classes=2)
    x = with_bias(bounded(table.h, starting_plan(50)))
    theta, theta0, b = (rng.standard_normal((x.shape[1], 1)) for _ in range(3))
    gradient, _ = Objective(x, table.labels, 2, 0.7, b, start=theta0).gradient(theta)
    expected = 0.7 * (theta - theta0) + b
    for row, label in zip(x.astype(np.float64), table.labels, strict=True):
        expected[:, 0] += (1 / (1 + np.exp(-float(row @ theta[:, 0]))) - label) * row
    assert_allclose(gradient, expected, rtol=1e-10)


def test_without_records_the_minimum_is_the_start_and_noise() -> None:
    """At the largest ε that plans take, a head on no rows is θ₀ but for noise of known size."""
    plan = starting_plan(50, epsilon=1000.0)
    empty = with_words(make_table(0))
    sigma = noise_multiplier(plan)
    thetas = [objpert.release(plan, sigma, empty, 2, seed) for seed in range(200)]
    own = objpert.accounted(plan, sigma)
    spread = np.hypot(sigma / own.ridge, own.output_sigma)
    expected = np.asarray(objpert.start(plan, empty, 2))
    assert_allclose(np.mean(thetas, 0), expected, atol=6 * spread / np.sqrt(200))


def test_the_same_records_from_another_start_are_another_release() -> None:
    plan, table = starting_plan(50), with_words(make_table(50))
    moved = replace(table, words=replace(words_table(), key="other words"))
    sigma = noise_multiplier(plan)
    first, second = (objpert.release(plan, sigma, t, 2, 1) for t in (table, moved))
    assert not np.array_equal(first, second)


def test_noise_is_that_of_a_plan_without_a_start() -> None:
    """θ₀ is public: the theorem's constants do not know it."""
    plain = Plan(method="objpert", representation="mean").bind(records=50, classes=2)
    assert noise_multiplier(starting_plan(50)) == noise_multiplier(plain)


def test_dpsgd_starts_from_the_words(tiny_task: dict[str, Any]) -> None:
    """One step at a rate of nearly nothing: the model answers as `public` does."""
    values = {name: tiny_task[name] for name in ("train_file", "dev_file", "model")}
    plan = Plan(
        method="dpsgd", start="words", label_words=WORDS, epochs=1, batch_size=100,
        learning_rate=1e-9, **values,
    )  # fmt: skip
    started = train(plan, reporter="silent", seed=1).model
    words = train(public_plan(tiny_task, label_words=WORDS), reporter="silent").model
    texts = [*tiny_split(12, seed=9).texts]
    assert started is not None
    assert words is not None
    assert [a.label for a in started.predict(texts)] == [a.label for a in words.predict(texts)]


def test_training_rows_are_counted_and_not_encoded(tiny_task: dict[str, Any]) -> None:
    from dpfp_ray.training.prepare import load_inputs

    inputs = load_inputs(public_plan(tiny_task))
    assert inputs.units == 120
    assert isinstance(inputs.records, Split)
    assert len(inputs.data.train) == len(phrases_of(None, inputs.label_names))
