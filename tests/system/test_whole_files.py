"""Files and folders that are whole or absent, and JSON that every reader accepts."""

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dpfp_ray.plan.values import read_plan_file
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import (
    PRIVATE,
    delete_secret,
    read_json,
    to_json,
    whole_file,
    whole_folder,
    write_json,
    write_text,
)


def strict(text: str) -> Any:
    """A reader that refuses what JSON does not know, as most other languages' do."""

    def refuse(token: str) -> NoReturn:
        raise ValueError(token)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "value", [{"a": [1, 2.5, None, True, "ε"]}, [], "text", 3, {"deep": {"er": [[1], [2]]}}]
)
def test_values_come_back_and_no_scratch_file_stays(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "new" / "folder" / "file.json"
    write_json(path, "old")
    write_json(path, value)
    assert json.loads(path.read_bytes().decode()) == read_json(path) == value
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    ("value", "written"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")]
)
def test_what_json_has_no_number_for_becomes_a_string(value: float, written: str) -> None:
    assert strict(to_json({"epsilon": [{"pld": value}], "pair": (value, 1.0)})) == {
        "epsilon": [{"pld": written}],
        "pair": [written, 1.0],
    }
    assert str(float(written)) == str(value)


@pytest.mark.parametrize(
    ("content", "says"),
    [('{"half": ', r"file\.json is not valid JSON"), (None, r"cannot read .*json: No such file")],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: str | None, says: str
) -> None:
    if content:
        (tmp_path / "file.json").write_text(content)
    with pytest.raises(UserError, match=says):
        read_json(tmp_path / "file.json")


@pytest.mark.parametrize("umask", [0, 0o277])
def test_private_files_do_not_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with whole_file(tmp_path / "folder" / "file", PRIVATE) as file:
            assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600  # from its first byte
        with whole_folder(tmp_path / "folder" / "built", mode=PRIVATE) as built:
            (built / "inside").write_text("x")
    finally:
        os.umask(before)
    modes = {str(p.relative_to(tmp_path)): p.stat().st_mode & 0o777 for p in tmp_path.rglob("*")}
    assert modes == {
        "folder": 0o700,
        "folder/file": 0o600,
        "folder/built": 0o700,
        "folder/built/inside": 0o600,
    }


def test_a_public_file_follows_the_umask(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "")
    (tmp_path / "plain").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "file") as file:
        file.write(b"half" * (1 // 0))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_a_secret_goes_with_what_killed_writes_left_of_it(tmp_path: Path) -> None:
    names = ("seed", "seed.123", ".seed.ab12", "seedling", "other")
    for name in names:
        (tmp_path / name).touch()
    delete_secret(tmp_path / "seed")
    assert {path.name for path in tmp_path.iterdir()} == {"seedling", "other"}
    delete_secret(tmp_path / "no folder" / "seed")


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    with whole_folder(path) as built:
        (built / "file").write_text("x")
        (built.parent / "needed on the way").touch()
        assert not path.exists()
    assert [found.name for found in path.iterdir()] == ["file"]
    assert [found.name for found in path.parent.iterdir()] == ["folder"]


def test_a_block_that_raises_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "folder") as built:
        (built / "file").write_text("half" * (1 // 0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("good", "left"), [(True, "theirs"), (False, "ours")])
def test_the_folder_of_a_faster_process_stays_if_it_is_good(
    tmp_path: Path, good: bool, left: str
) -> None:
    path = tmp_path / "folder"
    with whole_folder(path, keep=lambda _: good) as built:
        (built / "ours").touch()
        path.mkdir()
        (path / "theirs").touch()
    assert [found.name for found in path.iterdir()] == [left]


def test_a_plan_file_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="/dev/zero is larger than 4 MB"):
        read_plan_file("/dev/zero")


@pytest.mark.slow
def test_a_plan_file_of_two_million_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("[" + "1," * 2_000_000 + "]")
    with pytest.raises(UserError, match="holds more than 100,000 values"):
        read_plan_file(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("a: &a [x, x]\nb: [*a, *a]\n", r"has an alias \(\*a\)"),
        ("!!python/object/apply:os.system [id]\n", r"is not valid YAML.*python/object"),
        ("[" * 5_000, "nested too deeply"),
        (f"epsilon: {'1:' * 20_000}1\n", "more than 300 digits"),
        ("epsilon: \0", "is not valid YAML"),
    ],
    ids=["aliases", "tag", "nested", "number", "control"],
)
def test_a_harmful_plan_file_is_refused(tmp_path: Path, plan: str, why: str) -> None:
    (tmp_path / "plan.yaml").write_text(plan)
    with pytest.raises(UserError, match=why):
        read_plan_file(tmp_path / "plan.yaml")
