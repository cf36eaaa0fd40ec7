import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray.data import demo
from dpfp_ray.data.tasks import load_task
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def archive() -> Path:
    """Downloaded once into the machine's own cache, so that most runs need no network."""
    try:
        return demo.demo_archive()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path))
    return tmp_path


def pip_that(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    """Replace pip by one that writes `content`, or fails if there is none."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")
        Path(command[command.index("--dest") + 1], demo.SDIST).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


def test_rows_and_their_signs(archive: Path) -> None:
    texts, labels = demo.demo_rows()
    assert len(texts) == 10_568
    assert np.bincount(labels).tolist() == [5_326, 5_242]
    assert labels[texts.index("Effective but too tepid biopic")] == 0


def test_task_splits_are_disjoint_and_complete(archive: Path) -> None:
    task = load_task(Plan(task="demo"))
    assert task.label_names == ("negative", "positive")
    assert len(task.train) == 9_568
    assert len(task.dev["dev"]) == 1_000
    assert not set(task.train.texts) & set(task.dev["dev"].texts)


def test_download_lands_in_the_cache_and_leaves_nothing_else(
    archive: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, archive.read_bytes())
    assert demo.demo_archive() == cache / "demo" / demo.SDIST
    assert [path.name for path in (cache / "demo").iterdir()] == [demo.SDIST]


def test_cached_file_is_not_downloaded_again(
    archive: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "demo").mkdir()
    shutil.copy(archive, cache / "demo")
    pip_that(monkeypatch, None)
    assert len(demo.demo_rows()[0]) == 10_568


def test_damaged_cached_file_is_replaced(
    archive: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "demo").mkdir()
    (cache / "demo" / demo.SDIST).write_bytes(b"half")
    pip_that(monkeypatch, archive.read_bytes())
    assert demo.demo_archive().read_bytes() == archive.read_bytes()


def test_wrong_hash_is_refused_before_it_is_opened(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, b"something else")
    with pytest.raises(UserError, match=r"has sha256 .* expected 5d7c06e0"):
        demo.demo_rows()
    assert not list((cache / "demo").iterdir())
