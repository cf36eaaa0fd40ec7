"""The price of a sweep against the clock: what `dpfp sweep --dry-run` says, and what then happens.

  python benchmarks/forecast.py            # about 10 minutes on two quiet cores; writes forecast.md

Times are of the whole call, Ray's start included; inputs are encoded beforehand, so that no cache
decides. The bar is 0.7 to 1.3 for sweeps of two minutes and more; a searcher's price is a range.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dpfp_ray import log_uniform, power_of_two, sweep
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.sweeps.cluster import RayOptions
from dpfp_ray.sweeps.sweep import TaskOnce, price_of, settle_space

DEMO: dict[str, Any] = {"task": "demo", "epsilon": 3, "max_dev": 400}
SWEEPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DP-FP on the encoder, tpe": (
        {"batch_size": power_of_two(16, 128), "learning_rate": log_uniform(1e-5, 1e-3)},
        {**DEMO, "method": "dpfp", "max_train": 1200, "epochs": 1},
        {"samples": 10},
    ),
    "DP-SGD on the encoder, grid": (
        {"batch_size": [32, 64, 128], "learning_rate": [1e-4, 1e-3]},
        {**DEMO, "method": "dpsgd", "max_train": 1200, "epochs": 2},
        {"search": "grid"},
    ),
    "DP-FP on a head, random": (
        {"batch_size": power_of_two(16, 256), "learning_rate": log_uniform(1e-3, 1e-1)},
        {**DEMO, "method": "dpfp", "scope": "head", "max_train": 4000, "epochs": 20},
        {"search": "random", "samples": 80},
    ),
}


def main() -> int:
    lines = [
        "| sweep | trials | forecast, s | took, s | took ÷ forecast |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, (parameters, plan, options) in SWEEPS.items():
        with tempfile.TemporaryDirectory() as folder:
            ledger = Ledger(f"{folder}/ledger")
            if plan.get("scope") == "head":  # encodes the rows
                first = {key: value for key, value in plan.items() if key != "epochs"}
                sweep(
                    {"epochs": [1]},
                    plan=first,
                    search="grid",
                    storage=f"{folder}/first",
                    ledger=ledger,
                )
            space = settle_space(
                parameters, plan, None, options.get("search"), options.get("samples")
            )
            low, high = price_of(space, RayOptions(), ledger, TaskOnce())[0].seconds
            began = time.monotonic()
            done = sweep(space, storage=f"{folder}/sweep", ledger=ledger)
            took = time.monotonic() - began
        said = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        ratio = took / ((low + high) / 2)
        lines.append(f"| {name} | {len(done.records)} | {said} | {took:.0f} | {ratio:.2f} |")
        print(lines[-1], file=sys.stderr)
    text = (__doc__ or "").strip().split("\n")[0]
    page = f"# {text}\n\n`python benchmarks/forecast.py`, two cores:\n\n" + "\n".join(lines) + "\n"
    (Path(__file__).parent / "forecast.md").write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
