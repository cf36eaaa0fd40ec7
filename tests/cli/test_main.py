"""The command line as a whole: help, one-line errors, exit codes, closed pipes, quick starts."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dpfp_ray.cli import calibrate
from dpfp_ray.cli.main import VERBS, VerbParser, build_parser, main

CALIBRATE = ["calibrate", "--records", "1000", "--accountant", "gdp", "--epsilon", "3"]


def fails(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Exit code 2, nothing on stdout, and the one line on stderr."""
    try:
        code: Any = main(argv)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    "words",
    [["results", "LONG"], ["statement", "LONG"], ["predict", "LONG", "--text", "x"]],
    ids=lambda words: words[0],
)
def test_a_path_of_5000_characters_is_one_short_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(["a" * 5000 if word == "LONG" else word for word in words], capsys)
    assert "File name too long" in line
    assert len(line) < 1200


def test_the_home_of_nobody_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(["ledger", "show", "--train-file=~no-such-user/x.csv"], capsys)
    assert "a user whom this machine does not know" in line


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "\u202eevil", "\udcff", "a\rb"], ids=ascii)
def test_a_name_with_codes_for_the_terminal_is_one_harmless_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(["train", "--plan", f"gone {name}", "--output", "out"], capsys).removesuffix("\n")
    assert line.isprintable()
    assert ascii(name)[1:-1] in line


def test_a_finished_run_with_damaged_facts_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"plan": {"method": "dpsgd"}, "privacy": {}, "statement": {"guarantee": 3}}
    (tmp_path / "result.json").write_text(json.dumps({**facts, "finished": True, "labels": [1]}))
    assert str(tmp_path) in fails(["statement", str(tmp_path)], capsys)


def sub_parsers() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._subparsers
    assert actions is not None
    parsers: dict[str, VerbParser] = dict(actions._group_actions[0].choices)  # type: ignore[arg-type]
    for parser in parsers.values():
        parser.load()
    return dict(parsers)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_mentions_every_flag(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag for action in sub_parsers()[verb]._actions for flag in action.option_strings]
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help-all" if "--help-all" in flags else "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert {"-h", "--help"} < set(flags)
    assert [flag for flag in flags if flag not in text] == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "VERB"),
        (["fly"], "invalid choice: 'fly'"),
        ([*CALIBRATE, "--epsilom", "3"], "unrecognized arguments: --epsilom 3 (see dpfp calibrate"),
        (["calibrate"], "--records"),
        (["train"], "--output"),
        (["train", "--output", "x", "--seed", "a"], "--seed"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in fails(argv, capsys)


def raises(error: BaseException) -> Any:
    def command(_: argparse.Namespace) -> NoReturn:
        raise error

    return command


def call_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    from dpfp_ray.cli import calibrate

    monkeypatch.setattr(calibrate, "command", raises(error))
    return main(CALIBRATE)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        call_with(ZeroDivisionError(), monkeypatch)


def test_ctrl_c_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_with(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == "dpfp: interrupted\n"


def test_sigterm_exits_with_143_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "command", lambda _: signal.raise_signal(signal.SIGTERM))
    assert main(CALIBRATE) == 143
    assert capsys.readouterr().err == "dpfp: stopped by SIGTERM\n"


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_closed_pipe_is_fine(extra: list[str]) -> None:
    """`dpfp … | head`: no traceback, no complaint of Python's at exit."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dpfp_ray.cli", *CALIBRATE, *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


SLOW = ("torch", "transformers", "ray", "opacus", "datasets", "pandas", "matplotlib", "optuna")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["import dpfp_ray.cli.main", f"import dpfp_ray.cli.main as c; c.main({CALIBRATE})"]
)
def test_what_needs_no_model_loads_no_torch(code: str, tmp_path: Path) -> None:
    """Help, errors and calibration answer at once; torch alone takes seconds to import."""
    ask = f"import sys; print('loaded:', *[name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{ask}"],
        capture_output=True,
        text=True,
        env={**os.environ, "DPFP_CACHE": str(tmp_path)},
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize("verb", ["train", "audit", "sweep", "compare"])
def test_seconds_between_saves_that_are_none_are_one_line(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    work = ["--task", "demo", "--output"]
    if verb == "sweep":
        work = ["search_spaces/demo.yaml", "--storage"]
    words = fails([verb, *work, str(tmp_path), "--save-every", "-1"], capsys)
    assert "save-every is -1.0; give seconds, 0 or more" in words


def flags_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> list[Any]:
    """(verb and verbs below it, flag, its type) of every flag that takes a value."""
    if isinstance(parser, VerbParser):
        parser.load()
    flags: list[Any] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                flags += flags_of(below, (*words, name))
        elif action.nargs != 0:
            flags += [(words, flag, action.type) for flag in action.option_strings]
    return flags


FLAGS = flags_of(build_parser())


@pytest.mark.parametrize(("words", "flag"), [flag[:2] for flag in FLAGS], ids=str)
def test_two_dashes_are_no_value_of_any_flag(
    words: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"argument {flag}: -- is no value" in fails([*words, f"{flag}=--"], capsys)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(
    ("words", "flag"), [(words, flag) for words, flag, kind in FLAGS if kind is float], ids=str
)
def test_a_number_that_is_not_finite_is_refused(
    words: tuple[str, ...], flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{value} is not a finite number" in fails([*words, f"{flag}={value}"], capsys)


@pytest.mark.parametrize("verb", ["train", "compare", "audit"])
def test_help_shows_what_most_people_need_and_help_all_the_rest(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as caught:
            main([verb, flag])
        assert caught.value.code == 0
        texts.append(capsys.readouterr().out)
    short, whole = texts
    assert "--epsilon" in short
    assert "--lora-rank" not in short
    assert all(flag in whole for words, flag, _ in FLAGS if words == (verb,))
    assert short.count("\n  --") < 0.6 * whole.count("\n  --")
