"""`from dpfp_ray import …`: a notebook in ten lines, against the command line."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

import dpfp_ray
from dpfp_ray import (
    Plan,
    UserError,
    calibrate,
    compare,
    ledger,
    load_results,
    sweep,
    train,
)
from dpfp_ray.cli.main import main
from dpfp_ray.plan.values import make_plan
from dpfp_ray.system.signals import Interrupted
from dpfp_ray.training import console
from dpfp_ray.training.console import Silent
from dpfp_ray.training.loop import Epoch, Event
from dpfp_ray.training.run_folder import RESULT, RESUME, SEED, WEIGHTS


@pytest.fixture
def plan(tiny_task: dict[str, Any]) -> Plan:
    return make_plan(tiny_task)


@pytest.fixture(scope="module")
def from_command_line(tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in tiny_task.items()]
    assert main(["train", *flags, "--seed=5", "--threads=1", "--output", str(folder)]) == 0
    return folder


class Stopping(Silent):
    """Gets a Ctrl-C after the first epoch."""

    def show(self, event: Event) -> None:
        if isinstance(event, Epoch):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_an_interrupted_and_continued_call_ends_as_the_command_does(
    plan: Plan, from_command_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(console.DISPLAYS, "silent", Stopping)
        with pytest.raises(Interrupted, match="stopped; saved in"):
            train(plan, output=tmp_path, seed=5, threads=1, reporter="silent")
    assert {path.name for path in tmp_path.iterdir()} == {RESUME, SEED}
    run = train(plan, output=tmp_path, threads=1, reporter="silent")
    assert (tmp_path / WEIGHTS).read_bytes() == (from_command_line / WEIGHTS).read_bytes()
    theirs = json.loads((from_command_line / RESULT).read_text())
    assert run.record["metrics"] == theirs["metrics"]
    assert run.record["statement"] == theirs["statement"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [RESULT, WEIGHTS]


def test_a_finished_result_is_found_again(plan: Plan, from_command_line: Path) -> None:
    run = train(plan, output=from_command_line, threads=1, reporter="silent")
    assert run.model is None
    assert run.record == json.loads((from_command_line / RESULT).read_text())
    assert run.epsilon == pytest.approx(8, abs=0.01)
    assert run.statement.startswith("privacy: NOMINAL")
    assert repr(run).startswith(f"<dpfp on custom: accuracy {run.accuracy:.4f}, ε = ")


def test_without_output_nothing_is_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(plan, seed=5, threads=1, reporter="silent")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    assert run.folder is None
    assert run.model is not None
    assert 0 <= run.accuracy <= 1


@pytest.mark.parametrize("reporter", ["auto", "notebook"])
def test_without_a_terminal_and_in_a_notebook_progress_is_lines_on_stderr(
    plan: Plan, capsys: pytest.CaptureFixture[str], reporter: str
) -> None:
    train(plan, seed=5, threads=1, reporter=reporter)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split()[:3] for line in err.splitlines()] == [
        ["from", "the", "data:"],
        ["†", "the", "ε"],  # a nominal method says so before it trains
        ["dpfp", "epoch", "1"],
        ["dpfp", "epoch", "2"],
    ]


def test_an_unknown_reporter_is_refused(plan: Plan) -> None:
    with pytest.raises(UserError, match="did you mean 'silent'"):
        train(plan, reporter="silnt")


def test_calibrate_needs_the_number_of_records() -> None:
    with pytest.raises(UserError, match="give records"):
        calibrate(Plan())


def test_results_are_a_typed_table(from_command_line: Path) -> None:
    frame = load_results(from_command_line)
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame.query("method == 'dpfp' and epsilon <= 8")) == 1
    assert str(frame["steps"].dtype) == "Int64"
    assert str(frame["audit_epsilon"].dtype) == "float64"


def test_a_place_within_another_counts_once(from_command_line: Path) -> None:
    assert len(load_results(from_command_line, from_command_line)) == 1


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


def test_the_ledger_is_the_one_that_the_command_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "ledger"
    total = ledger(place).set_total(8)
    book = ledger(place)
    assert book.to_json() == printed(["ledger", "show", "--json", "--ledger", str(place)], capsys)
    assert (book.spent, book.total) == (None, total)
    with pytest.raises(UserError, match="has no entries"):
        book.write(tmp_path / "out")


def test_a_report_is_a_page_with_its_files(from_command_line: Path, tmp_path: Path) -> None:
    made = dpfp_ray.report(from_command_line, output=tmp_path / "page", title="Ours")
    assert "<title>Ours</title>" in made.index.read_text(encoding="utf-8")
    assert all((tmp_path / "page" / name).exists() for name in made.files)


def test_an_audit_is_a_run_with_a_bound(plan: Plan, tmp_path: Path) -> None:
    audited = dpfp_ray.audit(
        plan, output=tmp_path, canaries=20, seed=1, membership_seed=2, threads=1, reporter="silent"
    )
    assert audited.outcome == audited.record["audit"]["verdict"]
    assert audited.epsilon_at_least >= 0
    assert repr(audited).startswith("<audit of dpfp on custom: ε ≥ ")


@pytest.mark.parametrize("verb", [sweep, compare])
def test_an_encoder_in_memory_cannot_go_to_other_machines(verb: Any, tmp_path: Path) -> None:
    where = {"space": "x.yaml"} if verb is sweep else {"output": tmp_path / "out"}
    with pytest.raises(UserError, match="save it to a folder"):
        verb(**where, encoder=object())


def test_an_unknown_keyword_of_a_comparison_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'epochs'"):
        compare(output=tmp_path / "out", epoch=3)


def imported_by(code: str) -> set[str]:
    ask = f"{code}\nimport sys; print('\\n', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "ray", "pandas", "scipy", "rich", "transformers", "dp_accounting"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not imported_by("import dpfp_ray") & {*HEAVY, "numpy"}


def test_every_name_of_the_front_door_is_there() -> None:
    assert [name for name in dpfp_ray.__all__ if not hasattr(dpfp_ray, name)] == []
    assert set(dpfp_ray.__all__) <= set(dir(dpfp_ray))


def test_the_types_are_shipped() -> None:
    assert (Path(dpfp_ray.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    "verb",
    ["", "train", "sweep", "compare", "calibrate", "serve", "predict", "ledger", "statement"],
)
def test_help_imports_only_the_verb_that_was_asked_for(verb: str) -> None:
    words = [verb, "--help"] if verb else ["--help"]
    code = f"from dpfp_ray.cli.main import main\ntry: main({words})\nexcept SystemExit: pass"
    found = imported_by(code)
    assert not found & (HEAVY if verb else {*HEAVY, "numpy"})
    verbs = {f"dpfp_ray.cli.{name}" for name in dpfp_ray.cli.main.VERBS}
    assert found & verbs == ({f"dpfp_ray.cli.{verb}"} if verb else set())
