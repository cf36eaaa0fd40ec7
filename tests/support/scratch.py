"""One temporary folder for a whole test run, and nothing left of the run when it ends."""

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PATIENCE = 10.0  # seconds that processes have to notice that the run is over
FOLDER = "DPFP_TEST_FOLDER"  # all processes of a run have it in their environment


def begin() -> None:
    """From here on, this process and those it starts put everything temporary in one folder."""
    # Not below a long path: Ray's sockets must stay below 108 characters.
    short = "/tmp" if os.path.isdir("/tmp") else None
    made = tempfile.mkdtemp(prefix="dpfp-", dir=short)
    for name in (FOLDER, "TMPDIR", "RAY_TMPDIR"):
        os.environ[name] = made
    tempfile.tempdir = None  # read TMPDIR again


def folder() -> Path:
    return Path(os.environ[FOLDER])


def end() -> None:
    """End what still runs after a while, say what it was, and remove the folder."""
    if server := sys.modules.get("multiprocessing.forkserver"):  # it and its kin have folders here
        server._forkserver._stop()
        sys.modules["multiprocessing.resource_tracker"]._resource_tracker._stop()  # type: ignore[attr-defined]
        sys.modules["multiprocessing.util"]._run_finalizers()  # type: ignore[attr-defined]
    give_up = time.monotonic() + PATIENCE
    while left_running() and time.monotonic() < give_up:
        time.sleep(0.1)
    for process in left_running():
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            print(f"left running, killed: {command}", file=sys.stderr)
            os.kill(int(process.name), signal.SIGKILL)
    shutil.rmtree(folder(), ignore_errors=True)


def left_running() -> list[Path]:
    """The /proc folders of this run's processes, without this one."""
    mark = f"{FOLDER}={folder()}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ours = mark in (process / "environ").read_bytes().split(b"\0")
            if ours and int(process.name) != os.getpid():
                found.append(process)
    return found
