"""What an audit began with is read as it was written, or not at all."""

import json
from pathlib import Path

import pytest

from dpfp_ray.audit.begun import AUDIT, keep, read_begun
from dpfp_ray.plan.errors import UserError

FACTS = {"seed": 2**70, "membership_seed": 3, "plan_hash": "x", "settings": {"canaries": 9}}


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_begun(tmp_path) == {}
    keep(tmp_path, FACTS)
    assert FACTS.items() <= read_begun(tmp_path).items()


def test_a_file_of_a_version_without_checksums_is_read(tmp_path: Path) -> None:
    (tmp_path / AUDIT).write_text(json.dumps(FACTS))
    assert read_begun(tmp_path) == FACTS


def test_no_wrong_byte_is_believed(tmp_path: Path) -> None:
    keep(tmp_path, FACTS)
    whole = (tmp_path / AUDIT).read_bytes()
    known = read_begun(tmp_path)
    for place in range(len(whole)):
        (tmp_path / AUDIT).write_bytes(
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        )
        try:
            assert read_begun(tmp_path) == known  # white space
        except UserError:
            continue


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"seed": "x"}', "null"])
def test_what_holds_no_seeds_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / AUDIT).write_text(content)
    with pytest.raises(UserError, match=r"restore it"):
        read_begun(tmp_path)
