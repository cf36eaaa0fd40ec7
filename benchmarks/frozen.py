"""Accuracy on a frozen encoder: the methods whose guarantee is proved, and their honest rivals.

  python benchmarks/frozen.py --task sst2 --data-dir /path/to/SST-2 --seeds 3
  python benchmarks/frozen.py --task sst2 --data-dir /path/to/SST-2 --only "objpert;moments" \
      --rows mean layers layers,centred

One pass of the encoder (cached), then every method at every ε on every kind of row. Prints a
Markdown table of dev accuracy, mean ± standard deviation over seeds; committed results are in
benchmarks/frozen.md.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np

from dpfp_ray.plan.values import make_plan
from dpfp_ray.training.loop import Finished
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.prepare import Inputs, Run, build_model, load_inputs, prepare
from dpfp_ray.training.train import run_events

METHODS: dict[str, dict[str, Any]] = {
    "objpert": {"method": "objpert"},
    "moments": {"method": "dpfp", "mode": "moments"},
    "moments, ridge 1": {"method": "dpfp", "mode": "moments", "ridge": 1.0},
    "moments, ridge 2": {"method": "dpfp", "mode": "moments", "ridge": 2.0},
    "moments, ridge auto": {"method": "dpfp", "mode": "moments", "ridge": "auto"},
    "release_once": {"method": "dpfp", "mode": "release_once"},
    "release_once, ridge auto": {"method": "dpfp", "mode": "release_once", "ridge": "auto"},
    "release_once, prior dev": {"method": "dpfp", "mode": "release_once", "prior": "dev"},
    "release_once, label ε = ε/4": {"method": "dpfp", "mode": "release_once", "label_share": 0.25},
    "dpsgd, head": {"method": "dpsgd", "scope": "head"},
    "dpfp paper, head (nominal ε)": {"method": "dpfp", "scope": "head"},
    "non_private, head: no noise": {"method": "non_private", "scope": "head"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="demo")
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--max-train", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--epsilons", default="0.1,1,3,8")
    parser.add_argument("--rows", nargs="+", default=["mean"], help="representations[,centred]")
    parser.add_argument("--only", default="", help="names of methods, with ; between them")
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    epsilons = [float(text) for text in arguments.epsilons.split(",")]
    named = [name for name in arguments.only.split(";") if name] or list(METHODS)
    common = {
        "task": arguments.task,
        "data_dir": arguments.data_dir,
        "model": arguments.model,
        "max_train": arguments.max_train,
    }

    def score(values: dict[str, Any], inputs: Inputs) -> str:
        """Seeds are fixed, so that the table can be made again: nothing here is for release."""
        prepared = prepare(make_plan(values), inputs)
        found, started = [], time.perf_counter()
        for seed in range(arguments.seeds):
            *_, finished = run_events(Run(prepared, seed), build_model(prepared, seed))
            assert isinstance(finished, Finished)
            found.append(finished.record["metrics"]["accuracy_last"])
        seconds = (time.perf_counter() - started) / arguments.seeds
        print(f"{values} {found} {seconds:.2f} s a run", file=sys.stderr, flush=True)
        spread = f" ± {np.std(found, ddof=1):.4f}" if len(found) > 1 else ""
        return f"{np.mean(found):.4f}{spread}"

    print("| dev accuracy | rows | " + " | ".join(f"ε = {one:g}" for one in epsilons) + " |")
    print("| --- | --- |" + " --- |" * len(epsilons))
    for kind in arguments.rows:
        representation = kind.removesuffix(",centred")
        centred = representation != kind
        rows = {"representation": representation, "centring": "dev" if centred else "none"}
        inputs = load_inputs(make_plan({**common, **rows, "scope": "head"}))
        for name in named:
            values = {**common, **rows, **METHODS[name]}
            share = values.pop("label_share", None)
            if values["method"] == "non_private":
                cells = [score(values, inputs)] + [""] * (len(epsilons) - 1)
            else:
                cells = [
                    score(
                        {
                            **values,
                            "epsilon": epsilon,
                            **({} if share is None else {"label_epsilon": share * epsilon}),
                        },
                        inputs,
                    )
                    for epsilon in epsilons
                ]
            shown = representation + (", centred" if centred else "")
            print(f"| {name} | {shown} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
