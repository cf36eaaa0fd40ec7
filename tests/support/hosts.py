"""Machines in miniature: Linux namespaces, each with its own processes, network, name, temporary
folder and home, joined by a switch of our own that can delay, lose and cut off what it carries.

    with Hosts(shared, 3) as hosts:
        hosts[0].start("ray", "start", "--head", ...)
        hosts.switch.cut.add(hosts[2])

`shared` is seen by all of them, as `SHARED`. A host is one process, the first of its namespaces:
the kernel ends all that runs there, and takes back network and mounts, when that process ends.
The switch is ours because the kernel of many machines has no netem. Needs root.
"""

import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

SHARED = Path("/srv")  # where hosts see the shared folder
# Python runs it before anything else; it is for our commands and Ray's workers. libfaketime would
# change Ray's own programs too, which then do not join; and under it `time.sleep` fails.
LATE_CLOCK = """
import sys, time
if {"dpfp_ray.cli", "default_worker.py"} & {word.rpartition("/")[2] for word in sys.orig_argv}:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + 3600
    time.time_ns = lambda: now_ns() + 3600 * 10**9
"""
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
# What a host does first; `$1` is the shared folder, `$2` its name, `$3` the size of /tmp.
BEGIN = """
mount --bind "$1" /srv
mount -t tmpfs -o size="$3" none /tmp && mount -t tmpfs none /home
mount -t tmpfs -o size=400m none /dev/shm
hostname "$2"
ip link set lo up
echo ready
exec sleep infinity
"""


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        subprocess.run(["unshare", "-nmupif", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces are not allowed: {error}"
    return ""


class Hosts(list["Host"]):
    """`count` hosts with the addresses 10.77.0.1, 10.77.0.2, …"""

    def __init__(self, shared: Path, count: int, tmp: str = "1g") -> None:
        super().__init__()
        self.switch = Switch()
        try:
            for number in range(1, count + 1):
                self.append(Host(number, shared, tmp))
                self.switch.connect(self[-1])
        except BaseException:
            self.close()
            raise
        self.switch.start()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self:
            host.vanish()
        self.switch.close()


class Host:
    def __init__(self, number: int, shared: Path, tmp: str) -> None:
        self.name, self.address = f"host{number}", f"10.77.0.{number}"
        self.started: list[subprocess.Popen[str]] = []
        flags = ["--net", "--mount", "--uts", "--pid", "--ipc", "--fork", "--mount-proc"]
        self.process = subprocess.Popen(
            ["unshare", *flags, "--kill-child", "sh", "-ec", BEGIN, "sh", shared, self.name, tmp],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it complains of its own end
            text=True,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            self.process.kill()
            raise RuntimeError(f"{self.name} did not begin")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.first = int(children.read_text().split()[0])  # its process 1

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """A command there; it ends with the host, at the latest."""
        enter = ["nsenter", "-t", str(self.first), "-m", "-u", "-n", "-p", "-i", "--"]
        home = {"HOME": "/home", "RAY_AUTH_MODE": "disabled"}
        for name in ("DPFP_CACHE", "DPFP_LEDGER", "RAY_TMPDIR", "TMPDIR"):
            home[name] = ""
        kept = {n: v for n, v in os.environ.items() if n not in home}
        kept |= {n: v for n, v in {**home, **environment}.items() if v}
        process = subprocess.Popen(
            [*enter, *words],
            env=kept,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *words: str, patience: float = 900, **environment: str) -> tuple[int, str]:
        process = self.start(*words, **environment)
        said, _ = process.communicate(timeout=patience)
        return process.returncode, said

    def python(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return self.start(sys.executable, *words, **environment)

    def end(self, process: subprocess.Popen[str]) -> None:
        """Ask a command to end, and wait for it: `process` itself only waits for it, too."""
        for child in psutil.Process(process.pid).children():
            child.terminate()
        process.communicate()

    def vanish(self) -> None:
        """End it at once, with all that runs there, and without a word to anybody."""
        if self.process.poll() is None:
            os.kill(self.first, signal.SIGKILL)  # the kernel ends all others before it is gone
            self.process.wait()
        for process in self.started:
            with suppress(OSError):
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class Switch(threading.Thread):
    """Carries Ethernet frames between hosts. All settings may be changed while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="switch")
        self.delay = 0.0  # seconds, each way
        self.loss = 0.0  # of frames, each way
        self.cut: set[Host] = set()  # these hear nobody, and nobody hears them
        self.carried = self.lost = 0
        self.random = random.Random(0)
        self.ports: dict[int, Host] = {}
        self.places: dict[bytes, int] = {}  # hardware address → port
        self.waiting: list[tuple[float, int, int, bytes]] = []
        self.ended = threading.Event()

    def connect(self, host: Host) -> None:
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name = f"dpfp{host.first}"[:15]
        fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
        self.ports[port] = host

        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True)

        ip("link", "set", name, "netns", str(host.first))
        inside = ["nsenter", "-t", str(host.first), "-n", "ip"]
        for words in (
            ["link", "set", name, "name", "eth0", "up"],
            ["addr", "add", f"{host.address}/24", "dev", "eth0"],
            ["route", "add", "default", "via", "10.77.0.254"],  # nobody: nothing leaves
        ):
            subprocess.run([*inside, *words], check=True)

    def run(self) -> None:
        while not self.ended.is_set():
            pause = self.waiting[0][0] - time.monotonic() if self.waiting else 0.2
            ready, _, _ = select.select(list(self.ports), [], [], max(0.0, min(pause, 0.2)))
            for port in ready:
                self._take(port)
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                _, _, sink, frame = heapq.heappop(self.waiting)
                with suppress(OSError):  # a full queue, or a host that is gone
                    os.write(sink, frame)

    def _take(self, port: int) -> None:
        for _ in range(64):
            try:
                frame = os.read(port, 65536)
            except BlockingIOError:
                return
            except OSError:  # its host is gone
                self.ports.pop(port, None)
                return
            self.places[frame[6:12]] = port
            known = self.places.get(frame[:6])
            for sink in [known] if known is not None else [p for p in self.ports if p != port]:
                ends = {self.ports.get(port), self.ports.get(sink)}
                if ends & self.cut or self.random.random() < self.loss:
                    self.lost += 1
                    continue
                self.carried += 1
                due = time.monotonic() + self.delay
                heapq.heappush(self.waiting, (due, self.carried, sink, frame))

    def close(self) -> None:
        self.ended.set()
        if self.is_alive():
            self.join()
        for port in self.ports:
            with suppress(OSError):
                os.close(port)


def an_hour_ahead(shared: Path) -> dict[str, str]:
    """Variables under which a host's commands and trials have a wall clock that is an hour off."""
    folder = shared / "late-clock"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(LATE_CLOCK)
    return {"PYTHONPATH": str(SHARED / folder.name)}
