"""`dpfp audit`, as a user types it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpfp_ray.auditing.canaries import FAMILIES
from dpfp_ray.auditing.scores import ACCESS
from dpfp_ray.cli import audit as verb
from dpfp_ray.cli.main import main
from tests.support.tiny_runs import tiny_world, write_csv


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("world")
    with tiny_world(folder) as model:
        train, dev = write_csv(folder / "train.csv", 300), write_csv(folder / "dev.csv", 20, seed=2)
        data = ["--train-file", train, "--dev-file", dev, "--model", model, "--threads", "1"]
        yield [
            "audit", *data, "--canaries", "100", "--delta", "1e-6",
            *("--batch-size", "20", "--epsilon", "1"),
        ]  # fmt: skip


@pytest.mark.slow
def test_json_is_one_object_with_the_verdict(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*common, "--method", "dpfp", "--output", str(tmp_path), "--json"]
    assert main([*command, "--seed", "1", "--membership-seed", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "refuted"
    assert found["epsilon"] > found["stated_epsilon"] == 1.0
    assert (found["canaries"], found["correct"]) == (100, found["guesses"])
    assert found["guarantee"] == "nominal"
    assert json.loads((tmp_path / "result.json").read_text())["audit"] == found
    saved = json.loads((tmp_path / "audit.json").read_text())
    assert saved == saved | found | {"seed": 1, "membership_seed": 2}
    assert main(command) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == found
    assert "already holds this audit" in again.err


@pytest.mark.slow
def test_people_read_guesses_bound_and_verdict(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mode = ["--method", "dpfp", "--mode", "moments", "--output", str(tmp_path)]
    moments = [flag for flag in common if flag not in ("--batch-size", "20")]
    assert main([*moments, *mode]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "guesses right, 100 canaries (mislabelled, white_box: released_moments)" in out
    assert "at 95% confidence" in out
    assert "stated: ε = 1" in out
    assert "outcome: consistent" in out


@pytest.mark.slow
def test_overwrite_starts_again(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--epochs", "0.5", "--json", "--output", str(tmp_path)]
    assert main([*common, *flags, "--seed", "1", "--membership-seed", "1"]) == 0
    first = json.loads((tmp_path / "audit.json").read_text())
    capsys.readouterr()
    assert main([*common, *flags, "--membership-seed", "3"]) == 2
    assert "another membership_seed" in capsys.readouterr().err
    assert main([*common, *flags, "--membership-seed", "3", "--overwrite"]) == 0
    assert json.loads((tmp_path / "audit.json").read_text())["members"] != first["members"]


def test_the_flags_offer_what_there_is() -> None:
    assert verb.FAMILIES == FAMILIES
    assert verb.ACCESS == ACCESS
