"""Records that others send: honest ones pass, and each of these changes is told."""

import copy
import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.training.dev_scores import pack, unpack
from tests.support.tiny_runs import tiny_world, write_csv

STUDY = Path(__file__).parents[2] / "benchmarks" / "study"
PLAN = """
seeds: 5
plan: {{train_file: {train}, dev_file: {dev}, model: {model}, batch_size: 8, epochs: 2}}
methods: [non_private:head, dpsgd:head]
epsilon: [3]
"""
CELL, TWIN = "tiny/dpsgd-head_eps3_0", "tiny/dpsgd-head_eps3_1"
Tree = dict[str, Any]
Change = Callable[[Tree], object]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ten records of a tiny study, and its plan."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch, tiny_world(folder) as model:
        patch.syspath_prepend(str(STUDY))
        facts = {
            "train": write_csv(folder / "train.csv", 60),
            "dev": write_csv(folder / "dev.csv", 40, seed=2),
        }
        (folder / "plans").mkdir()
        (folder / "plans" / "tiny.yaml").write_text(PLAN.format(model=model, **facts))
        arguments = ["--plans", str(folder / "plans"), "--records", str(folder / "records")]
        assert importlib.import_module("run").main(arguments) == 0
        shutil.rmtree(folder / "records" / ".locks")
        yield folder


def check(folder: Path, sent: Path, *more: str) -> int:
    module = importlib.import_module("check_records")
    return int(module.main([str(sent), "--plans", str(folder / "plans"), *more]))


def sent_with(honest: Path, place: Path, change: Change) -> Path:
    """The honest records, one of them changed."""
    sent = Path(shutil.copytree(honest / "records", place / "sent"))
    path = sent / CELL / "result.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    return sent


def test_honest_records_pass_and_land_when_run_again(honest: Path) -> None:
    assert check(honest, honest / "records", "--again", "2") == 0


def better(record: Tree) -> None:
    """More right answers, and scores that do not know of them."""
    answers = record["predictions"][0]["dev"]["dev"]
    answers["predicted"] = answers["labels"]


def flipped_labels(record: Tree) -> None:
    for entry in record["predictions"]:
        answers = entry["dev"]["dev"]
        truth = unpack(answers["labels"], answers["rows"], answers["classes"])
        answers["labels"] = pack(1 - truth, answers["classes"])


def weaker_noise(record: Tree) -> None:
    record["privacy"]["noise_multiplier"] /= 2
    record["privacy"]["sigma"] /= 2


def every_epsilon_halved(record: Tree) -> None:
    for facts in (record["privacy"], record["statement"], *record["history"]):
        facts["epsilon"] = {name: value / 2 for name, value in facts["epsilon"].items()}


def larger_budget(record: Tree) -> None:
    record["plan"]["epsilon"] = 30.0


def set_in(*path: Any, value: Any) -> Change:
    def change(record: Tree) -> None:
        place: Any = record
        for key in path[:-1]:
            place = place[key]
        assert place[path[-1]] != value
        place[path[-1]] = value

    return change


