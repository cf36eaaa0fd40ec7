"""`dpfp submit`: commands are checked before they travel, and described for the Jobs page."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpfp_ray.cli.submit import describe, variables
from dpfp_ray.sweeps.space import SPACES
from dpfp_ray.sweeps.submit import exit_code
from dpfp_ray.system.errors import UserError


@pytest.mark.parametrize(
    ("status", "own", "code"),
    [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", None, 1), ("STOPPED", -15, 130)],
)
def test_the_exit_code_follows_the_job(status: str, own: int | None, code: int) -> None:
    assert exit_code(SimpleNamespace(status=status, driver_exit_code=own)) == code


DEMO = str(SPACES / "demo.yaml")


def facts(verb: str, *values: str) -> dict[str, str]:
    names = ("sweep", "task", "methods", "epsilon")
    shown = {"verb": verb} | dict(zip(names, values, strict=True))
    return {name: value for name, value in shown.items() if value}


def test_a_job_is_described_by_what_it_runs() -> None:
    swept = describe(["sweep", DEMO, "--storage", "/shared/runs", "--set", "epsilon=1"])
    assert swept.name == "sweep demo"
    assert swept.facts == facts("sweep", "demo", "demo", "dpfp", "1")
    words = ["compare", "--task", "sst2", "--methods", "dpfp,rgp", "--epsilon", "3,8"]
    compared = describe([*words, "--output", "s3://bucket/night"])
    assert compared.name == "compare sst2"
    assert compared.facts == facts("compare", "night", "sst2", "dpfp,rgp", "3,8")
    words = ["train", "--train-file", "my.csv", "--method", "dpsgd", "--output", "/shared/one"]
    trained = describe(words)
    assert trained.facts == facts("train", "", "custom", "dpsgd", "3")
    assert trained.files == ("my.csv",)


def test_a_misspelt_flag_shows_before_it_travels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        describe(["sweep", DEMO, "--storage", "/r", "--sampels", "3"])
    assert caught.value.code == 2
    assert "--sampels" in capsys.readouterr().err


def test_variables_are_given_or_copied() -> None:
    here: dict[str, Any] = {"HF_TOKEN": "secret"}
    expected = {"A": "1=2", "HF_TOKEN": "secret", "B": ""}
    assert variables(["A=1=2", "HF_TOKEN", "B="], here) == expected


@pytest.mark.parametrize("text", ["=x", "1A=2", "A B=1", "MISSING"])
def test_a_variable_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--env"):
        variables([text], {})


def test_a_relative_space_is_read_from_here(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "mine.yaml").write_text(Path(DEMO).read_text())
    monkeypatch.chdir(tmp_path)
    assert describe(["sweep", "mine.yaml", "--storage", "/r"]).facts["task"] == "demo"
