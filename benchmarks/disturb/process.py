"""A `dpfp …` command as a process that can be watched, killed and limited.

Commands without Ray are forked from this process, which has imported all that they need: they start
in a moment, and are processes of their own all the same. Those with Ray are started from nothing.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PATIENCE = 900.0  # seconds after which a command hangs; a busy machine is no failure
LOOK = 0.002  # seconds between two looks at a command
CAP_DAC_OVERRIDE, PR_CAPBSET_DROP, CAPABILITIES_3 = 1, 24, 0x20080522


class Hangs(Exception):
    """A command did not end in time."""


class Process:
    """`dpfp ARGUMENTS` in a session of its own; `said` is what it has printed, errors included."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], forked: bool
    ) -> None:
        self.arguments = list(arguments)
        self.began = time.monotonic()
        self.said = ""
        self.code: int | None = None
        # A pipe and no file: a limit on the size of files must not cut what is said of it.
        self._pipe, out = os.pipe()
        os.set_blocking(self._pipe, False)
        self.pid = self._fork(out, environment) if forked else self._start(out, environment)
        os.close(out)

    def _fork(self, out: int, environment: Mapping[str, str]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(environment)
            obey_modes()
            from dpfp_ray.cli.main import main

            code = main(self.arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except KeyboardInterrupt:  # before or after `main`, which knows it
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _start(self, out: int, environment: Mapping[str, str]) -> int:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "dpfp_ray.cli", *self.arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=obey_modes,
        )
        return self._child.pid

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        if self.code is not None:
            return self.code
        self._hear()
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            self._hear()
            os.close(self._pipe)
            self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            while piece := os.read(self._pipe, 65536):
                self.said += piece.decode("utf-8", "replace")

    def until(self, holds: Callable[[], bool]) -> bool:
        """Wait until it `holds`; False if the command has ended before."""
        while self.poll() is None:
            if holds():
                return True
            if time.monotonic() - self.began > PATIENCE:
                self.kill_all()
                raise Hangs(f"{' '.join(self.arguments)}: {self.said[-1500:]}")
            time.sleep(LOOK)
        return False

    def end(self) -> int:
        """Wait for its end; the exit code."""
        self.until(lambda: False)
        assert self.code is not None
        return self.code

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def signal(self, number: int, whole_group: bool = False) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if whole_group else os.kill)(self.pid, number)

    def kill_all(self) -> None:
        """SIGKILL to it and to all of its session: what losing the machine is like."""
        for process in {self.pid, *self.members()}:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def members(self, title: str = "") -> list[int]:
        """Living processes of its session whose command line has `title` in it."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) != self.pid or fields[0] == "Z":
                        continue
                    if title in (entry / "cmdline").read_text().replace("\0", " "):
                        found.append(int(entry.name))
        return found

    @staticmethod
    def title(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100]
        except OSError:
            return "(ended)"

    def gone(self, seconds: float = 180.0) -> bool:
        """Whether all of its session has ended, at the latest after `seconds`. After a SIGKILL two
        agents of Ray's stay for a minute: they try to tell the GCS, which is gone too, that the
        raylet died (`report_raylet_error_logs`, 60 seconds by `gcs_server_request_timeout`)."""
        end = time.monotonic() + seconds
        while self.members() and time.monotonic() < end:
            time.sleep(0.05)
        return not self.members()


def obey_modes() -> None:
    """From here on a folder without the right to write cannot be written to, by root neither."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)  # for what is started from here
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice
    if libc.capget(header, sets) == 0:
        for place in range(3):
            sets[place] &= ~(1 << CAP_DAC_OVERRIDE)
        libc.capset(header, sets)
