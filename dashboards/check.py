"""Does every query of the Grafana dashboard find data? Asked of a real Prometheus.

For developers of the dashboard, while a sweep runs:

  python dashboards/check.py
  python dashboards/check.py --prometheus http://localhost:9090

Without --prometheus a private one is started, with dashboards/prometheus.yml. Grafana itself is not
needed: a dashboard is JSON, and what it shows are the answers to its queries. Exits with 1 if a
query finds nothing.
"""

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import yaml

from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json

FOLDER = Path(__file__).parent
DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"
DASHBOARD, SETTINGS = FOLDER / "dpfp.json", FOLDER / "prometheus.yml"
RANGE_SECONDS = 3600
# What Grafana would put in: everything is chosen, the last hour is shown.
VARIABLES = {
    "$__range": f"{RANGE_SECONDS}s",
    "$sweep": ".*",
    "$method": ".*",
    "$accountant": "pld",
}
STARTS_WITHIN = 30.0  # seconds; on a busy machine
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Query:
    """One PromQL expression, as Grafana would send it. `instant`: its last value, else a curve."""

    panel: str
    expression: str
    instant: bool


@dataclass(frozen=True)
class Answer:
    query: Query
    series: int
    error: str = ""


def read_queries(dashboard: dict[str, Any]) -> list[Query]:
    """Every query of a dashboard, variables filled in; those of its drop-down lists too."""
    found = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            found.append(Query(panel["title"], fill(target["expr"]), target["instant"]))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
            metric, _, label = asked.partition(", ")
            found.append(Query(f"${variable['name']}", f"group by ({label}) ({metric})", False))
    return found


def fill(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


class Prometheus:
    """The part of a Prometheus server's HTTP API that questions need."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise UserError(f"prometheus {url!r} is no address; give one like http://HOST:9090")
        self.url = url.rstrip("/")

    def ask(self, query: Query) -> Answer:
        now = time.time()
        if query.instant:
            path, more = "query", {"time": f"{now}"}
        else:
            times = {"start": f"{now - RANGE_SECONDS}", "end": f"{now}", "step": "5"}
            path, more = "query_range", times
        parameters = urlencode({"query": query.expression, **more})
        try:
            with urlopen(f"{self.url}/api/v1/{path}?{parameters}", timeout=30) as response:
                return Answer(query, len(json.load(response)["data"]["result"]))
        except HTTPError as error:  # Prometheus says what is wrong with the expression
            return Answer(query, 0, reason(error.read()) or str(error))
        except (URLError, OSError, ValueError, KeyError) as error:
            raise UserError(f"no Prometheus answers at {self.url}: {error}") from None

    def ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def check(prometheus: Prometheus, queries: list[Query], wait: float) -> list[Answer]:
    """Ask until all have data, or `wait` seconds are over."""
    end = time.monotonic() + wait
    while True:
        answers = [prometheus.ask(query) for query in queries]
        broken = any(answer.error for answer in answers)  # which no waiting mends
        if broken or all(answer.series for answer in answers) or time.monotonic() > end:
            return answers
        time.sleep(POLL_SECONDS)


@contextmanager
def private_prometheus(discovery: str, interval: str = "2s") -> Iterator[Prometheus]:
    """A Prometheus of our own with the dashboard's settings, on loopback, gone at the end.

    It asks more often than the settings say: nobody wants to wait for a check.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise UserError(
            "the program prometheus is not installed; apt-get install prometheus, or give the "
            "address of a running one, --prometheus http://HOST:9090"
        )
    if not Path(discovery).exists():
        raise UserError(
            f"{discovery} is missing: no Ray session with a dashboard runs on this machine; start "
            f"a sweep, or name the session's file with --discovery"
        )
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    settings["global"] = {"scrape_interval": interval, "scrape_timeout": interval}
    settings["scrape_configs"][0]["file_sd_configs"][0]["files"] = [discovery]
    with tempfile.TemporaryDirectory(prefix="dpfp-prometheus-") as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(yaml.safe_dump(settings))
        address = f"127.0.0.1:{free_port()}"
        command = [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
        # A polite kill must not leave our Prometheus behind; one that comes while it is being
        # started is heeded once there is somebody to end it.
        kills: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, _: kills.append(number))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            if kills:
                raise KeyboardInterrupt
            yield started(process, f"http://{address}")
        finally:
            process.terminate()
            process.communicate()
            signal.signal(signal.SIGTERM, before)


def started(process: "subprocess.Popen[bytes]", url: str) -> Prometheus:
    prometheus = Prometheus(url)
    end = time.monotonic() + STARTS_WITHIN
    while not prometheus.ready():
        if process.poll() is not None or time.monotonic() > end:
            process.terminate()
            output = " ".join(process.communicate()[0].decode(errors="replace").split())
            raise UserError(f"prometheus does not start: {output[-300:] or 'it says nothing'}")
        time.sleep(0.1)
    return prometheus


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", metavar="URL", help="a running server to ask")
    parser.add_argument(
        "--discovery",
        default=DISCOVERY,
        metavar="FILE",
        help=f"where Ray lists its nodes (default: {DISCOVERY})",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for data (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print the answers as a JSON list")
    try:
        return ask(parser.parse_args(argv))
    except UserError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def ask(arguments: argparse.Namespace) -> int:
    queries = read_queries(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    if arguments.prometheus:
        answers = check(Prometheus(arguments.prometheus), queries, arguments.wait)
    else:
        with private_prometheus(arguments.discovery) as prometheus:
            answers = check(prometheus, queries, arguments.wait)

    def row(answer: Answer) -> dict[str, object]:
        query = answer.query
        facts = {"panel": query.panel, "expression": query.expression}
        return {**facts, "series": answer.series, "error": answer.error or None}

    if arguments.json:
        print(to_json([row(answer) for answer in answers]))
    else:
        show(answers)
    return 0 if all(answer.series for answer in answers) else 1


def show(answers: list[Answer]) -> None:
    for answer in answers:
        count = answer.error or (f"{answer.series} series" if answer.series else "NO DATA")
        print(f"{answer.query.panel}: {count}")
        print(f"    {answer.query.expression}")
    empty = sum(not answer.series for answer in answers)
    if empty:
        print(
            f"{empty} of {len(answers)} queries found no data; Ray shows a trial's numbers only "
            "while it runs: check during a sweep of a private method",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
