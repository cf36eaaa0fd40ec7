"""`dpfp calibrate`: its keys, its table, its refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli.main import main

SST2 = ["--records", "67349", "--batch-size", "32", "--micro-batches", "32", "--epochs", "3"]
SMALL = ["--records", "2000", "--batch-size", "32", "--micro-batches", "8"]


def calibrate(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["calibrate", *argv, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return dict(json.loads(line))


def test_the_table_says_what_the_json_says_of_the_papers_case(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*SST2, "--epsilon", "1.73", "--accountant", "gdp"]
    facts = calibrate(capsys, *flags)
    assert facts["sigma"] == pytest.approx(0.3461, abs=0.001)
    assert facts["epsilon"]["pld"] == pytest.approx(5.900, rel=0.005)
    assert facts["noise_power_ratio"] == pytest.approx((0.3461 / 0.4523) ** 2, abs=0.005)
    assert facts["noise_power_ratio_claimed"] == 1 / 32
    assert main(["calibrate", *flags]) == 0
    text = capsys.readouterr().out
    epsilons = [f"{facts['epsilon'][accountant]:.3f}" for accountant in ("gdp", "rdp", "pld")]
    ratio = f"σ² relative to M = 1: {facts['noise_power_ratio']:.3f}"
    words = [ratio, "the paper's 1/M: 0.031", f"σ = {facts['sigma']:.4f}", "1.730 ← budget"]
    assert [word for word in (*words, *epsilons, "nominal") if word not in text] == []


def test_an_accountant_without_a_bound_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SMALL, "--accountant", "gdp", "--adjacency", "replace_one"]
    assert calibrate(capsys, *flags)["epsilon"]["rdp"] is None
    assert main(["calibrate", *flags]) == 0
    assert "no bound known" in capsys.readouterr().out


@pytest.mark.slow
def test_a_calibration_is_remembered(
    fresh_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpfp_ray.privacy import accounting, calibration

    facts = calibrate(capsys, *SMALL, "--epsilon", "3")
    for module, name in (
        (accounting, "rdp_epsilon"),
        (accounting, "pld_epsilon"),
        (calibration, "_smallest"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("computed again"))
    assert calibrate(capsys, *SMALL, "--epsilon", "3") == facts
