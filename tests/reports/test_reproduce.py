"""Bundles that somebody else has made to do harm: refused in a line, soon, in little memory."""

import json
import resource
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray import UserError
from dpfp_ray.reports.reproduce import Bundle

LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 13)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)
)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """At most 500 MB more than what is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 500 * 2**20, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


def cell(**changes: Any) -> dict[str, Any]:
    facts = {"cell": "c", "plan_file": "plans/c.yaml", "files": [], "accuracy": [0.5]}
    return facts | changes


def made(path: Path, plan: str = "epsilon: 1\n", cells: Any = None, method: int = 8) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        index = {"format": 1, "cells": [cell()] if cells is None else cells}
        file.writestr("bundle.json", json.dumps(index))
        file.writestr("plans/c.yaml", plan)
    return path


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (LAUGHS, "holds more than 1,000 values"),
        (MERGES, "holds more than 1,000 values"),
        ("- 1\n" * 2_000_000, "too large for a bundle"),
        ("!!python/object/apply:os.system [id]\n", "is not valid YAML.*python/object"),
        ("[" * 5_000, "nested too deeply"),
        (f"epsilon: {'1:' * 20_000}1\n", "more than 300 digits"),
        ("epsilon: \0", "is not valid YAML"),
    ],
    ids=["aliases", "merges", "items", "tag", "nested", "number", "control"],
)
def test_a_harmful_plan_is_refused(tmp_path: Path, plan: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        Bundle(made(tmp_path / "x.zip", plan))


@pytest.mark.parametrize(
    "cells",
    [
        [cell(accuracy=[1e308, -1e308])],
        [cell(accuracy=[])],
        [cell(dev_rows=-5)],
        [cell(dev_rows=1e400)],
        [cell(noise_multiplier="much")],
        [cell(cell="..")],
        [cell(cell="a\0b")],
        {"c": 1},
        5,
    ],
    ids=str,
)
def test_a_harmful_index_is_refused(tmp_path: Path, cells: Any) -> None:
    with pytest.raises(UserError, match="is damaged"):
        Bundle(made(tmp_path / "x.zip", cells=cells))


def test_more_cells_than_anybody_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds 20,000 cells; at most 1,000 are read"):
        Bundle(made(tmp_path / "x.zip", cells=[cell()] * 20_000))


def test_more_files_than_a_bundle_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK\x01\x02" * 60_000)
    with pytest.raises(UserError, match="more than 50,000 files"):
        Bundle(tmp_path / "x.zip")


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="/dev/zero is larger than 64 MB"):
        Bundle("/dev/zero")


def test_damaged_compressed_bytes_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "x.zip")
    content = bytearray(path.read_bytes())
    start = 30 + struct.unpack("<H", content[26:28])[0]  # of the first file's bytes
    content[start : start + 12] = b"\xff" * 12
    path.write_bytes(content)
    with pytest.raises(UserError, match="is no bundle"):
        Bundle(path)


def test_a_compression_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the compression of bundle\.json"):
        Bundle(made(tmp_path / "x.zip", method=zipfile.ZIP_LZMA))


def test_a_nul_in_the_name_of_a_file_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "x.zip", cells=[cell(plan_file="plans/c\0yaml")])
    path.write_bytes(path.read_bytes().replace(b"plans/c.yaml", b"plans/c\0yaml"))
    with pytest.raises(UserError, match="is no bundle"):
        Bundle(path)
