"""Ask every query of the Grafana dashboard (dashboards/dpfp.json) and say which find no data.

Examples, while a sweep runs:

  dpfp dashboard check
  dpfp dashboard check --prometheus http://localhost:9090

Without --prometheus a private Prometheus is started for the check, with dashboards/prometheus.yml.
Exits with 1 if a query finds nothing. See dashboards/README.md for how to look at the dashboard.
"""

import argparse
import signal
from typing import TYPE_CHECKING

from dpfp_ray.files import to_json

if TYPE_CHECKING:
    from dpfp_ray.dashboard_check import Answer

DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="check: ask every query")
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


def command(arguments: argparse.Namespace) -> int:
    import json

    from dpfp_ray.dashboard_check import (
        DASHBOARD,
        Prometheus,
        check,
        private_prometheus,
        read_queries,
    )

    queries = read_queries(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    if arguments.prometheus:
        answers = check(Prometheus(arguments.prometheus), queries, arguments.wait)
    else:
        # A polite kill must not leave our Prometheus behind.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with private_prometheus(arguments.discovery) as prometheus:
                answers = check(prometheus, queries, arguments.wait)
        finally:
            signal.signal(signal.SIGTERM, before)

    def row(answer: "Answer") -> dict[str, object]:
        query = answer.query
        facts = {"panel": query.panel, "expression": query.expression}
        return {**facts, "series": answer.series, "error": answer.error or None}

    if arguments.json:
        print(to_json([row(answer) for answer in answers]))
    else:
        show(answers)
    return 0 if all(answer.series for answer in answers) else 1


def show(answers: "list[Answer]") -> None:
    from dpfp_ray.terminal import stderr, stdout

    for answer in answers:
        count = answer.error or (f"{answer.series} series" if answer.series else "NO DATA")
        stdout.print(f"{answer.query.panel}: {count}", markup=False)
        stdout.print(f"    {answer.query.expression}", markup=False, soft_wrap=True)
    empty = sum(not answer.series for answer in answers)
    if empty:
        stderr.print(
            f"{empty} of {len(answers)} queries found no data; Ray shows a trial's numbers only "
            f"while it runs: check during a sweep of a private method",
        )
