"""Makes accuracy_epsilon.png. Stopped, the same command continues: it repeats no finished run.

Heads on a frozen MiniLM by methods with proved guarantees; the head, and the whole encoder, by the
DP-FP paper's Algorithm 1, whose ε is nominal. The latter is audited at each ε.
"""

import shutil
from pathlib import Path
from typing import Any

from dpfp_ray import Plan, audit, report, train

RUNS, HERE = Path("runs/picture"), Path(__file__).parent
DATA: dict[str, Any] = {"task": "demo", "max_train": 700, "max_dev": 1000}
PAPER = {"method": "dpfp", "learning_rate": 2e-4, "epochs": 2}  # as in `make demo`
METHODS: dict[str, dict[str, Any]] = {
    "dpsgd-head": {"method": "dpsgd", "scope": "head"},
    "dpfp-head": {"method": "dpfp", "scope": "head"},
    "moments": {"method": "dpfp", "mode": "moments"},
    "release_once": {"method": "dpfp", "mode": "release_once"},
    "dpfp": PAPER,
}

for seed in range(3):  # only names of folders: every run draws a seed of its own
    train(
        Plan(method="non_private", scope="head", **DATA),
        output=RUNS / f"non_private-head-{seed}",
        threads=1,
    )
    for epsilon in (1.0, 3.0, 8.0):
        for name, values in METHODS.items():
            plan = Plan(epsilon=epsilon, delta=1e-5, **DATA, **values)
            train(plan, output=RUNS / f"{name}-{epsilon:g}-{seed}", threads=1)
            if values is PAPER and seed == 0:
                audit(plan, output=RUNS / f"audit-{name}-{epsilon:g}", canaries=350, threads=1)
made = report(RUNS, output=RUNS / "report", title="Accuracy against ε")
shutil.copy(made.index.parent / "figures/epsilon-1.png", HERE / "accuracy_epsilon.png")
