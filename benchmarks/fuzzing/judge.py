"""Running one case in this process, and what is wrong with how it ended.

Right is: exit code 0, 2 or 130; after 2 one line that says why; no traceback; an end within ten
seconds; no scratch file left; nothing written outside the case's own folder.
"""

import contextlib
import io
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

HANG = 10.0  # seconds of CPU, so that a busy machine is no hang
ASLEEP = 60.0  # seconds of waiting for something else
SCRATCH = re.compile(r"^\..+\.[0-9a-f]{32}$|^\.room-|^\.[0-9a-f]{32}$")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod")


class Hang(BaseException):
    """Not an Exception: nothing below may take it for an error of its own."""


class Watch:
    """What this process writes, by Python's own account of it; hooks cannot be taken away again."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] = ()
        self.outside: list[str] = []
        self.on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            _, mode, flags = arguments
            if not (isinstance(flags, int) and flags & WRITES) and not (
                isinstance(mode, str) and set(mode) & set("wax+")
            ):
                return
        elif event not in CHANGES:
            return
        with contextlib.suppress(TypeError, ValueError, OSError):
            named = os.path.abspath(os.fsdecode(arguments[0]))
            if event == "os.mkdir" and os.path.isdir(named):
                return  # it is there: nothing is made
            if not named.startswith(self.allowed) and "__pycache__" not in named:
                self.outside.append(named)


WATCH = Watch()


@contextlib.contextmanager
def limited(folder: Path, also: tuple[str, ...] = ()) -> Iterator[None]:
    """Ten seconds of work, and one folder to write to."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    numbers = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
    old = {number: signal.signal(number, stop) for number in numbers.values()}
    WATCH.allowed = (str(folder), "/dev/", "/proc/self/", *also)
    WATCH.outside = []
    signal.setitimer(signal.ITIMER_PROF, HANG)
    signal.setitimer(signal.ITIMER_REAL, ASLEEP)
    WATCH.on = True
    try:
        yield
    finally:
        WATCH.on = False
        for timer, number in numbers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, old[number])


def run_case(run: Callable[[Path], str | None], also: tuple[str, ...]) -> tuple[str, str, float]:
    """(what is wrong or "", details, seconds); `run` says what is wrong by its own rules."""
    here = os.getcwd()
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="case-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        os.chdir(folder)
        try:
            with limited(folder, also), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wrong = run(folder) or ""
            details = ""
        except Hang:
            wrong, details = "hang", _last_frames(sys.exc_info()[2])
        except RecursionError:
            wrong, details = "traceback", "RecursionError " + _last_frames(sys.exc_info()[2])
        except Exception as error:
            wrong = "traceback"
            details = f"{type(error).__name__}: {error}"[:300] + _last_frames(sys.exc_info()[2])
        finally:
            os.chdir(here)
        seconds = time.process_time() - began
        if not wrong and seconds > HANG:
            wrong, details = "hang", f"{seconds:.0f} s"
        if not wrong and WATCH.outside:
            wrong, details = "outside", WATCH.outside[0]
        left = [path.name for path in folder.rglob(".*") if SCRATCH.match(path.name)]
        if not wrong and left:
            wrong, details = "half-written", left[0]
    name, _, more = wrong.partition(": ")
    return name, details or more, seconds


def _last_frames(trace: Any) -> str:
    frames = [f for f in traceback.extract_tb(trace) if "dpfp_ray" in f.filename]
    own = [
        f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames if "fuzz" not in f.filename
    ]
    return " at " + (own[-1] if own else "?")


def command(arguments: list[str]) -> str | None:
    """Run `dpfp ARGUMENTS`; what is wrong with how it ended."""
    from dpfp_ray.cli.main import main

    # As a shell would give them to Python: no NUL can be in them; encoded as a terminal's are.
    arguments = [word.replace("\0", "") for word in arguments]
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = main(arguments)
        except SystemExit as end:
            code = end.code
        out.flush()
        err.flush()
    said = err.buffer.getvalue().decode()
    if "Traceback" in said:
        return f"traceback: {said[-300:]}"
    if code not in (0, 2, 130):
        return f"exit code: {code}"
    lines = [line for line in said.splitlines() if line.strip()]
    reasons = [line for line in lines if not line.startswith("dpfp: warning: ")]
    if code == 2 and (not lines or not lines[-1].startswith("dpfp")):
        return f"no reason: {lines[-1:]}"
    if code == 2 and sum(line.startswith("dpfp") for line in reasons) != 1:
        return f"several lines: {lines[:3]}"
    if code == 2 and any(not letter.isprintable() for letter in lines[-1]):
        return f"control codes: {lines[-1][:100]!r}"
    return None
