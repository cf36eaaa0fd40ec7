"""What it costs to protect persons instead of records, at equal ε, on the demo's sentences.

The demo has no authors: its rows are put together by chance into persons with 1 to 57 rows, half of
them with 2 to 5. Both units see the same rows and the same dev persons.

    python examples/user_level.py [METHOD ...] [EPSILON ...]

METHOD: moments, release_once, objpert, dpsgd:head (these four if none is given), dpsgd:bias. The
last one trains in the encoder, for minutes a run: it has one seed and fewer persons.
"""

import statistics
import sys
import tempfile
from dataclasses import replace
from typing import Any

from dpfp_ray import Plan, train
from dpfp_ray.data import Split
from dpfp_ray.data.split import subset
from dpfp_ray.data.tasks import load_task

METHODS: dict[str, dict[str, Any]] = {
    "moments": {"mode": "moments"},
    "release_once": {"mode": "release_once"},
    "objpert": {"method": "objpert"},
    "dpsgd:head": {"method": "dpsgd", "scope": "head"},
    "dpsgd:bias": {"method": "dpsgd", "scope": "bias", "epochs": 8},
}
IN_THE_ENCODER = "dpsgd:bias"
PERSONS = 1000  # of 2,326, where the encoder is trained
SHARE = 4  # and a quarter of the units a step, of either kind: few steps, and as many rows in each

task = load_task(Plan(task="demo", user_column="made_up"))


def columns(split: Split) -> dict[str, list[str]]:
    return {"text": split.texts, "label": [task.label_names[y] for y in split.labels]}


def accuracies(plan: Plan, records: Split, by_person: bool, seeds: int) -> list[float]:
    dev = columns(task.dev["dev"])
    if by_person:
        dev["user"] = [f"dev {i}" for i in range(len(dev["text"]))]
    if plan.scope == "bias":
        plan = replace(plan, batch_size=(records.units if by_person else len(records)) // SHARE)
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as ledger:
            run = train(
                plan,
                data=columns(records),
                dev=dev,
                users=records.users if by_person else None,
                seed=seed,
                reporter="silent",
                ledger=ledger,
            )
        found.append(run.accuracy)
    return found


def shown(found: list[float]) -> str:
    spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.3f}{spread}"


budgets = [float(given) for given in sys.argv[1:] if given not in METHODS] or [1.0, 3.0, 8.0]
chosen = [given for given in sys.argv[1:] if given in METHODS]
print("| method | records | persons | ε | one record | one person | cost |")
print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
for name in chosen or [name for name in METHODS if name != IN_THE_ENCODER]:
    slow = name == IN_THE_ENCODER
    records = subset(task.train, PERSONS) if slow else task.train
    for epsilon in budgets:
        plan = Plan(epsilon=epsilon, representation="mean", **METHODS[name])
        record, person = (
            accuracies(plan, records, by_person, 1 if slow else 5) for by_person in (False, True)
        )
        cost = statistics.mean(record) - statistics.mean(person)
        print(
            f"| {name} | {len(records):,} | {records.units:,} | {epsilon:g} "
            f"| {shown(record)} | {shown(person)} | {cost:+.3f} |",
            flush=True,
        )
