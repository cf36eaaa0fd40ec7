"""A run in pieces is one run, and says of which code."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("pieces")


def test_the_next_piece_has_what_the_one_before_did(
    pieces: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "kept.json")
    for code in ("abc", "abc", "def"):
        monkeypatch.setattr(pieces, "commit", lambda code=code: code)
        kept = pieces.Kept(place, seed=1)
        kept.write(done=[*kept.facts.get("done", []), code])
    assert kept.facts == {"done": ["abc", "abc", "def"]}
    assert kept.words == "0 minutes in 3 pieces, commit abc, def"


def test_pieces_of_another_run_are_refused(pieces: Any, tmp_path: Path) -> None:
    place = str(tmp_path / "kept.json")
    pieces.Kept(place, seed=1).write()
    with pytest.raises(SystemExit, match="of another run"):
        pieces.Kept(place, seed=2)
