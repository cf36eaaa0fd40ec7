"""Run by tests/sweeps/test_cluster.py as a process of its own: a Ray with four logical GPUs.

`python -m tests.support.ray_gpus FOLDER` has what Ray assigns on a machine whose GPUs torch does
not see. It prints, as JSON, how trials ended that asked for nothing, and for no GPU; how many ran
side by side; and the lines of what was refused.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dpfp_ray import train
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.sweeps.cluster import RayOptions, connected, settings
from dpfp_ray.sweeps.driver import Runner
from dpfp_ray.sweeps.trial import InputsOnce, bind_trial
from dpfp_ray.system.errors import UserError
from tests.support.ray_runs import records
from tests.support.ray_start import start_here
from tests.support.tiny_models import build_tiny
from tests.support.tiny_runs import tiny_split, write_csv


def main(folder: Path) -> None:
    plan: dict[str, Any] = {
        "train_file": write_csv(folder / "train.csv", 60),
        "dev_file": write_csv(folder / "dev.csv", 20, seed=2),
        "model": build_tiny(folder / "model", "bert", texts=tiny_split(60).texts),
        "representation": "mean",
        "method": "non_private",
        "batch_size": 8,
        "epochs": 1,
    }
    inputs, ledger = InputsOnce(), Ledger(folder / "ledger")
    found: dict[str, Any] = {}

    def run(name: str, **options: Any) -> None:
        trials = [bind_trial(plan, inputs, number) for number in range(2)]
        with Runner(name, str(folder / name), RayOptions(**options), inputs, ledger) as runner:
            runner.run(trials, varied=["learning_rate"])
            found[name] = {"slots": runner.resources.slots}
        found[name]["ends"] = [
            (r["trial"]["status"], r["trial"]["error"], r["environment"].get("device"))
            for r in records(folder / name).values()
        ]

    def refused(name: str, **options: Any) -> None:
        try:
            train(Plan(**plan), reporter="silent", ledger=ledger, **options)
        except UserError as error:
            found[name] = str(error)

    with settings():
        start_here(num_cpus=4, num_gpus=4, include_dashboard=False, object_store_memory=10**8)
        with connected("local"):  # the one that is there
            run("default")
            run("none", gpus_per_worker=0)
            refused("unseen", workers=2)
            refused("1.5", workers=2, gpus_per_worker=1.5)
            refused("half", workers=2, gpus_per_worker=0.5)
            refused("many", workers=5, gpus_per_worker=1)
    found["charged"] = [entry.charged for entry in ledger.entries()]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
