"""`dpfp report`: where it looks, what it writes, what it says."""

import argparse
from pathlib import Path

import pytest

from dpfp_ray.cli import report as verb
from dpfp_ray.results.store import Store
from tests.support.samples import sample


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.command(parser.parse_args(argv))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    one, two = tmp_path / "one", tmp_path / "two"
    Store(one).put(sample("a", method="dpsgd"))
    Store(two).put(sample("b", method="non_private"))
    return str(one), str(two)


@pytest.mark.slow
def test_many_folders_make_one_report(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(*folders, "--output", str(out), "--title", "Ours") == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(out / "index.html")
    assert "no other private method ran beside it" in said.err
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "<title>Ours</title>" in page
    assert "DP-SGD" in page
    assert "Non-DP" in page
    assert f"dpfp report {folders[0]} {folders[1]} --output {out}" in page
