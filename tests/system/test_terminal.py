"""Tables on stdout: plain at home, and still tables in the log viewer of the Ray dashboard."""

import html
import re
import signal
import threading

import pytest

from dpfp_ray.system import terminal
from dpfp_ray.system.signals import Interrupted, ignoring_signals, signal_of, stopped_by_signals
from dpfp_ray.system.terminal import (
    JOB,
    clock,
    counted,
    print_columns,
    queue_seconds,
    that_fit,
    time_left,
    waiting,
)

COLUMNS = {"method": ["dpfp", "non_private"], "accuracy": ["0.5", "0.75"]}


def test_in_a_job_html_does_not_fold_the_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_columns(COLUMNS, {"accuracy"})
    plain = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\u00a0" not in "".join(plain)
    monkeypatch.setenv(JOB, "{}")
    print_columns(COLUMNS, {"accuracy"})
    folded = re.sub(" +", " ", html.escape(capsys.readouterr().out))
    assert [line.replace("\u00a0", " ") for line in folded.splitlines()] == plain


def test_columns_go_from_the_least_wanted_until_a_table_fits() -> None:
    table = {"method": ["dpfp"], "ε": ["3†"], "speed": ["0.75 ± 0.01"], "σ": ["1.5"]}  # 6+2+11+3
    wanted = ("σ", "speed")
    assert that_fit(table, wanted, 2, 28) == ["method", "ε", "speed", "σ"]
    assert that_fit(table, wanted, 2, 27) == ["method", "ε", "σ"]
    assert that_fit(table, wanted, 2, 14) == ["method", "ε"]
    assert that_fit(table, wanted, 2, 3) == ["method", "ε"]  # what is not optional stays


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute is over at once."""
    monkeypatch.setattr(terminal, "LINE_EVERY_SECONDS", 0.0)


@pytest.mark.parametrize(("total", "of"), [(5, " of 5"), (None, "")])
def test_work_in_parts_says_how_far_it_is(
    no_patience: None, capsys: pytest.CaptureFixture[str], total: int | None, of: str
) -> None:
    parts = [[1, 2, 3], [4, 5]]
    assert list(counted(parts, len, "encoding train", total)) == parts
    said = capsys.readouterr()
    assert said.out == ""
    lines = [f"encoding train: {done}{of} rows, 0:00 gone" for done in (3, 5)]
    assert said.err.splitlines() == lines


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    list(counted([[1, 2]], len, "encoding", 2))
    with waiting("downloading"):
        pass
    assert capsys.readouterr() == ("", "")


def test_work_without_parts_says_that_it_goes_on_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY_SECONDS", 0.001)
    said: list[str] = []
    twice = threading.Event()

    def say(self: terminal.Minute, text: str) -> None:
        said.append(text)
        if len(said) == 2:
            twice.set()

    monkeypatch.setattr(terminal.Minute, "say", say)
    with waiting("downloading"):
        assert twice.wait(60)
    assert set(said) == {"downloading"}


def test_a_failure_ends_the_reminders() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="broken"), waiting("downloading"):
        raise ValueError("broken")
    for thread in threading.enumerate():
        if thread.name.endswith("(remind)"):
            thread.join(60)
    assert threading.active_count() <= before


@pytest.mark.parametrize(("seconds", "shown"), [(5, "0:05"), (65, "1:05"), (3_725, "1:02:05")])
def test_times_are_short(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@pytest.mark.parametrize(
    ("running", "waiting", "each", "left"),
    [
        ([10.0, 30.0], 0, None, 30.0),
        ([10.0, 30.0], 3, 20.0, 50.0),  # ends at 10 → 30 → 50, and 30 → 50
        ([10.0, None], 0, 20.0, 20.0),
        ([10.0, None], 0, None, None),
        ([10.0], 1, None, None),
        ([], 2, 5.0, 10.0),
    ],
)
def test_a_queue_ends_when_its_last_place_does(
    running: list[float | None], waiting: int, each: float | None, left: float | None
) -> None:
    assert queue_seconds(running, waiting, each) == left


def test_time_left_has_its_label_or_is_not_there() -> None:
    assert [time_left(seconds) for seconds in (200, 0.5, None)] == ["time left 3:20", "", ""]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_and_says_which_it_was(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Interrupted) as stop, stopped_by_signals("stopping"):
        signal.raise_signal(number)
    assert stop.value.number == number
    assert capsys.readouterr().err == "stopping\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_clean_up_is_not_interrupted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with ignoring_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_signal_is_known_by_an_error_that_does_not_name_it() -> None:
    with pytest.raises(Interrupted), stopped_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal_of(KeyboardInterrupt()) == signal.SIGTERM
    with stopped_by_signals():
        assert signal_of(KeyboardInterrupt()) == signal.SIGINT
