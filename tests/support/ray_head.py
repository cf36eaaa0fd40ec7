"""A Ray head of its own for tests: own folder, own ports, own token; it ends with the block."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from tests.support.ports import free_ports
from tests.support.ray_runs import wait_for
from tests.support.ray_start import start_patiently


@dataclass(frozen=True)
class Head:
    address: str  # for ray.init
    dashboard: str
    token: str
    token_file: str
    environment: dict[str, str]
    process: "subprocess.Popen[bytes]"
    folder: Path


@contextmanager
def ray_head(
    token: str, cpus: int = 2, growing: Callable[[str], Path] | None = None
) -> Iterator[Head]:
    """`growing` writes the autoscaler's settings for a head at an address."""
    head = start_patiently(lambda: start(token, cpus, growing))
    try:
        yield head
    finally:
        end(head)


def start(token: str, cpus: int, growing: Callable[[str], Path] | None = None) -> Head:
    """A head that has run a job: its node is alive, and the agent that starts jobs too."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    port, dashboard, client, agent, agent_grpc, metrics = free_ports(6)
    token_file = folder / "token"
    token_file.write_text(token)
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else workers wait for whatever else the machine does
    }
    options = []
    if growing:
        environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        options = [f"--autoscaling-config={growing(f'127.0.0.1:{port}')}"]
    environment.pop("RAY_ADDRESS", None)
    arguments = [
        *("ray", "start", "--head", "--block", f"--temp-dir={folder}", f"--port={port}"),
        *(f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"),
        *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
        *(f"--dashboard-agent-grpc-port={agent_grpc}", f"--metrics-export-port={metrics}"),
        *(f"--num-cpus={cpus}", f"--object-store-memory={100 * 2**20}", "--node-ip-address"),
        "127.0.0.1",
        *options,
    ]
    with open(folder / "head.log", "wb") as log:
        process = subprocess.Popen(
            arguments, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{dashboard}"
    head = Head(f"127.0.0.1:{port}", url, token, str(token_file), environment, process, folder)
    try:
        wait_for(lambda: has_run_a_job(head), "the head to run a job")
    except BaseException:
        end(head)
        raise
    return head


def has_run_a_job(head: Head) -> bool:
    """The dashboard answers before the node is alive; only a job shows that all is there."""
    running = head.process.poll() is None
    assert running, (head.folder / "head.log").read_text()[-2000:]
    name = "is-the-head-alive"
    with suppress(requests.RequestException):
        known = ask(head, "GET", f"/api/jobs/{name}")
        if known.ok:
            return bool(known.json()["status"] == "SUCCEEDED")
        ask(head, "POST", "/api/jobs/", json={"entrypoint": "true", "submission_id": name})
    return False


def ask(head: Head, verb: str, path: str, **options: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {head.token}"}
    return requests.request(
        verb, f"{head.dashboard}{path}", headers=headers, timeout=120, **options
    )


def end(head: Head) -> None:
    """Ask it to end, kill it after a while, and leave nothing behind."""
    below = psutil.Process(head.process.pid).children(recursive=True)  # nodes that it started, too
    head.process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        head.process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(head.process.pid, signal.SIGKILL)
    head.process.wait(10)
    for process in below:
        with suppress(psutil.Error):
            process.kill()
    shutil.rmtree(head.folder, ignore_errors=True)
