"""What a sweep wastes: its wall time against pure training time shared out over the slots.

    .venv/bin/python benchmarks/sweep_overhead.py --output benchmarks/sweep_overhead.md

16 short trials of MiniLM on the demo task, two at a time. "Pure" is what the loop itself measures
(training and evaluation), so the ratio holds all that Ray and we add: workers' start and imports,
rebuilding models, reports, records, Tune's event loop. Ray's own start-up is shown apart. A second
sweep, of closed-form trials on one cached release, shows how many trials a minute go through.
"""

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SLOTS = 2
TRAINING = {"task": "demo", "model": "minilm", "method": "dpfp", "epochs": 1, "accountant": "gdp"}
CLOSED_FORM = {"task": "demo", "model": "minilm", "mode": "moments", "max_train": 2000}


def sweep(values: list[dict[str, Any]], storage: str) -> dict[str, float]:
    """Run the trials and say where the time went."""
    from dpfp_ray.results.store import Store
    from dpfp_ray.sweeps.resources import RayOptions
    from dpfp_ray.sweeps.runner import Runner
    from dpfp_ray.sweeps.sweep_trials import InputsOnce, bind_trial

    inputs_of = InputsOnce()
    trials = [bind_trial(value, inputs_of) for value in values]
    options = RayOptions(concurrency=SLOTS, cpus_per_worker=1)
    with Runner("overhead", storage, options, inputs_of) as runner:
        started = time.time()
        runner._connect()
        connected = time.time()
        runner.run(trials, varied=["learning_rate"])
        ended = time.time()
    records = Store(storage).records()
    assert all(record["finished"] for record in records), "a trial failed"
    pure = sum(r["cost"]["train_seconds"] + r["cost"]["eval_seconds"] for r in records)
    first = min(record["trial"]["started_at"] for record in records)
    return {
        "trials": len(records),
        "ray": connected - started,
        "until_first": first - connected,
        "wall": ended - first,
        "pure": pure,
        "longest": max(record["trial"]["seconds"] for record in records),
    }


def report(found: dict[str, float], closed: dict[str, float], load: float) -> str:
    share = found["pure"] / SLOTS
    rate = closed["trials"] / closed["wall"] * 60
    return f"""# What a sweep adds to training

`benchmarks/sweep_overhead.py`, {os.cpu_count()} cores, {SLOTS} trials at a time; load average
before the start: {load:.1f}.

| {found["trials"]:.0f} trials of MiniLM | |
| --- | --- |
| pure training and evaluation, all trials | {found["pure"]:.1f} s |
| the same ÷ {SLOTS} slots | {share:.1f} s |
| wall time from the first trial's start | {found["wall"]:.1f} s |
| **ratio** (bar: ≤ 1.15) | **{found["wall"] / share:.3f}** |
| longest trial | {found["longest"]:.1f} s |
| Ray's start-up, before | {found["ray"]:.1f} s |
| sharing inputs and starting workers, before | {found["until_first"]:.1f} s |

| {closed["trials"]:.0f} closed-form trials (mode moments) on a cached release | |
| --- | --- |
| wall time from the first trial's start | {closed["wall"]:.1f} s |
| **trials a minute** (bar: ≥ 300) | **{rate:.0f}** |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--rows", type=int, default=300, help="training records of a trial")
    parser.add_argument("--closed-form", type=int, default=100, help="closed-form trials")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    size = {"max_train": arguments.rows, "max_dev": 200}
    training = [
        {**TRAINING, **size, "learning_rate": 1e-5 * 1.2**n} for n in range(arguments.trials)
    ]
    closed = [
        {**CLOSED_FORM, "max_dev": 200, "ridge": 0.05 * 1.05**n}
        for n in range(arguments.closed_form)
    ]
    with TemporaryDirectory() as folder:
        text = report(sweep(training, f"{folder}/a"), sweep(closed, f"{folder}/b"), load)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
