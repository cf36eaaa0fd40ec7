"""`dpfp results`: what it prints, where, and with which exit code."""

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli import results as verb
from dpfp_ray.cli.main import main
from dpfp_ray.results.rows import COLUMNS
from dpfp_ray.results.store import Store
from dpfp_ray.system.errors import UserError
from tests.support.result_records import make_record


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.command(parser.parse_args(argv))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    store = Store(tmp_path)
    store.put(make_record("main-0123456789abcdef-0", accuracy=0.81234))
    store.put(make_record("main-0123456789abcdef-1", accuracy=0.7, method="dpsgd", epsilon=8.0))
    store.put(make_record("main-fedcba9876543210-0", accuracy=0.9, method="non_private"))
    trial = {"id": "t-failed", "status": "failed", "error": "out of memory\nat line 3"}
    store.put({"trial": trial, "plan": {"method": "rgp", "task": "demo", "epsilon": 3.0}})
    return str(tmp_path)


def test_the_table_fits_eighty_columns(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert {"id", "method", "ε", "accuracy"} <= set(lines[0].split())


def test_a_sweeps_table_leaves_out_what_does_not_fit(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Varied fields and the score stay; the others go, the last first."""
    rows, optional = Store(folder).rows(), ("status", "epsilon", "sigma", "train_seconds")
    varied = ["max_physical_batch", "examples_per_second", "noise_coordinates", "prepare_seconds"]
    shown = [*varied, "status", "accuracy", "epsilon", "sigma", "train_seconds"]
    heads = []
    for may_go in (optional, ()):
        verb.show(rows, shown, optional=may_go)
        lines = capsys.readouterr().out.splitlines()
        heads.append(lines[0])
        assert max(map(len, lines)) <= 80 or not may_go
    assert ["train s" in head for head in heads] == [False, True]
    assert "accuracy" in heads[0]


def test_json_is_a_list_of_flat_rows_with_equal_keys(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder, "--json")
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    assert len({tuple(row) for row in rows}) == 1
    assert set(COLUMNS) <= set(rows[0])
    assert not any(isinstance(value, dict | list) for row in rows for value in row.values())


def test_text_in_csv_never_becomes_a_formula(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_record("t1", accuracy=0.5)
    record["trial"]["error"] = '=HYPERLINK("http://evil","x")'
    Store(tmp_path).put(record)
    run(str(tmp_path), "--csv", "--columns", "error")
    [row] = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["error"] == '\'=HYPERLINK("http://evil","x")'


@pytest.mark.parametrize(
    ("flags", "expected"), [((), ""), (("--json",), "[]\n"), (("--csv",), "id,accuracy\n")]
)
def test_no_match_is_no_error(
    folder: str, flags: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--where", "accuracy > 2", "--columns", "id,accuracy", *flags) == 0
    out, err = capsys.readouterr()
    assert out == expected
    assert "no trial matches" in err


@pytest.mark.parametrize(
    "flag",
    [
        "--where=acuracy > 1",
        "--where=print(1)",
        "--where=",
        "--sort=nothing",
        "--columns=id,nothing",
    ]
    + [f"--limit={limit}" for limit in ("0", "-1", "many", "1.5", "²")],
)
def test_a_bad_query_is_refused(folder: str, flag: str) -> None:
    with pytest.raises(UserError):
        run(folder, flag)


def test_broken_records_are_named_on_stderr(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(folder) / "records" / "half.json").write_text("{", encoding="utf-8")
    assert main(["results", folder, "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 4
    assert err.count("\n") == 1
    assert "half.json" in err


@pytest.mark.parametrize("hostile", ["[red]x[/red]", "[/bold]", "\x1b[2Jx", "a\nb", "\u202eevil"])
def test_names_from_data_are_neither_markup_nor_terminal_codes(
    tmp_path: Path, hostile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record: dict[str, Any] = make_record("t1")
    record["plan"]["task"] = hostile
    Store(tmp_path).put(record)
    run(str(tmp_path), "--columns", "id,task,accuracy")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert len(out.splitlines()) == 2
    if hostile.startswith("["):
        assert hostile in out


def test_a_nominal_epsilon_is_marked_and_explained(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder, "--where", "method in ['dpfp', 'dpsgd']")
    out = capsys.readouterr().out
    assert "3†" in out
    assert "8†" not in out
    assert "† nominal ε:" in out
