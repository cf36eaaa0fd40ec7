"""Whole runs through the command line: killed, interrupted, repeated, and what they leave."""

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from dpfp_ray.cli.main import main
from dpfp_ray.privacy.calibration import Spending
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.lease import PREFIX, Claim
from dpfp_ray.training.dev_scores import DevPredictions
from dpfp_ray.training.prepare import Prepared, prepare
from dpfp_ray.training.record import read_record
from dpfp_ray.training.run_folder import RESULT, RESUME, WEIGHTS, load_state, save_state
from tests.support.tiny_runs import Killed, Listener, run_with, tiny_world, write_csv

SEED = 311_700_000_000_000_000_000_000_000_000_000_000_113  # 128 bits
MINUTE = 60
Values = dict[str, Any]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("world")
    with tiny_world(root):
        write_csv(root / "large.csv", 400)
        write_csv(root / "small.csv", 40)
        yield root


def arguments(world: Path, output: Path, data: str = "small.csv", **changes: Any) -> list[str]:
    settings = {
        "train-file": world / data,
        "text-column": "text",
        "label-column": "label",
        "model": world / "model",
        "representation": "mean",
        "batch-size": 4,
        "micro-batches": 2,
        "epochs": 2,
        "lr": 1e-3,
        "accountant": "gdp",
        "seed": SEED,
        "threads": 1,
        "output": output,
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    if settings.get("method") == "non_private":
        del settings["micro-batches"], settings["accountant"]
    flags = [(f"--{name}", str(value)) for name, value in settings.items() if value is not None]
    return ["train", *(word for flag in flags for word in flag)]


def long_run(world: Path, output: Path, **changes: Any) -> list[str]:
    """Some seconds: about 360 records, 270 steps, an epoch every 45."""
    return arguments(world, output, "large.csv", batch_size=8, epochs=6, **changes)


def start(argv: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dpfp_ray.cli", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(argv: list[str]) -> str:
    """The same command in this process, which has imported all that it needs; what it said."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        assert main(argv) == 0, said.getvalue()
    return said.getvalue()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 5 * MINUTE
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def strict(text: str) -> Any:
    def refuse(token: str) -> NoReturn:
        raise ValueError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


def without_clock(result: dict[str, Any]) -> dict[str, Any]:
    """And without the ledger's name for it: every folder's run has its own."""
    history = [{k: v for k, v in r.items() if k != "train_seconds"} for r in result["history"]]
    own = ("cost", "ledger_entry")
    return {k: v for k, v in result.items() if k not in own} | {"history": history}


# Real processes, really killed -------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(world: Path) -> Path:
    folder = world / "unbroken"
    finish(long_run(world, folder))
    return folder


def assert_same_end(folder: Path, unbroken: Path) -> None:
    mine, theirs = (strict((f / RESULT).read_text()) for f in (folder, unbroken))
    assert without_clock(mine) == without_clock(theirs)
    assert (folder / WEIGHTS).read_bytes() == (unbroken / WEIGHTS).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == [RESULT, WEIGHTS]


@pytest.mark.slow
def test_a_killed_process_ends_with_the_same_weights(
    world: Path, unbroken: Path, tmp_path: Path
) -> None:
    process = start(long_run(world, tmp_path))
    wait_for(tmp_path / RESUME, process)
    delay = random.uniform(0, 0.5)
    time.sleep(delay)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, f"finished within {delay} s"
    assert not (tmp_path / RESULT).exists()

    err = finish(long_run(world, tmp_path))
    assert "continuing after step" in err
    assert_same_end(tmp_path, unbroken)


@pytest.mark.slow
def test_an_interrupted_process_saves_itself_and_goes_on_without_its_seed_given(
    world: Path, unbroken: Path, tmp_path: Path
) -> None:
    process = start(long_run(world, tmp_path))
    wait_for(tmp_path / RESUME, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=5 * MINUTE)
    assert process.returncode == 130
    assert out == ""
    assert "stopped; saved in" in err
    assert stat.S_IMODE((tmp_path / RESUME).stat().st_mode) == 0o600
    state = torch.load(tmp_path / RESUME, weights_only=True)
    assert 45 <= state["progress"]["step"] < 270
    assert state["seed"] == SEED

    err = finish(long_run(world, tmp_path, seed=None))
    assert f"continuing after step {state['progress']['step']} of 270" in err
    assert_same_end(tmp_path, unbroken)


@pytest.mark.slow
def test_no_seed_is_left_in_the_folder(unbroken: Path) -> None:
    length = (SEED.bit_length() + 7) // 8
    forms = [str(SEED).encode(), hex(SEED)[2:].encode(), SEED.to_bytes(length, "little")]
    forms.append(SEED.to_bytes(length, "big"))
    contents = [path.read_bytes() for path in unbroken.rglob("*") if path.is_file()]
    assert len(contents) == 2
    assert not [form for form in forms for content in contents if form in content]


# Results -----------------------------------------------------------------------------------------


@pytest.fixture
def do(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Values]:
    """Train, as a command in this process; what it printed."""

    def train(*flags: str, output: Path = tmp_path, **changes: Any) -> Values:
        capsys.readouterr()
        assert main([*arguments(world, output, **changes), *flags, "--json"]) == 0
        result: Values = strict(capsys.readouterr().out)
        return result

    return train


@pytest.fixture
def refused(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The last line that a refused command says."""

    def train(*flags: str, **changes: Any) -> str:
        capsys.readouterr()
        assert main([*arguments(world, tmp_path, **changes), *flags]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    return train


@pytest.fixture
def finished(do: Callable[..., Values]) -> Values:
    return do()


def result_in(folder: Path) -> Any:
    return strict((folder / RESULT).read_text())


def test_what_is_printed_is_what_is_written_and_what_is_read(
    finished: Values, tmp_path: Path
) -> None:
    """To the letter, keys in their order: nothing is another record for having been read."""
    assert result_in(tmp_path) == finished
    assert json.dumps(read_record((tmp_path / RESULT).read_bytes())) == json.dumps(finished)


def test_what_a_process_killed_after_its_result_left_is_removed(
    do: Callable[..., Values], tmp_path: Path, finished: Values
) -> None:
    ended = replace(Claim.mine(), started="0")  # a process of this number, long ago
    (tmp_path / f"{PREFIX}000001").write_text(json.dumps(asdict(ended)))
    assert do() == finished
    assert {path.name for path in tmp_path.iterdir()} == {RESULT, WEIGHTS}


def test_a_result_holds_plan_history_privacy_and_cost(finished: Values) -> None:
    assert finished["finished"] is True
    assert finished["plan"]["batch_size"] == 4
    assert [record["epoch"] for record in finished["history"]] == [1, 2]
    for record in finished["history"]:
        assert {"accuracy", "loss", "f1", "recall"} <= record["dev"]["dev"].keys()
        assert record["epsilon"].keys() == {"gdp", "rdp", "pld"}
        assert record["train_loss"] is None  # private, and nobody asked for it
    privacy, cost = finished["privacy"], finished["cost"]
    assert 2.9 < privacy["epsilon"]["gdp"] <= 3 * (1 + 1e-9)
    assert privacy["epsilon"].keys() == {"gdp", "rdp", "pld"}
    assert privacy["guarantee"] == "nominal"
    records = finished["plan"]["records"]  # of 40; the others were held out
    steps = 2 * records // 4
    assert (privacy["steps"], privacy["draws"]) == (steps, 2 * steps)
    assert privacy["p"] == 4 / (2 * records)
    assert privacy["delta"] == 1 / (2 * records)
    assert privacy["noise_coordinates"] == 32
    assert min(cost["prepare_seconds"], cost["train_seconds"], cost["eval_seconds"]) > 0
    assert cost["examples_per_second"] > 1
    assert cost["peak_memory_bytes"] > 50 * 2**20
    assert cost["parameters"] == cost["trainable_parameters"] > 10_000
    assert finished["dev_records"] == {"dev": 40 - records}
    assert finished["labels"] == ["negative", "positive"]


def test_the_answers_behind_the_quoted_score_are_kept(finished: Values) -> None:
    kept = finished["predictions"][0]
    assert kept["epoch"] == finished["metrics"]["epoch"]
    answers = DevPredictions(**kept["dev"]["dev"])
    assert answers.rows == finished["dev_records"]["dev"]
    assert (answers.classes, len(answers.fingerprint)) == (2, 16)
    assert (answers.answers() == answers.truth()).mean() == finished["metrics"]["accuracy"]
    assert all("predicted" not in epoch["dev"]["dev"] for epoch in finished["history"])


def test_saved_weights_carry_their_plan(finished: Values, tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(tmp_path / WEIGHTS, framework="pt") as file:
        assert file.metadata()["plan_hash"] == finished["plan_hash"]
        assert {"head.weight", "head.bias"} < set(file.keys())


def test_runs_without_a_given_seed_differ(do: Callable[..., Values], tmp_path: Path) -> None:
    for name in ("one", "other"):
        do(output=tmp_path / name, seed=None)
    one, other = ((tmp_path / name / WEIGHTS).read_bytes() for name in ("one", "other"))
    assert one != other


# The same folder again ---------------------------------------------------------------------------


def test_overwrite_repeats_it(do: Callable[..., Values], finished: Values, tmp_path: Path) -> None:
    before = (tmp_path / WEIGHTS).read_bytes()
    assert do("--overwrite", seed=5)["plan_hash"] == finished["plan_hash"]
    assert (tmp_path / WEIGHTS).read_bytes() != before


def test_another_plan_in_the_folder_is_refused(
    refused: Callable[..., str], finished: Values, tmp_path: Path
) -> None:
    error = refused(epochs=3)
    assert error.startswith("dpfp: ")
    assert "holds the result of another plan" in error
    assert result_in(tmp_path) == finished


def test_changed_data_are_not_taken_for_the_old(
    world: Path, refused: Callable[..., str], finished: Values, tmp_path: Path
) -> None:
    file = world / "small.csv"
    times = os.stat(file)
    later = os.stat(tmp_path / RESULT).st_mtime + 5
    os.utime(file, (later, later))
    try:
        assert f"{file} has changed since" in refused()
    finally:
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_an_audit_is_not_taken_for_a_run(
    refused: Callable[..., str], finished: Values, tmp_path: Path
) -> None:
    (tmp_path / RESULT).write_text(json.dumps({**finished, "audit": {"verdict": "refuted"}}))
    assert "holds an audit" in refused()


def test_overwrite_keeps_the_old_result_when_the_new_plan_cannot_start(
    refused: Callable[..., str], finished: Values, tmp_path: Path
) -> None:
    refused("--overwrite", label_column="missing")
    assert result_in(tmp_path) == finished


@pytest.fixture
def prepared(world: Path, tmp_path: Path) -> Prepared:
    from dpfp_ray.cli.main import build_parser
    from dpfp_ray.cli.options import plan_from

    return prepare(plan_from(build_parser().parse_args(arguments(world, tmp_path))))


@pytest.fixture
def unfinished(prepared: Prepared, tmp_path: Path) -> Path:
    """A folder in which a run was killed after seven steps."""
    victim = Listener(7)
    with pytest.raises(Killed):
        run_with(prepared, victim, seed=SEED)
    save_state(tmp_path, victim.state(), SEED)
    return tmp_path


def test_an_unfinished_run_of_another_plan_is_refused(
    refused: Callable[..., str], unfinished: Path
) -> None:
    assert "unfinished run of another plan" in refused(epochs=3)
    assert (unfinished / RESUME).exists()


def test_an_unfinished_run_with_another_seed_is_refused(
    refused: Callable[..., str], unfinished: Path
) -> None:
    error = refused(seed=5)
    assert "another seed" in error
    assert str(SEED) not in error


def test_the_end_removes_the_scratch_file_of_a_killed_save(
    do: Callable[..., Values], unfinished: Path
) -> None:
    (unfinished / f"{RESUME}.12345").write_text(str(SEED))  # as version 0.1 named it
    (unfinished / f".{RESUME}.ab12").write_text(str(SEED))
    do()
    assert sorted(path.name for path in unfinished.iterdir()) == [RESULT, WEIGHTS]


def test_a_run_killed_right_after_its_result_forgets_its_seed_next_time(
    do: Callable[..., Values], unfinished: Path
) -> None:
    state = (unfinished / RESUME).read_bytes()
    do()
    (unfinished / RESUME).write_bytes(state)
    do()
    assert not (unfinished / RESUME).exists()


def test_a_failed_save_keeps_the_previous_one(
    unfinished: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> NoReturn:
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*resume\.pt: No space"):
        save_state(unfinished, {}, SEED)
    state = load_state(unfinished, prepared.plan)
    assert state is not None
    assert state["progress"]["step"] == 7


def test_a_resumed_run_keeps_the_noise_it_began_with(unfinished: Path, prepared: Prepared) -> None:
    """Should calibration give another σ by now, ε is still that of the noise really added."""
    state = load_state(unfinished, prepared.plan)
    other = replace(prepared, noise_multiplier=2 * prepared.noise_multiplier)
    record, _ = run_with(other, seed=SEED, state=state)
    assert record["privacy"]["noise_multiplier"] == prepared.noise_multiplier
    spent = Spending(prepared.plan, prepared.noise_multiplier).spent(prepared.plan.steps)
    assert record["privacy"]["epsilon"] == spent
