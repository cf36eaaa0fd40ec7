"""How fast does `dpfp serve` answer, with many records and many clients?

    .venv/bin/python benchmarks/service.py --output benchmarks/service.md

Made-up records, the real command, client threads in a process of their own, four kinds of load:
*alone* (one client, no pauses: what a request takes when nothing waits for anything), *pages* (each
client looks every two seconds, as an open page does), *mixed* (no pauses: `/`, then three times
`/api/version`, then a page of rows), *version* (no pauses, only `/api/version`).
Without pauses the service is always busy, and a client waits for the others' turns: then
latency = clients × time of one request. The CPU time of a request is told too, because on a machine
with other work it is what can be compared.
"""

import argparse
import http.client
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = "/api/results?where=method+%3D%3D+%27dpfp%27&sort=accuracy&limit=50"
LOADS = {  # paths, seconds of pause, whether by one client only
    "alone": (("/", "/api/version", "/api/version", "/api/version", ROWS), 0.0, True),
    "pages": (("/api/version",), 2.0, False),
    "mixed": (("/", "/api/version", "/api/version", "/api/version", ROWS), 0.0, False),
    "version": (("/api/version",), 0.0, False),
}
PATIENCE = 300.0  # seconds


def make_records(folder: Path, count: int) -> None:
    """Files as a store has them; not through the store, which waits for the disk each time."""
    sys.path[:0] = [str(ROOT)]
    from dpfp_ray.results.store import file_name
    from tests.support.samples import comparison, with_statement

    kinds = [with_statement(record) for record in comparison(seeds=1)]
    rng = random.Random(0)
    (folder / "records").mkdir(parents=True)
    for number in range(count):
        record = kinds[number % len(kinds)]
        name = f"made-{number}"
        record["trial"] |= {"id": name, "seed_index": number // len(kinds)}
        record["plan"]["learning_rate"] = 10 ** rng.uniform(-6, -3)
        record["metrics"]["accuracy"] = rng.uniform(0.5, 0.9)
        (folder / "records" / f"{file_name(name)}.json").write_text(json.dumps(record))
    old = time.time() - 3600
    for path in (folder / "records").iterdir():
        os.utime(path, (old, old))


def client(port: int, load: str, clients: int, seconds: float) -> None:
    """Runs in a process of its own; prints {path: [seconds, …]}."""
    paths, pause, alone = LOADS[load]
    clients = 1 if alone else clients
    times: dict[str, list[float]] = {path: [] for path in paths}
    end = time.monotonic() + seconds

    def one(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        time.sleep(pause * number / clients)
        for path in cycle(paths):
            if time.monotonic() > end:
                return
            began = time.perf_counter()
            connection.request("GET", path, headers={"Accept": "text/html" if path == "/" else "*"})
            answer = connection.getresponse()
            answer.read()
            times[path].append(time.perf_counter() - began)
            assert answer.status == 200, answer.status
            time.sleep(pause)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(times))


def ask(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", path, headers={"Accept": "text/html"})
    return connection.getresponse().read()


def first_page(port: int, count: int) -> tuple[float, float]:
    """Seconds until a page came at all, and until one with all records came."""
    began, first = time.monotonic(), 0.0
    while True:
        try:
            found = json.loads(ask(port, "/api/version"))["trials"]
            ask(port, "/")
            first = first or time.monotonic() - began
            if found == count:
                return first, time.monotonic() - began
        except OSError:
            pass
        if time.monotonic() - began > PATIENCE:
            raise SystemExit("the records were never all there")
        time.sleep(0.2)


def cpu_by_process(session: int) -> dict[str, float]:
    """CPU seconds so far of the server's processes, by what they are."""
    found: dict[str, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(stat[3]) == session:
            name = next((n for n in ("ProxyActor", "ServeReplica") if n in title), "the rest")
            found[name] = found.get(name, 0.0) + (int(stat[11]) + int(stat[12])) / 100
    return found


def measure(port: int, session: int, clients: int, seconds: float) -> Iterator[dict[str, Any]]:
    for load in LOADS:
        before, load_before = cpu_by_process(session), os.getloadavg()[0]
        words = ["--client", load, "--port", str(port), "--clients", str(clients)]
        run = subprocess.run(
            [sys.executable, __file__, *words, "--seconds", str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        after, times = cpu_by_process(session), json.loads(run.stdout)
        total = sum(map(len, times.values()))
        cpu = {name: 1000 * (after[name] - before.get(name, 0.0)) / total for name in after}
        for path, took in times.items():
            cuts = statistics.quantiles(took, n=100)
            yield {
                "load": load,
                "path": path.split("?")[0] + ("?where=…" if "?" in path else ""),
                "requests": len(took),
                "a second": len(took) / seconds,
                "p50 ms": 1000 * cuts[49],
                "p95 ms": 1000 * cuts[94],
                "max ms": 1000 * max(took),
                **{f"CPU ms, {name}": value for name, value in cpu.items()},
                "machine's load": (load_before + os.getloadavg()[0]) / 2,
            }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each kind of load")
    parser.add_argument("--port", type=int, default=18_750)
    parser.add_argument("--output", help="also write the table to this file")
    parser.add_argument("--client", choices=LOADS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.client:
        client(arguments.port, arguments.client, arguments.clients, arguments.seconds)
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended in any case
    world = Path(tempfile.mkdtemp(prefix="service-", dir="/tmp"))
    make_records(world / "store", arguments.records)
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "dpfp_ray.cli", "serve", "--storage", str(world / "store")),
            *("--port", str(arguments.port), "--ledger", str(world / "ledger")),
        ],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(world)},
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()  # its address: it listens
        first, whole = first_page(arguments.port, arguments.records)
        rows = list(measure(arguments.port, server.pid, arguments.clients, arguments.seconds))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(PATIENCE)
        shutil.rmtree(world, ignore_errors=True)
    found = (
        f"{arguments.records:,} records, {arguments.clients} clients; first page after "
        f"{first:.1f} s, one with all records after {whole:.1f} s.\n\n{table(rows)}"
    )
    print(found)
    if arguments.output:
        Path(arguments.output).write_text(report(found, arguments))
    return 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for row in rows:
        cells = [f"{v:,.1f}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(found: str, arguments: argparse.Namespace) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    words = f"benchmarks/service.py --records {arguments.records} --clients {arguments.clients}"
    return (
        "# The results service under load\n\n"
        f"`{words}` on {now}; {machine}. The kinds of load: the program's first lines.\n\n"
        f"{found}\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
