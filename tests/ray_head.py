"""A Ray head of its own for tests: own folder, own ports, own token; it ends with the block."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import requests

from tests.ports import free_ports
from tests.ray_runs import wait_for


@dataclass(frozen=True)
class Head:
    address: str  # for ray.init
    dashboard: str
    token: str
    token_file: str
    environment: dict[str, str]


@contextmanager
def ray_head(token: str, cpus: int = 2) -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets' paths must be short
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
    environment.pop("RAY_ADDRESS", None)
    arguments = [
        *("ray", "start", "--head", "--block", f"--temp-dir={folder}", f"--port={port}"),
        *(f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"),
        *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
        *(f"--dashboard-agent-grpc-port={agent_grpc}", f"--metrics-export-port={metrics}"),
        *(f"--num-cpus={cpus}", f"--object-store-memory={100 * 2**20}", "--node-ip-address"),
        "127.0.0.1",
    ]
    with open(folder / "head.log", "wb") as log:
        process = subprocess.Popen(
            arguments, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{dashboard}"

    def up() -> bool:
        assert process.poll() is None, (folder / "head.log").read_text()[-2000:]
        with suppress(requests.RequestException):
            headers = {"Authorization": f"Bearer {token}"}
            return requests.get(f"{url}/api/version", headers=headers, timeout=5).ok
        return False

    try:
        wait_for(up, "the head's dashboard")
        yield Head(f"127.0.0.1:{port}", url, token, str(token_file), environment)
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
