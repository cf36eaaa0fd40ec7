"""The command line as a whole: help, one-line errors, exit codes, closed pipes, quick starts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("words", ["results LONG", "statement LONG", "predict LONG --text x"])
def test_a_path_of_5000_characters_is_one_short_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(words.replace("LONG", "a" * 5000).split(), capsys)
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


def verb_parsers() -> dict[str, VerbParser]:
    (verbs,) = build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    parsers: dict[str, VerbParser] = dict(verbs.choices)  # type: ignore[arg-type]
    for parser in parsers.values():
        parser.load()
    return parsers


FLAGS = [
    (verb, flag, action)
    for verb, parser in verb_parsers().items()
    for action in parser._actions
    for flag in action.option_strings
]
WITH_VALUES = [(verb, flag) for verb, flag, action in FLAGS if action.nargs != 0]
NUMBERS = [(verb, flag) for verb, flag, action in FLAGS if action.type is float]


def help_of(verb: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([verb, flag])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_mentions_every_flag(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag for name, flag, _ in FLAGS if name == verb]
    text = help_of(verb, "--help-all" if "--help-all" in flags else "--help", capsys)
    assert {"-h", "--help"} < set(flags)
    assert [flag for flag in flags if flag not in text] == []


@pytest.mark.parametrize("verb", ["train", "compare", "audit"])
def test_help_shows_what_most_people_need_and_help_all_the_rest(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = (help_of(verb, flag, capsys) for flag in ("--help", "--help-all"))
    assert "--epsilon" in short
    assert "--lora-rank" not in short
    assert short.count("\n  --") < 0.6 * whole.count("\n  --")


def test_without_a_verb_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "a sweep, a comparison, an audit and a report" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(("verb", "flag"), WITH_VALUES)
def test_two_dashes_are_no_value_of_any_flag(
    verb: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"argument {flag}: -- is no value" in fails([verb, f"{flag}=--"], capsys)


@pytest.mark.parametrize(("verb", "flag"), NUMBERS)
def test_a_number_that_is_not_finite_is_refused(
    verb: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("nan", "inf", "-inf", "1e999"):
        assert f"{value} is not a finite number" in fails([verb, f"{flag}={value}"], capsys)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "command", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(CALIBRATE)


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "dpfp: interrupted\n"),
        (signal.SIGTERM, 143, "dpfp: stopped by SIGTERM\n"),
    ],
)
def test_a_signal_ends_in_a_line_with_its_exit_code(
    number: int,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibrate, "command", lambda _: signal.raise_signal(number))
    assert main(CALIBRATE) == code
    assert capsys.readouterr().err == line


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_closed_pipe_is_fine(extra: list[str]) -> None:
    """`dpfp … | head`: no traceback, no complaint of Python's at exit."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-m", "dpfp_ray.cli", *CALIBRATE, *extra], **pipes)
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
