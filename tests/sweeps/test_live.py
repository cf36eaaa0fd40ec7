"""The live table, fed with trials as Tune would."""

import io

import pytest
from rich.console import Console

from dpfp_ray.sweeps import progress as live
from dpfp_ray.sweeps.progress import LiveTable, SealedTable
from tests.support.tune_trial import TuneTrial


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(live, "stderr", Console(file=stream, width=120, highlight=False))
    return stream


def table(total: int = 4, done: int = 0) -> LiveTable:
    return LiveTable("title", total, done, ["learning_rate"])


def test_one_line_a_trial_with_the_right_count(output: io.StringIO) -> None:
    shown = table(total=4, done=1)
    with shown:
        good = TuneTrial(1e-3, accuracy=0.5, epsilon=3.0, nominal=True)
        good.last_result["status"] = "finished"
        shown.on_trial_complete(0, [good], good)
        stopped = TuneTrial(1e-4, accuracy=0.25, epsilon=1.5)
        stopped.last_result["status"] = "running"
        shown.on_trial_complete(0, [stopped], stopped)
        failed = TuneTrial(1e-5, error="no luck")
        failed.last_result["status"] = "failed"
        shown.on_trial_complete(0, [failed], failed)
    assert output.getvalue().splitlines() == [
        "1 of 4 trials are finished already",
        "[2/4]  learning_rate 0.001  done  accuracy 0.5000  ε 3.000†",
        "[3/4]  learning_rate 0.0001  stopped  accuracy 0.2500  ε 1.500",
        "[4/4]  learning_rate 1e-05  failed: no luck",
    ]


def test_table_shows_running_trials_and_the_best() -> None:
    shown = table()
    trials = [
        TuneTrial(1e-3, "TERMINATED", accuracy=0.75, epsilon=3.0, epoch=3),
        TuneTrial(1e-4, "TERMINATED", accuracy=0.5, epsilon=3.0, epoch=3),
        TuneTrial(1e-5, accuracy=0.6, epsilon=1.0, epoch=1),
        TuneTrial(1e-6),
        TuneTrial(1e-7, "PENDING"),
    ]
    for trial, status in zip(trials, ("finished", "finished", "running"), strict=False):
        trial.last_result["status"] = status
    shown.trials, shown.done = trials, 2
    stream = io.StringIO()
    Console(file=stream, width=120).print(shown._table())
    text = stream.getvalue()
    assert "2 of 4 done, 2 running, best 0.7500" in text
    assert "left" in text
    lines = [line for line in text.splitlines() if "│" in line]
    assert ["running" in lines[0], "starts" in lines[1], "0.7500" in lines[2]] == [True] * 3
    assert len(lines) == 4, "pending trials are only counted"


def test_a_selection_shows_neither_trials_nor_their_number(
    output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.sys.stderr, "isatty", lambda: False)
    trials = [TuneTrial(rate, "TERMINATED", accuracy=0.77) for rate in (1e-3, 1e-4)]
    for trial in trials:
        trial.last_result["status"] = "finished"
    shown = SealedTable("title", 7, 3, ["learning_rate"])
    with shown:
        shown.on_trial_complete(0, trials, trials[0])
        shown.on_trial_recover(0, trials, trials[1])
        shown.on_step_end(0, trials)
        Console(file=output, width=120).print(shown._table())
    first, *rest = output.getvalue().splitlines()
    assert first == "selection in progress; only its winner will be shown"
    assert "selection in progress, 0:00 gone" in "".join(rest)
    assert not set("123456789") & set(output.getvalue())


def test_without_a_terminal_a_line_a_minute_says_how_it_stands(
    output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(live, "LINE_EVERY_SECONDS", 0.0)
    trials = [TuneTrial(1e-3), TuneTrial(2e-3, "TERMINATED", accuracy=0.8)]
    for table in (LiveTable, SealedTable):
        with table("mine", 5, 0, []) as shown:
            shown.on_step_end(1, trials)
    first, *_, last = output.getvalue().splitlines()
    assert first.startswith("0 of 5 done, 1 running, best 0.8000, 0:00 gone, about 0:0")
    assert last == "selection in progress, 0:00 gone"  # how many there are is secret


def test_a_trial_s_warning_is_shown_once(output: io.StringIO) -> None:
    with table() as shown:
        trial = TuneTrial(1e-3, accuracy=0.5)
        for _ in range(2):
            shown.on_trial_result(0, [trial], trial, {"warning": "states/x.pt is damaged"})
    assert output.getvalue().splitlines() == ["warning: states/x.pt is damaged"]


def test_a_trial_that_starts_again_is_a_line_with_the_reason(output: io.StringIO) -> None:
    ended_without_need = TuneTrial(1e-4, "ERROR")
    ended_without_need.num_failures = 1
    with table() as shown:
        restarted = TuneTrial(1e-3)
        shown.on_trial_recover(0, [restarted], restarted)
        shown.on_trial_error(0, [ended_without_need], ended_without_need)
    assert output.getvalue().splitlines() == [
        "again:  learning_rate 0.001  the worker died",
        "again:  learning_rate 0.0001  the worker died",
    ]
    assert shown.done == 0
