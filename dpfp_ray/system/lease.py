"""One driver at a time for a store, or for the folder of a run.

PLACE/.lease-N   the claim of the driver that has the place, written anew every few seconds

A driver that finds no living claim makes the next one, in a single step that only one of several
can do (a link in a folder, a conditional write on an object store). Then it lists the claims once
more, and has the place if no other living one is there; else it takes its own away. Of two drivers,
the one that writes later lists after both have written: never do both have it.

A claim is dead if its process was on this machine and has ended, or if it has not changed for
`STALE` seconds while this process looked at it. No clocks are compared: they may differ. Who takes
over names the dead claim in its own, so that its driver, should it only have been asleep, stops.
"""

import _thread
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import Files

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
    token: str = ""  # no two claims are equal
    after: tuple[str, ...] = ()  # tokens of the dead that were found

    @staticmethod
    def mine() -> "Claim":
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        who = f"{user_name()} on {socket.gethostname()}, process {os.getpid()}, since {now}"
        token = secrets.token_hex(6)
        return Claim(who, machine(), os.getpid(), process_start(os.getpid()), token=token)

    @staticmethod
    def parse(content: bytes) -> "Claim":
        try:
            claim = Claim(**json.loads(content))
            return replace(claim, after=tuple(claim.after))
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
        target=lease.keep_beating,
        args=[on_lost or _thread.interrupt_main],
        daemon=True,
        name="lease",
    )
    beating.start()
    try:
        yield
    finally:
        lease.ended.set()
        beating.join()
        lease.drop()


def held_unless(done: bool, files: Files, fix: str) -> AbstractContextManager[None]:
    """`held`; but where all is `done` and will only be read, nothing is claimed."""
    if not done:
        return held(files, fix)
    Lease(files, fix).tidy()
    return nullcontext()


class Lease:
    """A place and this driver's claim to it."""

    def __init__(self, files: Files, fix: str) -> None:
        self.files, self.fix = files, fix
        self.name = ""
        self.claim = Claim.mine()
        self.ended = threading.Event()
        self._dead_claims: dict[str, Claim] = {}
        # What was last seen of others, and since when it has not changed.
        self._seen: dict[str, tuple[Claim, float]] = {}

    def take(self) -> None:
        began, told = time.monotonic(), False
        first: dict[str, Claim] = {}
        while True:
            others = self._others()
            if not others and self._make():
                others = self._others()
                if not others:
                    self._remove_dead()
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
            if others and waited > (PATIENCE if living else STALE + BEAT):
                other = next(iter(living or others.values()))
                raise UserError(
                    f"{self.files.name} is in use by {other.who}; wait until that has ended, or "
                    f"{self.fix}"
                )
            if others and not living and not told:
                told = True
                print(
                    f"{self.files.name} was in use by {next(iter(others.values())).who}; looking "
                    f"for up to {STALE:.0f} s whether it still is",
                    file=sys.stderr,
                )
            time.sleep(random.uniform(0.05, 0.3))

    def tidy(self) -> None:
        """Remove the claim of a driver that was killed after its last write."""
        with suppress(OSError, UserError):
            self._others()
            self._remove_dead()

    def drop(self) -> None:
        with suppress(OSError, UserError):
            self.files.delete(self.name)
        self.name = ""

    def keep_beating(self, on_lost: Callable[[], None]) -> None:
        while not self.ended.wait(BEAT):
            # What cannot be reached now is tried again at the next beat.
            with suppress(OSError, UserError):
                if self._taken_over():
                    print(
                        f"another driver has taken over {self.files.name}; this one stops",
                        file=sys.stderr,
                    )
                    on_lost()
                    return
                self.claim = replace(self.claim, beat=self.claim.beat + 1)
                self.files.write(self.name, self._content())

    def _make(self) -> bool:
        """Make the next claim; False if another driver was faster."""
        numbers = [_number(name) for name in self._dead_claims]
        name = f"{PREFIX}{max(numbers, default=0) + 1:06d}"
        after = tuple(claim.token for claim in self._dead_claims.values() if claim.token)
        self.claim = replace(self.claim, after=after)
        if self.files.create(name, self._content()):
            self.name = name
        return bool(self.name)

    def _content(self) -> bytes:
        return json.dumps(asdict(self.claim)).encode()

    def _taken_over(self) -> bool:
        names = self._names()
        if self.name not in names:
            return True
        return any(self.claim.token in claim.after for _, claim in self._claims(names))

    def _names(self) -> list[str]:
        return [name for name in self.files.names() if name.startswith(PREFIX)]

    def _claims(self, names: list[str]) -> Iterator[tuple[str, Claim]]:
        """Those of others."""
        for name in names:
            if name != self.name:
                with suppress(FileNotFoundError):
                    yield name, Claim.parse(self.files.read_name(name))

    def _others(self) -> dict[str, Claim]:
        """Living claims of others."""
        living: dict[str, Claim] = {}
        self._dead_claims = {}
        for name, claim in self._claims(self._names()):
            (self._dead_claims if self._dead(name, claim) else living)[name] = claim
        return living

    def _remove_dead(self) -> None:
        for name in self._dead_claims:
            with suppress(OSError, UserError):
                self.files.delete(name)

    def _dead(self, name: str, claim: Claim) -> bool:
        if claim.machine == self.claim.machine:
            return process_start(claim.pid) != claim.started
        known, since = self._seen.get(name, (None, 0.0))
        if claim != known:
            self._seen[name] = claim, time.monotonic()
            return False
        return time.monotonic() - since > STALE


def _number(name: str) -> int:
    digits = name.removeprefix(PREFIX)
    return int(digits) if digits.isdecimal() else 0


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


def user_name() -> str:
    """The user's name, or number: containers may run as a number without a name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
