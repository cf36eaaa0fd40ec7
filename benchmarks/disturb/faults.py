"""What is done to commands, and how they may end after it.

A fault is chosen with a moment: a share of the time that the undisturbed twin took, or a number of
changes of the files that would continue the work.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from disturb.process import Process
from disturb.works import Work

KILLED, INTERRUPTED, REFUSED = -signal.SIGKILL, 130, 2
ENDED = -signal.SIGTERM  # told to end before there was anything to save
LIMITS = (0, 1_000, 20_000, 60_000, 150_000)  # bytes
NOT_THERE = "not there"
ALONE = ("train", "audit")
ON_RAY = ("sweep", "compare")


@dataclass
class Scene:
    """A command that runs, where it works, and what was drawn for it."""

    work: Work
    folder: Path
    start: Callable[[], Process]  # the same command once more
    process: Process
    rng: Random
    twin_seconds: float
    look: Callable[[], object]  # while nothing happens

    def wait(self) -> bool:
        """Until the moment that was drawn; False if the command has ended by then."""
        if self.rng.random() < 0.5:
            at = self.twin_seconds * self.rng.uniform(0.02, 1.05)
            return self.process.until(lambda: bool(self.look()) or self.process.seconds > at)
        wanted, seen = self.rng.randint(1, 6), -1
        before: list[tuple[str, int]] = []

        def changed() -> bool:
            nonlocal seen, before
            self.look()
            now = []
            for path in self.work.states(self.folder):
                try:
                    now.append((path.name, path.stat().st_mtime_ns))
                except FileNotFoundError:
                    continue
            if now != before:
                before, seen = now, seen + 1
            return seen >= wanted

        return self.process.until(changed)


@dataclass(frozen=True)
class Fault:
    """Something that is done to a command that runs; `codes` it may end with, besides 0."""

    name: str
    verbs: tuple[str, ...]
    do: Callable[[Scene], str]  # what was done in detail
    codes: tuple[int, ...]
    weight: float = 1.0


def kill(scene: Scene) -> str:
    scene.process.signal(signal.SIGKILL)
    return ""


def kill_all(scene: Scene) -> str:
    scene.process.kill_all()
    return ""


def interrupt(scene: Scene) -> str:
    scene.process.signal(signal.SIGINT, whole_group=True)  # what a terminal does on Ctrl-C
    if scene.rng.random() < 0.3:
        time.sleep(scene.rng.uniform(0.0, 0.3))
        scene.process.signal(signal.SIGINT, whole_group=True)
        return "twice"
    return ""


def terminate(scene: Scene) -> str:
    scene.process.signal(signal.SIGTERM)
    return ""


def killing(title: str) -> Callable[[Scene], str]:
    def do(scene: Scene) -> str:
        found = [pid for pid in scene.process.members(title) if pid != scene.process.pid]
        if found:
            os.kill(scene.rng.choice(found), signal.SIGKILL)
        return "" if found else NOT_THERE

    return do


def limit_files(scene: Scene) -> str:
    """No file may grow beyond a few bytes: what a full disk or a quota is like."""
    pids = [scene.process.pid]
    if not scene.work.forked:
        pids = scene.process.members("ray::ImplicitFunc") or pids
    size = scene.rng.choice(LIMITS)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))
    return f"{size} bytes"


def read_only(scene: Scene) -> str:
    """Nothing can be made, replaced or deleted in the folder until the command has ended."""
    folders = [f for f in (scene.folder, *scene.folder.rglob("*")) if f.is_dir()]
    for folder in folders:
        folder.chmod(0o500)
    scene.process.end()
    for folder in folders:
        folder.chmod(0o700)
    return ""


def second_driver(scene: Scene) -> str:
    other = scene.start()
    code = other.end()
    if code not in (0, REFUSED) or "Traceback" in other.said:
        raise AssertionError(f"the second driver ended with {code}: {other.said[-800:]}")
    if code == REFUSED and " is in use by " not in other.said:
        raise AssertionError(f"the second driver was refused for another reason: {other.said}")
    return "refused" if code == REFUSED else "found it finished"


RUNNING = (
    Fault("driver killed (SIGKILL)", (*ALONE, *ON_RAY), kill, (KILLED,), 3),
    Fault("Ctrl-C (SIGINT)", (*ALONE, *ON_RAY), interrupt, (INTERRUPTED,)),
    Fault("SIGTERM", (*ALONE, *ON_RAY), terminate, (INTERRUPTED, ENDED)),
    Fault("files limited (RLIMIT_FSIZE)", (*ALONE, *ON_RAY), limit_files, (REFUSED,)),
    Fault("folder made read-only", ALONE, read_only, (REFUSED,)),
    Fault("second driver", (*ALONE, *ON_RAY), second_driver, ()),
    Fault("whole session killed", ON_RAY, kill_all, (KILLED,)),
    Fault("trial process killed", ON_RAY, killing("ray::ImplicitFunc"), ()),
    Fault("raylet killed", ON_RAY, killing("/raylet/raylet "), (REFUSED,)),
    Fault("GCS killed", ON_RAY, killing("gcs_server"), (REFUSED,)),
)


def flip(path: Path, rng: Random) -> str:
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"{path.name}, byte {place:,} of {len(content):,}"


def truncate(path: Path, rng: Random) -> str:
    content = path.read_bytes()
    kept = rng.randrange(len(content))
    path.write_bytes(content[:kept])
    return f"{path.name}, {kept:,} of {len(content):,} bytes kept"


def empty(path: Path, rng: Random) -> str:
    path.write_bytes(b"")
    return path.name


# Done to a file that continues the work, while no command runs.
AT_REST = {"byte flipped": flip, "file truncated": truncate, "file emptied": empty}
OTHER_SEED = "asked to go on with another --seed"
