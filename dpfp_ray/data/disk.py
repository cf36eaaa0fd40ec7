"""Room on the disk: asked for before the work begins, and what to say when there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from uuid import uuid4

from dpfp_ray.plan.errors import UserError

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
    # Of a quota, or of a limit on files, free space says nothing.
    missing = needed - free if needed > free else needed
    room = f"{max(1, -(-missing // 10**6)):,} MB" if needed else "some room"
    return NoRoom(
        f"no room to write {path} ({error.strerror}); free {room} and run the same command"
    )
