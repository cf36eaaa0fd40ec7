"""`dpfp predict`: what it reads, what it prints where, and what it refuses."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli.main import main
from dpfp_ray.data.tasks import load_task
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.training.run_folder import RESULT
from tests.cli.test_main import fails
from tests.support.finished_runs import finished


@pytest.fixture(scope="module")
def run(tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    finished(tiny_task, "moments", folder)
    return str(folder)


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_a_text_gets_a_label_and_a_probability(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    label, share, text = printed(["predict", run, "--text", "a great film"], capsys).split("\t")
    assert label in ("negative", "positive")
    assert 0.5 <= float(share) <= 1
    assert text == "a great film\n"
    lines = printed(["predict", run, "--json", "--text=great", "--text=dull"], capsys).splitlines()
    first, second = map(json.loads, lines)
    assert (first["text"], second["text"]) == ("great", "dull")
    assert set(first["probabilities"]) == {"negative", "positive"}


def test_standard_input_is_a_text_a_line(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a great film\n\na dull plot\n"))
    lines = printed(["predict", run, "-", "--batch", "1"], capsys).splitlines()
    assert [line.split("\t")[2] for line in lines] == ["a great film", "a dull plot"]


def test_the_dev_set_scores_as_the_run_did(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    scores = json.loads(printed(["predict", run, "--dev", "--evaluate", "--json"], capsys))
    record = json.loads((Path(run) / RESULT).read_text())
    assert scores["accuracy"] == record["metrics"]["accuracy"]
    low, high = scores["accuracy_interval"]
    assert low < scores["accuracy"] < high


def test_a_file_with_labels_is_answered_and_scored(
    run: str, tiny_task: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", run, tiny_task["dev_file"], "--batch", "7"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 40
    assert "accuracy" in err
    assert "rows: the right class; columns: the answer" in err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("new.csv", 'text\n"a great, clever film"\na dull plot\n'),
        ("new.tsv", "id\tsentence\n1\ta great film\n2\ta dull plot\n"),
        ("new.jsonl", '{"text": "a great film"}\n{"text": "a dull plot"}\n'),
    ],
)
def test_a_file_without_labels_is_answered(
    run: str, tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["predict", run, str(tmp_path / name)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert "accuracy" not in err


def test_a_label_that_the_model_does_not_know_names_its_line(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("text,label\na great film,positive\nodd,purple\n")
    assert "line 3: 'label' is 'purple'" in fails(
        ["predict", run, str(tmp_path / "new.csv")], capsys
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "no such folder"),
        ("records/x", "keeps no weights"),
        (RESULT, "run again with --overwrite, without --no-weights"),
    ],
)
def test_a_folder_without_a_finished_model_says_what_it_is(
    run: str, tmp_path: Path, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    if name:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text((Path(run) / RESULT).read_text())
    assert says in fails(["predict", str(folder), "--text=x"], capsys)


@pytest.fixture
def ledger(tiny_task: dict[str, Any], tmp_path: Path) -> Ledger:
    """One that knows the training file's records."""
    ledger = Ledger(tmp_path)
    ledger.register(load_task(Plan(**tiny_task)).train.all_texts())
    return ledger


def test_exact_scores_of_private_rows_are_warned_of_and_entered(
    run: str,
    tiny_task: dict[str, Any],
    ledger: Ledger,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["predict", run, tiny_task["train_file"], "--evaluate", "--ledger", str(tmp_path)]
    assert main(command) == 0
    assert "are private records of the ledger" in capsys.readouterr().err
    (group,) = ledger.groups()
    assert (group.epsilon, group.guarantee) == (math.inf, "none")
    assert "evaluation of dpfp moments" in group.sentence()


def test_exact_scores_of_private_rows_are_refused_under_a_total_and_others_are_not(
    run: str,
    tiny_task: dict[str, Any],
    ledger: Ledger,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger.set_total(4.0)
    command = ["predict", run, tiny_task["train_file"], "--ledger", str(tmp_path)]
    assert "take their rows out of the file" in fails(command, capsys)
    strangers = tmp_path / "strangers.csv"
    strangers.write_text("text,label\nnobody said this before,positive\nnor this,negative\n")
    printed(["predict", run, str(strangers), "--evaluate", "--ledger", str(tmp_path)], capsys)
    assert not ledger.entries()
