"""Writes dpfp.json, the Grafana dashboard: `python dashboards/build.py`.

Needs Grafana 11 or later. All that is shown comes from the gauges of dpfp_ray/sweeps/progress.py.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("dpfp.json")
WIDTH = 24  # of Grafana's grid
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'sweep=~"$sweep", method=~"$method"'
SWEEP = 'sweep=~"$sweep"'
WHOLE = "$__range"  # the time that the dashboard shows
LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
RECENT = "5m"  # bridges the time from one save of a trial to the next
TRIAL = "sweep, trial, method, task, epsilon_budget"
NOMINAL = (
    "**ε marked `nominal` is no proved guarantee**: the method's assumptions do not hold for it "
    "(docs/privacy.md). `proved` is a theorem for the stated neighbours. Numbers of a trial appear "
    "at its reports and saves, half a minute apart; *gdp* is the paper's central-limit accountant "
    "and understates ε."
)


def newest(name: str, by: str, window: str, more: str = "") -> str:
    """A trial's last value in `window`, from the process that got furthest: one that died and was
    restarted elsewhere leaves a series behind."""
    furthest = f"topk by (sweep, trial) (1, last_over_time(ray_dpfp_step{{{CHOSEN}}}[{window}]))"
    value = f"last_over_time(ray_dpfp_{name}{{{CHOSEN}{more}}}[{window}])"
    return f"max by ({by}) ({value} and on (sweep, trial, WorkerId) {furthest})"


def count(status: str, by: str = "", window: str = WHOLE) -> str:
    grouped = f" by ({by})" if by else ""
    chosen = f'{CHOSEN}, status="{status}"'
    # A sweep that is run again is another driver: the last one's count holds.
    each = f"max by (sweep, method) (last_over_time(ray_dpfp_trials{{{chosen}}}[{window}]))"
    return f"sum{grouped} ({each})"


def query(expression: str, legend: str = "", *, letter: str = "A", instant: bool = False) -> Any:
    return {
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": expression,
        "format": "table" if instant else "time_series",
        "instant": instant,
        "legendFormat": legend,
        "range": not instant,
        "refId": letter,
    }


def panel(kind: str, title: str, width: int, height: int, targets: list[Any], **keys: Any) -> Any:
    defaults = {"unit": keys.pop("unit", "short"), **keys.pop("field", {})}
    return {
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
        **keys,
    }


def number(title: str, expression: str, color: str = "text", **keys: Any) -> Any:
    steps: list[dict[str, Any]] = [{"color": "text", "value": None}]
    if color != "text":
        steps.append({"color": color, "value": 1})
    field = {"thresholds": {"mode": "absolute", "steps": steps}, **keys.pop("field", {})}
    target = {**query(expression, instant=True), "format": "time_series"}
    options = {"reduceOptions": LAST}
    return panel("stat", title, 4, 4, [target], options=options, field=field, **keys)


def legend(mode: str, *numbers: str) -> Any:
    return {
        "calcs": list(numbers),
        "displayMode": mode,
        "placement": "bottom",
        "showLegend": True,
    }


def curves(title: str, targets: list[Any], width: int = 12, **keys: Any) -> Any:
    field = {"custom": {"spanNulls": True, "showPoints": "auto"}, **keys.pop("field", {})}
    options = {
        "legend": legend("table", "lastNotNull"),
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel("timeseries", title, width, 9, targets, options=options, field=field, **keys)


def joined(names: dict[str, str], hidden: list[str]) -> list[Any]:
    """One row a trial from several instant queries; `names` are columns in order."""
    rename = {f"Value #{letter}": name for letter, name in names.items()}
    order = {name: place for place, name in enumerate([*rename, *TRIAL.split(", ")])}
    return [
        {"id": "joinByField", "options": {"byField": "trial", "mode": "outer"}},
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(hidden, True),
                "indexByName": order,
                "renameByName": rename,
            },
        },
    ]


def spent(by: str, window: str) -> str:
    return newest("epsilon_spent", by, window, ', accountant=~"$accountant"')


def paid(name: str, by: str) -> str:
    """What the privacy ledger says, planned runs included."""
    return f"max by ({by}) (last_over_time(ray_dpfp_ledger_{name}{{{SWEEP}}}[{WHOLE}]))"


def panels() -> list[list[Any]]:
    """Rows of panels; the first of each row is its title."""
    trial = "{{method}} ε={{epsilon_budget}} {{trial}}"
    accuracy = newest("accuracy", f"{TRIAL}, guarantee", WHOLE)
    planned = f"sum (max by (sweep) (last_over_time(ray_dpfp_trials_planned{{{SWEEP}}}[{WHOLE}])))"
    best = f"max ({accuracy})"
    overview = {
        "A": ("accuracy", accuracy),
        "B": ("ε spent", spent("trial", WHOLE)),
        "C": ("σ", newest("sigma", "trial", WHOLE)),
        "D": ("dev loss", newest("dev_loss", "trial", WHOLE)),
        "E": ("step", newest("step", "trial", WHOLE)),
        "F": ("examples/s", newest("examples_per_second", "trial", WHOLE)),
    }
    both = {letter: overview[letter] for letter in ("B", "A")}
    times = ["Time", *(f"Time {number}" for number in range(1, 7))]

    def tables(chosen: dict[str, tuple[str, str]]) -> list[Any]:
        return [query(e, letter=letter, instant=True) for letter, (_, e) in chosen.items()]

    def titles(chosen: dict[str, tuple[str, str]]) -> dict[str, str]:
        return {letter: title for letter, (title, _) in chosen.items()}

    by_method = {"id": "partitionByValues", "options": {"fields": ["method"]}}
    return [
        [
            "Sweep overview",
            number("trials planned", planned),
            number("finished", count("finished"), "green"),
            # A driver that was killed never says that nothing runs any more.
            number("running", count("running", window="1m"), "blue", field={"noValue": "0"}),
            number("stopped early", count("stopped")),
            number("failed", count("failed"), "red"),
            number("best dev accuracy", best, unit="none", field={"decimals": 4}),
            panel(
                "gauge",
                "ε spent / total, of the people in the data",
                WIDTH,
                5,
                [
                    query(paid("epsilon", "sweep, guarantee"), "spent ({{guarantee}})"),
                    query(paid("total", "sweep"), "total", letter="B"),
                ],
                options={"reduceOptions": LAST},
                field={"decimals": 2, "min": 0},
                unit="none",
            ),
            panel(
                "table",
                "trials",
                WIDTH,
                10,
                tables(overview),
                transformations=joined(titles(overview), times),
                field={"decimals": 4},
                unit="none",
                options={"sortBy": [{"displayName": "accuracy", "desc": True}]},
            ),
            panel(
                "text",
                "how to read ε",
                WIDTH,
                3,
                [],
                options={"mode": "markdown", "content": NOMINAL},
            ),
        ],
        [
            "Accuracy against ε",
            panel(
                "xychart",
                "dev accuracy against ε spent, by $accountant: a point a trial",
                12,
                9,
                tables(both),
                transformations=[*joined(titles(both), times), by_method],
                options={"mapping": "auto", "series": [], "legend": legend("list")},
                field={"custom": {"show": "points"}},
                unit="none",
            ),
            curves(
                "dev accuracy over time",
                [query(newest("accuracy", TRIAL, RECENT), trial)],
                unit="percentunit",
            ),
        ],
        [
            "Budget spent against time",
            curves(
                "ε spent, by $accountant",
                [
                    query(
                        spent(f"{TRIAL}, guarantee, accountant", RECENT),
                        f"{trial} ({{{{guarantee}}}})",
                    )
                ],
            ),
            curves(
                "ε spent, by accountant: the largest of each method",
                [
                    query(
                        f"max by (method, accountant, guarantee) "
                        f"(last_over_time(ray_dpfp_epsilon_spent{{{CHOSEN}}}[{RECENT}]))",
                        "{{method}} {{accountant}} ({{guarantee}})",
                    )
                ],
            ),
        ],
        [
            "Throughput per method",
            curves(
                "training rows a second and trial, mean of each method",
                [
                    query(
                        f"avg by (method) ({newest('examples_per_second', TRIAL, RECENT)})",
                        "{{method}}",
                    )
                ],
            ),
            curves(
                "loss: of dev rows, and of training rows where it is shown",
                [
                    query(newest("dev_loss", TRIAL, RECENT), f"{trial} dev", letter="A"),
                    query(newest("loss", TRIAL, RECENT), f"{trial} training", letter="B"),
                ],
            ),
        ],
        [
            "Failures",
            curves(
                "failed trials",
                [query(count("failed", "sweep, method"), "{{sweep}} {{method}}")],
                field={"decimals": 0, "min": 0},
            ),
            curves(
                "restarts after a lost process or node",
                [
                    query(
                        f"max by (sweep, method) "
                        f"(last_over_time(ray_dpfp_restarts{{{CHOSEN}}}[{WHOLE}]))",
                        "{{sweep}} {{method}}",
                    )
                ],
                field={"decimals": 0, "min": 0},
            ),
        ],
    ]


def placed(rows: list[list[Any]]) -> list[Any]:
    """Panels with their ids and places, left to right, top to bottom."""
    out: list[Any] = []
    y = 0
    for title, *content in rows:
        row = {"type": "row", "title": title, "collapsed": False, "panels": []}
        out.append({**row, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        y, x, height = y + 1, 0, 0
        for one in content:
            size = one["gridPos"]
            if x + size["w"] > WIDTH:
                y, x, height = y + height, 0, 0
            out.append({**one, "gridPos": {"x": x, "y": y, **size}})
            x, height = x + size["w"], max(height, size["h"])
        y += height
    return [{"id": number, **one} for number, one in enumerate(out, start=1)]


def variable(name: str, label: str) -> Any:
    """A choice among the values that a tag has."""
    expression = f"label_values(ray_dpfp_trials, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": expression, "refId": "A"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def accountants() -> Any:
    names = ("pld", "rdp", "gdp")
    options = [{"text": name, "value": name, "selected": name == "pld"} for name in names]
    return {
        "name": "accountant",
        "label": "accountant",
        "type": "custom",
        "query": ",".join(names),
        "options": options,
        "current": options[0],
    }


def dashboard() -> dict[str, Any]:
    return {
        "uid": "dpfp-ray",
        "title": "dpfp-ray: private fine-tuning sweeps",
        "tags": ["dpfp-ray", "ray"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                variable("sweep", "sweep"),
                variable("method", "method"),
                accountants(),
            ]
        },
        "annotations": {"list": []},
        "panels": placed(panels()),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
