"""`dpfp check`: what it prints, and its exit code."""

import json
from typing import Any

import pytest

from dpfp_ray.auditing import referee
from dpfp_ray.cli.main import main


def test_a_method_without_a_fault_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dpfp:moments"]) == 0
    shown = capsys.readouterr().out
    assert "a record of norm 1 against" in shown
    assert "dpfp:moments: 4 comparisons, all as declared" in shown


def test_a_fault_is_named_and_gives_another_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(referee, "LARGE", 0.5)  # the check itself then expects another noise
    monkeypatch.setattr(referee, "Engine", half_of_small_noise(referee.Engine))
    assert main(["check", "rgp"]) == 1
    assert "fault: noise at 0.001 against noise at 0.5" in capsys.readouterr().out


def half_of_small_noise(engine: Any) -> Any:
    def build(plan: Any, table: Any, seed: int, noise: float, *rest: Any, **options: Any) -> Any:
        return engine(plan, table, seed, noise / 2 if noise < 0.01 else noise, *rest, **options)

    return build


def test_the_json_has_every_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "opacus", "--grad-sample-mode", "ghost", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"what", "declared", "measured", "fault"} == set(findings[0])
    assert not any(finding["fault"] for finding in findings)


def test_an_unknown_method_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "opacsu"]) == 2
    assert "did you mean 'opacus'?" in capsys.readouterr().err
