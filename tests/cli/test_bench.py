"""`dpfp bench`: measured where it can be, and said where nobody has."""

import json

import pytest

from dpfp_ray.cli.main import main

TINY = ["--models", "mini", "--precisions", "fp32", "--length", "4", "--seconds", "0"]


@pytest.mark.slow
def test_a_table_of_steps_on_this_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--batches", "2", *TINY, "--json"]) == 0
    plain, dpfp, dpsgd = json.loads(capsys.readouterr().out)
    assert [cell["method"] for cell in (plain, dpfp, dpsgd)] == ["non_private", "dpfp", "dpsgd"]
    assert plain["of_non_private"] == 1
    for cell in (plain, dpfp, dpsgd):
        assert cell["examples_per_second"] == pytest.approx(2 / cell["seconds_per_step"])
        assert cell["peak_memory_bytes"] > 2**27  # 22 million weights, and Adam's numbers


def test_what_no_gpu_has_measured_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda", "--models", "base,large"]) == 0
    head, _, *cells = capsys.readouterr().out.splitlines()
    assert head.startswith("| model | method | precision | B | ms a step")
    assert len(cells) == 2 * 3 * 2 * 2
    assert all("not measured: torch sees no GPU" in cell for cell in cells)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "huge"], "unknown model 'huge'"),
        (["--batches", "32,0"], "--batches 32,0: give whole numbers of 1 or more"),
        (["--device", "tpu"], "device"),
    ],
)
def test_a_mistake_is_a_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    assert words in capsys.readouterr().err
