"""`dpfp submit`: a mistake is one line, before anything is sent (jobs: test_submit_on_ray.py)."""

from types import SimpleNamespace

import pytest

from dpfp_ray.cli.main import main
from dpfp_ray.sweeps.submit import exit_code


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "no command"),
        (["--", "submit"], "cannot be a job"),
        (["--attach", "x", "--", "results", "/r"], "take no command"),
        (["--env", "1=2", "--", "results", "/r"], "--env 1"),
        (["--address", "head:8265", "--", "results", "/r"], "such as http://head:8265"),
        (["--address", "http://a:b@c", "--", "results", "/r"], "holds a password"),
        (["--", "train", "--output", "here"], "a job's own folder goes with it"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.parametrize(
    ("status", "own", "code"),
    [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", None, 1), ("STOPPED", -15, 130)],
)
def test_the_exit_code_follows_the_job(status: str, own: int | None, code: int) -> None:
    assert exit_code(SimpleNamespace(status=status, driver_exit_code=own)) == code
