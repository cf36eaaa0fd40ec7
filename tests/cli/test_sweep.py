"""`dpfp sweep` as people run it: killed, interrupted, continued; and what it says on the way."""

import json
import os
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli.main import main
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.sweeps import driver
from dpfp_ray.sweeps.trial import SECRET, settle
from dpfp_ray.system.whole_files import without_checksum
from tests.support.ray_runs import (
    ONE_PROCESS_FLAGS,
    Command,
    measured,
    records,
    run_plainly,
    trial,
    wait_for,
    write_space,
)

RATES = [1e-4, 1e-3, 3e-3, 1e-2]
LONG = {"epochs": 5, "batch_size": 4}


def grid(folder: Path, task: dict[str, Any], rates: list[float] = RATES, **keys: Any) -> Path:
    parameters = {"learning_rate": {"values": rates}}
    return write_space(folder / "s.yaml", task, method="grid", parameters=parameters, **keys)


@dataclass
class Story:
    """What a sweep left behind after each of its interruptions."""

    space: Path
    storage: Path
    seed: int = 0
    secret_mode: int = 0
    finished_at_kill: dict[str, Any] = field(default_factory=dict)
    saved_at_kill: list[str] = field(default_factory=list)
    interrupted: tuple[int, str] = (0, "")
    finished_at_interrupt: dict[str, Any] = field(default_factory=dict)
    end: tuple[int, str] = (0, "")
    records: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(
    ray_session: None, tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Story:
    """Killed before Ray has started, killed in the middle of a trial, Ctrl-C, then let go on (in
    this process, on its Ray)."""
    folder = tmp_path_factory.mktemp("killed")
    space = grid(folder, tiny_task, plan=LONG)
    it = Story(space, folder / "runs")
    command = ("sweep", str(space), "--storage", str(it.storage))
    command += (*ONE_PROCESS_FLAGS, "--ledger", str(folder / "ledger"))

    first = Command(*command)
    wait_for(lambda: (it.storage / SECRET).exists(), "the secret seed")
    it.secret_mode = os.stat(it.storage / SECRET).st_mode & 0o777
    it.seed = int(without_checksum((it.storage / SECRET).read_bytes()))
    first.kill()

    kill_in_the_middle(command, it.storage)
    it.finished_at_kill, it.saved_at_kill = finished(it.storage), saved(it.storage)

    third = Command(*command)
    more = len(it.finished_at_kill)
    wait_for(lambda: len(finished(it.storage)) > more, "another trial's end")
    it.interrupted = third.interrupt()
    it.finished_at_interrupt = finished(it.storage)

    with redirect_stderr(StringIO()) as said:
        code = main(command)
    it.end = code, said.getvalue()
    it.records = records(it.storage)
    return it


def kill_in_the_middle(command: tuple[str, ...], storage: Path) -> None:
    """Killed when a trial has ended and another has saved its state; again if that one ended too
    before the kill reached it."""
    for _ in range(2):
        sweep = Command(*command)
        wait_for(lambda: finished(storage) and saved(storage), "a trial's end and a state")
        sweep.kill()
        if saved(storage):
            return
    raise AssertionError("two kills found no trial in its middle")


def finished(storage: Path) -> dict[str, Any]:
    return {k: r for k, r in records(storage).items() if r["trial"]["status"] == "finished"}


def saved(storage: Path) -> list[str]:
    """Trials that have saved their state and have not ended."""
    states = {path.stem for path in storage.glob("states/*.pt") if not path.name.startswith(".")}
    return sorted(states - finished(storage).keys())


def test_finished_trials_are_not_repeated_and_the_running_one_continued(story: Story) -> None:
    assert story.end[0] == 0, story.end[1]
    assert len(story.records) == len(RATES)
    for earlier in (story.finished_at_kill, story.finished_at_interrupt):
        assert earlier
        assert {identity: story.records[identity] for identity in earlier} == earlier
    (identity,) = story.saved_at_kill
    assert story.records[identity]["trial"]["resumed_at_step"] > 0


def test_killed_and_continued_trials_are_charged_once(story: Story) -> None:
    (spent,) = Ledger(story.storage.parent / "ledger").groups()
    assert {entry.status for entry in spent.entries} == {"finished"}
    assert len({entry.run_id for entry in spent.entries}) == len(RATES) < len(spent.entries)
    assert spent.how == "composition of a fixed list"


def test_a_sweep_that_would_pass_the_total_starts_nothing(
    tiny_task: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "connected", lambda *_: pytest.fail("Ray was started"))
    space = grid(tmp_path, tiny_task)
    command = ["sweep", str(space), "--storage", str(tmp_path / "runs"), "--total-epsilon", "9"]
    assert main([*command, "--ledger", str(tmp_path / "ledger")]) == 2
    error = capsys.readouterr().err
    assert f"these {len(RATES)} runs would bring" in error
    assert "above the total of 9" in error
    assert Ledger(tmp_path / "ledger").groups()[0].epsilon == 0


def test_numbers_are_those_of_unbroken_runs(story: Story, tiny_task: dict[str, Any]) -> None:
    trials = [trial(tiny_task, learning_rate=rate, **LONG) for rate in RATES]
    unbroken = run_plainly(trials, story.seed)
    assert unbroken.keys() == story.records.keys()
    for identity, record in unbroken.items():
        assert measured(story.records[identity]) == measured(record)


def test_ctrl_c_says_how_to_go_on(story: Story) -> None:
    code, errors = story.interrupted
    assert code == 130
    assert "The same command continues." in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_one_line_for_each_trial_and_no_noise(story: Story) -> None:
    first, *said = story.end[1].splitlines()
    before = len(story.finished_at_interrupt)
    assert first == f"{before} of {len(RATES)} trials are finished already"
    lines = [line for line in said if line.startswith("[")]  # others where it takes minutes
    assert [line.split()[0] for line in lines] == [
        f"[{number}/{len(RATES)}]" for number in range(before + 1, len(RATES) + 1)
    ]
    assert all("learning_rate" in line and "done  accuracy" in line for line in lines)
    assert any(line.startswith("Train it and keep the model:") for line in said)


def test_finished_sweep_answers_at_once(
    story: Story, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "connected", lambda *_: pytest.fail("Ray was started"))
    assert main(["sweep", str(story.space), "--storage", str(story.storage), "--json"]) == 0
    scores = [row["accuracy"] for row in json.loads(capsys.readouterr().out)]
    assert len(scores) == len(RATES)
    assert scores == sorted(scores, reverse=True)


def test_a_sweep_with_a_failed_trial_says_so_and_exits_with_1(
    tiny_task: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = grid(tmp_path, tiny_task, rates=[1e-3])
    failed = trial(tiny_task, learning_rate=1e-3)
    settle(str(tmp_path / "runs"), failed, "failed", "no luck", {})
    assert main(["sweep", str(space), "--storage", str(tmp_path / "runs")]) == 1
    assert "1 of 1 trials failed" in capsys.readouterr().err
