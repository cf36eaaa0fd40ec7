"""Accuracy on a frozen encoder: the modes whose guarantee is proved, and their honest rivals.

  python benchmarks/frozen.py --task sst2 --data-dir /path/to/SST-2 --seeds 3

One pass of the encoder (cached), then every method at every ε. Prints a Markdown table of dev
accuracy, mean ± standard deviation over seeds; committed results are in benchmarks/frozen.md.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np

from dpfp_ray.plan.values import make_plan
from dpfp_ray.training import run
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.prepare import load_inputs, prepare

EPSILONS = (0.1, 1.0, 3.0, 8.0)
METHODS: dict[str, dict[str, Any]] = {
    "moments": {"method": "dpfp", "mode": "moments"},
    "release_once": {"method": "dpfp", "mode": "release_once"},
    "release_once, prior dev": {"method": "dpfp", "mode": "release_once", "prior": "dev"},
    "release_once, label ε = ε/4": {"method": "dpfp", "mode": "release_once", "label_share": 0.25},
    "dpsgd, head": {"method": "dpsgd", "scope": "head"},
    "dpfp paper, head (nominal ε)": {"method": "dpfp", "scope": "head"},
}
REFERENCE = "non_private, head: no noise, last epoch"


class Silent:
    def step(self, *_: Any) -> None: ...
    def epoch(self, *_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="demo")
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default="", help="rows whose name starts so")
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    common = {"task": arguments.task, "data_dir": arguments.data_dir, "model": arguments.model}
    inputs = load_inputs(make_plan({**common, "scope": "head"}))

    def score(values: dict[str, Any]) -> str:
        """Seeds are fixed, so that the table can be made again: nothing here is for release."""
        prepared = prepare(make_plan({**common, **values}), inputs)
        found, started = [], time.perf_counter()
        for seed in range(arguments.seeds):
            record, _ = run.run(prepared, Silent(), seed=seed)
            found.append(record["metrics"]["accuracy_last"])
        seconds = (time.perf_counter() - started) / arguments.seeds
        print(f"{values} {found} {seconds:.2f} s a run", file=sys.stderr)
        return f"{np.mean(found):.4f} ± {np.std(found, ddof=1):.4f}"

    print("| dev accuracy | " + " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS) + " |")
    print("| --- |" + " --- |" * len(EPSILONS))
    for name, values in METHODS.items():
        if not name.startswith(arguments.only):
            continue
        cells = []
        for epsilon in EPSILONS:
            chosen = {key: value for key, value in values.items() if key != "label_share"}
            if "label_share" in values:
                chosen["label_epsilon"] = values["label_share"] * epsilon
            cells.append(score({**chosen, "epsilon": epsilon}))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if REFERENCE.startswith(arguments.only):
        reference = score({"method": "non_private", "scope": "head"})
        print(f"| {REFERENCE} | {reference} |" + " |" * (len(EPSILONS) - 1))


if __name__ == "__main__":
    main()
