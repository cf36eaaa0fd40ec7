"""The card says first what ε is worth, and its numbers are those of the weights beside it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpfp_ray.cli.main import build_parser
from dpfp_ray.cli.options import plan_from
from dpfp_ray.plan.plan import FROM_DATA
from dpfp_ray.reports.model_card import model_card, train_command
from dpfp_ray.results.predict import wilson
from dpfp_ray.training.record import plan_of
from tests.support.finished_runs import KINDS, finished

pytestmark = pytest.mark.slow  # for its fixture


@pytest.fixture(scope="module")
def records(
    tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("runs")
    return {kind: finished(tiny_task, kind, root / kind).record for kind in KINDS}


def parts(card: str) -> tuple[dict[str, Any], list[str]]:
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text.strip().splitlines()


def test_a_refuted_epsilon_is_said_in_the_first_line(records: dict[str, dict[str, Any]]) -> None:
    audit = {"verdict": "refuted", "epsilon": 9.5, "confidence": 0.95}
    record = records["moments"] | {"statement": records["moments"]["statement"] | {"audit": audit}}
    _, lines = parts(model_card(record))
    assert "REFUTED: an audit measured ε ≥ 9.5" in lines[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_is_that_of_the_saved_weights(
    kind: str, records: dict[str, dict[str, Any]]
) -> None:
    front, lines = parts(model_card(records[kind]))
    accuracy = records[kind]["history"][-1]["dev"]["dev"]["accuracy"]
    metric = front["model-index"][0]["results"][0]["metrics"][0]
    assert metric["value"] == round(accuracy, 4)
    low, high = wilson(round(40 * accuracy), 40) or (0, 1)
    assert f"| dev | 40 | {accuracy:.4f} | {low:.4f} to {high:.4f} |" in lines


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_makes_the_same_plan(kind: str, records: dict[str, dict[str, Any]]) -> None:
    import shlex

    plan = plan_of(records[kind])
    again = plan_from(build_parser().parse_args(shlex.split(train_command(plan))[1:]))
    bound = again.bind(**{name: getattr(plan, name) for name in (*FROM_DATA, "representation")})
    # Files and folders are named without where they were.
    fields = ("train_file", "dev_file", "model", "teacher_model", "public_file")
    places = {name: getattr(plan, name) for name in fields}
    assert bound.train_file == Path(str(plan.train_file)).name
    assert replace(bound, **places).hash == records[kind]["plan_hash"]


def test_the_hub_takes_the_front_matter(records: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard(model_card(records["moments"], "mine"))
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.eval_results[0].metric_type == "accuracy"
    assert "privacy-proved" in card.data.tags


def test_what_is_not_protected_is_listed(records: dict[str, dict[str, Any]]) -> None:
    card = model_card(records["dpfp head"])
    assert all(item in card for item in records["dpfp head"]["statement"]["not_protected"])


def test_a_known_seed_is_confessed(records: dict[str, dict[str, Any]]) -> None:
    assert "whoever knows it can take the noise off" in model_card(records["moments"])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("moments", "whether one given record was in the training data is right at most 100 times"),
        ("release_once", "whether one given training record had its text or an empty one is right"),
        ("dpfp", "Do not rely on it to protect anybody"),
        ("non_private", "nothing keeps this model from remembering its training data"),
    ],
)
def test_plain_words_say_what_an_onlooker_can_find_out(
    kind: str, words: str, records: dict[str, dict[str, Any]]
) -> None:
    assert words in model_card(records[kind])


def test_the_share_of_right_guesses_is_that_of_the_theorem(
    records: dict[str, dict[str, Any]],
) -> None:
    """Of two neighbours with a chance of one half each: at most (e^ε + δ) / (1 + e^ε)."""
    facts = records["moments"]["statement"]
    small = facts | {"epsilon": {facts["accountant"]: 1.0}, "delta": 1e-5}
    assert "is right at most 73.2 times in 100" in model_card(
        records["moments"] | {"statement": small}
    )


def test_the_card_names_no_folder_of_this_machine(
    records: dict[str, dict[str, Any]], tiny_task: dict[str, Any]
) -> None:
    for record in records.values():
        assert str(Path(tiny_task["train_file"]).parent) not in model_card(record)


def test_plain_words_speak_of_persons_where_those_are_protected(
    records: dict[str, dict[str, Any]],
) -> None:
    facts = records["moments"]["statement"] | {"unit": "one person, with all of their records"}
    card = model_card(records["moments"] | {"statement": facts})
    assert "no single person shows for certain" in card
    assert "whether one given person's records were in the training data" in card


def test_the_name_of_a_model_is_text_and_no_markup(records: dict[str, dict[str, Any]]) -> None:
    name = "<img src=x onerror=y> [a](http://evil)\n# b"
    front, lines = parts(model_card(records["moments"], name))
    [title] = [line for line in lines if line.startswith("# ")]
    assert title == r"# \<img src=x onerror=y\> \[a\](http://evil) \# b"
    assert front["model-index"][0]["name"] == name
