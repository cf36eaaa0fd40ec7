"""One driver at a time for a store, or for the folder of a run.

PLACE/.lease-TOKEN   a claim of each driver that has or wants the place, written anew every few
                     seconds by the one that has it

A driver writes its claim, then lists the claims, and has the place if no other living claim is
there; else it takes its own away. Of two drivers, the one that writes later lists after both have
written, and sees the other: never do both have it. This asks of storage only that a listing shows
what was written before it, which holds for folders, S3, Google Cloud Storage and Azure; pyarrow
offers no write that fails where something is, on any of them.

A claim is dead if its process was on this machine and has ended, or if it has not changed for
`STALE` seconds while this process looked at it. No clocks are compared: they may differ.
"""

import getpass
import json
import os
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from dpfp_ray.data.storage import Files
from dpfp_ray.plan.errors import UserError

PREFIX = ".lease-"
BEAT = 5.0  # seconds between two writes of a claim
STALE = 45.0  # seconds without a change after which a claim is dead
PATIENCE = 2.0  # seconds in which claims that came at the same time sort themselves out


@dataclass(frozen=True)
class Claim:
    who: str
    machine: str
    pid: int
    started: str  # of the process; pids come again
    beat: int = 0

    @staticmethod
    def mine() -> "Claim":
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        who = f"{_user()} on {socket.gethostname()}, process {os.getpid()}, since {now}"
        return Claim(who, machine(), os.getpid(), process_start(os.getpid()))

    @staticmethod
    def parse(content: bytes) -> "Claim":
        try:
            return Claim(**json.loads(content))
        except (ValueError, TypeError):
            return Claim("an unknown process", "", 0, "")  # until it is stale


@contextmanager
def held(files: Files, fix: str, on_lost: Callable[[], None] | None = None) -> Iterator[None]:
    """Have the place for as long as the block lasts; a UserError that says who else has it.

    `fix` says what else to do, such as "use another --storage". `on_lost` is called, from another
    thread, if another driver takes over because this process did not run for a while; by default
    the main thread is interrupted.
    """
    lease = Lease(files, fix)
    lease.take()
    beating = threading.Thread(
        target=lease.keep_beating, args=[on_lost or _interrupt], daemon=True, name="lease"
    )
    beating.start()
    try:
        yield
    finally:
        lease.ended.set()
        beating.join()
        lease.drop()


class Lease:
    """A place and this driver's claim to it."""

    def __init__(self, files: Files, fix: str) -> None:
        self.files, self.fix = files, fix
        self.name = f"{PREFIX}{secrets.token_hex(6)}"
        self.claim = Claim.mine()
        self.ended = threading.Event()
        # What was last seen of others, and since when it has not changed.
        self._seen: dict[str, tuple[Claim, float]] = {}

    def take(self) -> None:
        began, told = time.monotonic(), False
        first: dict[str, Claim] = {}
        while True:
            others = self._others()
            if not others:
                self._write()
                others = self._others()
                if not others:
                    return
                self.drop()
            for name, other in others.items():
                first.setdefault(name, other)
            living = [
                other
                for name, other in others.items()
                if other.machine == self.claim.machine or other != first[name]
            ]
            waited = time.monotonic() - began
            if waited > (PATIENCE if living else STALE + BEAT):
                raise self._refusal(*(living or others.values()))
            if not living and not told:
                told = True
                print(
                    f"{self.files.name} was in use by {next(iter(others.values())).who}; looking "
                    f"for up to {STALE:.0f} s whether it still is",
                    file=sys.stderr,
                )
            time.sleep(random.uniform(0.05, 0.3))

    def drop(self) -> None:
        with suppress(OSError, UserError):
            self.files.delete(self.name)

    def keep_beating(self, on_lost: Callable[[], None]) -> None:
        while not self.ended.wait(BEAT):
            # What cannot be reached now is tried again at the next beat.
            with suppress(OSError, UserError):
                if self.name not in self.files.names():
                    print(
                        f"another driver has taken over {self.files.name}; this one stops",
                        file=sys.stderr,
                    )
                    on_lost()
                    return
                self.claim = replace(self.claim, beat=self.claim.beat + 1)
                self._write()

    def _write(self) -> None:
        self.files.write(self.name, json.dumps(asdict(self.claim)).encode())

    def _others(self) -> dict[str, Claim]:
        """Living claims of others; dead ones are removed."""
        found: dict[str, Claim] = {}
        for name in self.files.names():
            if not name.startswith(PREFIX) or name == self.name:
                continue
            try:
                claim = Claim.parse(self.files.read_name(name))
            except FileNotFoundError:
                continue
            if self._dead(name, claim):
                with suppress(OSError):
                    self.files.delete(name)
            else:
                found[name] = claim
        return found

    def _dead(self, name: str, claim: Claim) -> bool:
        if claim.machine == self.claim.machine:
            return process_start(claim.pid) != claim.started
        known, since = self._seen.get(name, (None, 0.0))
        if claim != known:
            self._seen[name] = claim, time.monotonic()
            return False
        return time.monotonic() - since > STALE

    def _refusal(self, other: Claim, *_: Claim) -> UserError:
        return UserError(
            f"{self.files.name} is in use by {other.who}; wait until that has ended, or {self.fix}"
        )


def machine() -> str:
    """Where process numbers mean the same processes: one boot, one namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_start(pid: int) -> str:
    """When a process was started, in the kernel's units; empty if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "" if Path("/proc/self").exists() or not _runs(pid) else "running"
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "somebody"


def _interrupt() -> None:
    import _thread

    _thread.interrupt_main()
