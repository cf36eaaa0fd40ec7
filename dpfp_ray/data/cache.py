"""Where everything that can be rebuilt is kept: tokens, downloads, calibrations.

Tokens are private records in another form: all of it is readable by its owner only.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from dpfp_ray.data.whole_files import PRIVATE, private_folder, write_text
from dpfp_ray.plan.errors import UserError

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


def cached_number(key: str, compute: Callable[[], float]) -> float:
    """`compute()`, remembered on disk under `key` and dp-accounting's version.

    One small file per number, written in one rename: any number of processes may share it.
    """
    full_key = f"{key} dp-accounting {version('dp-accounting')} v{NUMBERS_VERSION}"
    name = hashlib.blake2b(full_key.encode(), digest_size=16).hexdigest()
    path = cache_dir() / "numbers" / f"{name}.json"
    try:
        known = json.loads(path.read_text())
        if known["key"] == full_key:
            return float(known["value"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there yet, or damaged: compute it again
    value = compute()
    with contextlib.suppress(OSError):  # full or read-only: the next run computes it again
        write_text(path, json.dumps({"key": full_key, "value": value}), PRIVATE)
    return value
