"""`dpfp demo` ends with what it found and the page to open."""

from pathlib import Path

import pytest

from dpfp_ray.cli.main import main

pytestmark = pytest.mark.nightly


def test_the_demo_ends_with_three_findings_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ray_session: None
) -> None:
    folder = tmp_path / "demo"
    assert main(["demo", "--output", str(folder), "--samples", "3", "--seeds", "1"]) == 0
    last = capsys.readouterr().out.partition("What this demo found")[2]
    assert all(f"\n{number}. " in last for number in (1, 2, 3))
    assert "best of 3 settings" in last
    assert "canaries says ε ≥ " in last
    assert (folder / "report" / "index.html").exists()
    assert (folder / "sweep-report" / "index.html").exists()
