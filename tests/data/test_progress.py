"""Without a terminal there is a line a minute on stderr; nothing of it is on stdout."""

import threading

import pytest

from dpfp_ray.data import progress
from dpfp_ray.data.progress import clock, counted, waiting


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute is over at once."""
    monkeypatch.setattr(progress, "LINE_EVERY_SECONDS", 0.0)


def test_work_in_parts_says_how_far_it_is(
    no_patience: None, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [[1, 2, 3], [4, 5]]
    assert list(counted(parts, len, "encoding train", 5)) == parts
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "encoding train: 3 of 5 rows, 0:00 gone",
        "encoding train: 5 of 5 rows, 0:00 gone",
    ]


def test_work_of_unknown_length_says_what_is_done(
    no_patience: None, capsys: pytest.CaptureFixture[str]
) -> None:
    list(counted([[1, 2]], len, "predicting"))
    assert capsys.readouterr().err == "predicting: 2 rows, 0:00 gone\n"


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    list(counted([[1, 2]], len, "encoding", 2))
    with waiting("downloading"):
        pass
    assert capsys.readouterr() == ("", "")


def test_work_without_parts_says_that_it_goes_on_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_SECONDS", 0.001)
    said: list[str] = []
    twice = threading.Event()

    def say(self: progress.Minute, text: str) -> None:
        said.append(text)
        if len(said) == 2:
            twice.set()

    monkeypatch.setattr(progress.Minute, "say", say)
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