TAMPERED: dict[str, Change] = {
    "a better score": set_in("metrics", "accuracy", value=0.99),
    "a better score in the history": set_in("history", -1, "dev", "dev", "accuracy", value=0.99),
    "better recall": set_in("metrics", "recall", value=[1.0, 1.0]),
    "better answers": better,
    "other labels": flipped_labels,
    "other dev rows": set_in("predictions", 0, "dev", "dev", "fingerprint", value="0" * 16),
    "no answers": set_in("predictions", value=[]),
    "half the noise": weaker_noise,
    "half the noise, unsaid": set_in("privacy", "sigma", value=0.01),
    "half of every ε": every_epsilon_halved,
    "half of ε": set_in("privacy", "epsilon", value={"gdp": 1.0, "rdp": 1.0, "pld": 1.0}),
    "a stricter δ": set_in("privacy", "delta", value=1e-9),
    "a stricter δ in the statement": set_in("statement", "delta", value=1e-9),
    "fewer steps": set_in("privacy", "steps", value=1),
    "a smaller p": set_in("privacy", "p", value=0.001),
    "a stronger guarantee": set_in("privacy", "guarantee", value="proved by us"),
    "another promise": set_in("statement", "proved", value={"epsilon": 0.1, "why": "so"}),
    "stronger neighbours": set_in("statement", "adjacency", value="replace_one"),
    "another budget in the plan": larger_budget,
    "more records in the plan": set_in("plan", "records", value=67_349),
    "another learning rate": set_in("plan", "learning_rate", value=0.5),
    "another seed of data": set_in("plan", "max_train", value=50),
    "another plan's hash": set_in("plan_hash", value="0" * 16),
    "the best epoch": set_in("select", value="best"),
    "an unfinished run": set_in("finished", value=False),
    "an epoch left out": lambda record: record["history"].pop(0),
    "no history": lambda record: record["history"].clear(),
    "not a number": set_in("metrics", "accuracy", value=float("nan")),
    "a word for a number": set_in("metrics", "accuracy", value="high"),
    "true for a number": set_in("metrics", "accuracy", value=True),
    "no plan": lambda record: record.pop("plan"),
    "an audit's claim": set_in("audit", value={"verdict": "consistent", "epsilon": 0.1}),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_changed_record_is_refused(honest: Path, tmp_path: Path, name: str) -> None:
    assert check(honest, sent_with(honest, tmp_path, TAMPERED[name])) == 1


def test_a_copy_as_another_seed_is_refused(honest: Path, tmp_path: Path) -> None:
    twin = json.loads((honest / "records" / TWIN / "result.json").read_text())

    def copy_of(record: Tree) -> None:
        record.clear()
        record.update(copy.deepcopy(twin), ledger_entry="another")

    assert check(honest, sent_with(honest, tmp_path, copy_of)) == 1


def test_a_cell_that_no_plan_asks_for_is_refused(honest: Path, tmp_path: Path) -> None:
    sent = Path(shutil.copytree(honest / "records", tmp_path / "sent"))
    (sent / CELL).rename(sent / "tiny" / "dpsgd-head_eps1_0")
    assert check(honest, sent) == 1


@pytest.mark.parametrize("make", ["link", "other file", "broken", "huge"])
def test_what_is_no_record_is_refused(honest: Path, tmp_path: Path, make: str) -> None:
    sent = Path(shutil.copytree(honest / "records", tmp_path / "sent"))
    path = sent / CELL / "result.json"
    if make == "link":
        path.unlink()
        path.symlink_to(honest / "records" / CELL / "result.json")
    elif make == "other file":
        (sent / CELL / "weights.pt").write_bytes(b"x")
    else:
        path.write_text("{" if make == "broken" else path.read_text() + " " * 3_000_000)
    assert check(honest, sent) == 1


def test_made_up_scores_that_fit_each_other_do_not_land(honest: Path, tmp_path: Path) -> None:
    """All is consistent but the answers: only a run again tells."""
    sent = Path(shutil.copytree(honest / "records", tmp_path / "sent"))
    scores = importlib.import_module("dpfp_ray.training.dev_scores")
    for path in sent.glob("*/*/result.json"):
        record = json.loads(path.read_text())
        for entry in record["predictions"]:
            answers = entry["dev"]["dev"]
            truth = unpack(answers["labels"], answers["rows"], answers["classes"])
            answers["predicted"] = pack(truth, answers["classes"])
            best = scores.measure(truth, truth, classes=2)
            epoch = next(e for e in record["history"] if e["epoch"] == entry["epoch"])
            epoch["dev"]["dev"] |= {k: v for k, v in best.items() if v is not None}
        record["metrics"] |= scores.quote(record["history"])
        path.write_text(json.dumps(record))
    assert check(honest, sent) == 0
    assert check(honest, sent, "--again", "1") == 1
