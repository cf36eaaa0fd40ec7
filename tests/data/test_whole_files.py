"""JSON that every reader accepts, in files that are whole or absent."""

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dpfp_ray.data.whole_files import read_json, to_json, write_json
from dpfp_ray.plan.errors import UserError


def strict(text: str) -> Any:
    """A reader that refuses what JSON does not know, as most other languages' do."""

    def refuse(token: str) -> NoReturn:
        raise ValueError(token)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "value", [{"a": [1, 2.5, None, True, "ε"]}, [], "text", 3, {"deep": {"er": [[1], [2]]}}]
)
def test_values_come_back(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "file.json", value)
    assert read_json(tmp_path / "file.json") == value


@pytest.mark.parametrize(
    ("value", "written"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")]
)
def test_what_json_has_no_number_for_becomes_a_string(value: float, written: str) -> None:
    assert strict(to_json({"epsilon": [{"pld": value}], "pair": (value, 1.0)})) == {
        "epsilon": [{"pld": written}],
        "pair": [written, 1.0],
    }
    assert str(float(written)) == str(value)


def test_compact_json_is_one_line() -> None:
    assert "\n" not in to_json({"a": ["x", {"b": 1}]})


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "folder" / "file.json", 1)
    assert read_json(tmp_path / "new" / "folder" / "file.json") == 1


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", "old")
    with pytest.raises(TypeError):
        write_json(tmp_path / "file.json", {"bad": object()})
    assert read_json(tmp_path / "file.json") == "old"


def test_a_kill_before_the_rename_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "file.json", "old")

    def killed(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "file.json", "new")
    assert read_json(tmp_path / "file.json") == "old"


def test_no_scratch_file_stays(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", 1)
    write_json(tmp_path / "file.json", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"half": ')
    with pytest.raises(UserError, match=r"file\.json is not valid JSON"):
        read_json(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*gone\.json: No such file"):
        read_json(tmp_path / "gone.json")
