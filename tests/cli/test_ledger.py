"""`dpfp ledger`: what was spent, the total, and what it writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli.main import main
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_entries import use_of

PLAN = Plan(method="dpsgd", task="sst2", epsilon=2.0, records=1000, delta=1e-5, batch_size=100)


def spend(place: Path, texts: Sequence[str], *runs: str, plan: Plan = PLAN) -> str:
    ledger = Ledger(place)
    people = ledger.register(list(texts)).id
    for run in runs:
        entry = ledger.begin(use_of(plan, 1.5, people=people, run=run))
        ledger.end(entry.id, plan.steps)
    return people


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(["ledger", "show", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def test_show_is_one_object_of_the_environments_ledger(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spend(place, ["a", "b"], "one", "two")
    monkeypatch.setenv("DPFP_LEDGER", str(place))
    found = shown(capsys)
    assert found["epsilon"] == pytest.approx(Ledger(place).groups()[0].epsilon)
    assert (found["guarantee"], found["total"], len(found["entries"])) == ("proved", None, 2)
    assert found["delta"] == 1e-5


def test_of_several_groups_the_one_that_paid_most_is_shown(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    little = spend(place, ["x"], "one")
    spend(place, ["a", "b"], "two", "three")
    found = shown(capsys, "--ledger", str(place))
    assert len(found["entries"]) == 2
    assert [group["uses"] for group in found["groups"]] == [1, 2]
    assert len(shown(capsys, "--ledger", str(place), "--people", little)["entries"]) == 1


def test_people_are_found_by_their_records(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spend(place, [f"good film {n}" for n in range(40)], "one")
    spend(place, ["x"], "two", "three")
    file = tmp_path / "some.csv"
    rows = [f"good film {n},{'no' if n % 2 else 'yes'}" for n in range(20)]
    file.write_text("\n".join(["text,label", *rows, ""]))
    found = shown(capsys, "--ledger", str(place), "--train-file", str(file))
    assert len(found["entries"]) == 1


def test_a_total_is_set_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ledger", "set", "--ledger", str(place), "--epsilon"]
    assert main([*words, "8"]) == 0
    assert main([*words, "8"]) == 0
    assert main([*words, "9"]) == 2
    assert "force" in capsys.readouterr().err
    assert main([*words, "9", "--force"]) == 0
    assert shown(capsys, "--ledger", str(place))["total"] == 9


def test_the_table_ends_with_the_sum(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spend(place, ["a"], "one", "two")
    assert main(["ledger", "show", "--ledger", str(place)]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert "dpsgd" in lines[1]
    assert f"costs ε = {Ledger(place).groups()[0].shown}: had this been" in lines[-1]


@pytest.mark.slow
def test_export_writes_table_json_and_figure(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spend(place, ["a"], "one", "two")
    Ledger(place).set_total(50.0, 1e-5)
    out = tmp_path / "out"
    assert main(["ledger", "export", "--ledger", str(place), "--output", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {f"ledger.{end}" for end in ("json", "csv", "md", "svg", "png")}
    assert json.loads((out / "ledger.json").read_text())["total"] == 50
    assert b"total" in (out / "ledger.svg").read_bytes()


def test_unknown_people_are_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spend(place, ["a"], "one")
    assert main(["ledger", "show", "--ledger", str(place), "--people", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
