"""What it costs to protect persons instead of records, at equal ε, on the demo's sentences.

The demo has no authors: its rows are put together by chance into persons with 1 to 57 rows, half of
them with 2 to 5. Both units see the same rows and the same dev persons.

    python examples/user_level.py [EPSILON ...]
"""

import statistics
import sys
import tempfile
from typing import Any

from dpfp_ray import Plan, train
from dpfp_ray.data import Split
from dpfp_ray.data.tasks import load_task

METHODS: dict[str, dict[str, Any]] = {
    "dpfp moments": {"mode": "moments"},
    "dpfp release_once": {"mode": "release_once"},
    "objpert": {"method": "objpert"},
    "dpsgd head": {"method": "dpsgd", "scope": "head"},
}
SEEDS = range(5)

task = load_task(Plan(task="demo", user_column="made_up"))


def columns(split: Split) -> dict[str, list[str]]:
    return {"text": split.texts, "label": [task.label_names[y] for y in split.labels]}


def accuracy(
    settings: dict[str, Any], epsilon: float, users: list[str] | None
) -> tuple[float, float]:
    """Mean over seeds of dev accuracy, and its standard deviation."""
    found = []
    dev = columns(task.dev["dev"])
    if users is not None:
        dev["user"] = [f"dev {i}" for i in range(len(dev["text"]))]
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as ledger:
            run = train(
                Plan(epsilon=epsilon, representation="mean", **settings),
                data=columns(task.train),
                dev=dev,
                users=users,
                seed=seed,
                reporter="silent",
                ledger=ledger,
            )
        found.append(run.accuracy)
    return statistics.mean(found), statistics.stdev(found)


users = task.train.users
assert users is not None
print(f"{len(users):,} records of {task.train.units:,} persons")
print("| method | ε | one record | one person | cost |")
print("| --- | ---: | ---: | ---: | ---: |")
for name, settings in METHODS.items():
    for epsilon in [float(given) for given in sys.argv[1:]] or [1.0, 3.0, 8.0]:
        record, by_chance = accuracy(settings, epsilon, None)
        person, too = accuracy(settings, epsilon, users)
        print(
            f"| {name} | {epsilon:g} | {record:.3f} ± {by_chance:.3f} | {person:.3f} ± {too:.3f} "
            f"| {record - person:+.3f} |",
            flush=True,
        )
