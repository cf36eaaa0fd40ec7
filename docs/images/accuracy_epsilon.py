"""Makes accuracy_epsilon.png. Stopped, the same command continues: it repeats no finished run.

Heads on a frozen MiniLM by methods with proved guarantees; the head, and the whole encoder, by the
DP-FP paper's Algorithm 1, whose ε is nominal. The whole encoder is also audited, at each ε.
"""

import shutil
from pathlib import Path
from typing import Any

from dpfp_ray import Plan, audit, report, train

RUNS, PICTURE = Path("runs/picture"), Path(__file__).with_name("accuracy_epsilon.png")
DATA: dict[str, Any] = {"task": "demo", "max_train": 400, "max_dev": 400}
HEADS: dict[str, dict[str, Any]] = {
    "dpsgd-head": {"method": "dpsgd", "scope": "head"},
    "dpfp-head": {"method": "dpfp", "scope": "head"},
    "moments": {"method": "dpfp", "mode": "moments"},
    "release_once": {"method": "dpfp", "mode": "release_once"},
}

for run in range(3):  # every run draws a secret seed of its own
    plain = Plan(method="non_private", scope="head", **DATA)
    train(plan=plain, output=RUNS / f"non_private-head-{run}", threads=1)
    for epsilon in (1.0, 3.0, 8.0):
        for name, values in HEADS.items():
            plan = Plan(epsilon=epsilon, delta=1e-5, **DATA, **values)
            train(plan, output=RUNS / f"{name}-{epsilon:g}-{run}", threads=1)
for epsilon in (1.0, 3.0, 8.0):
    plan = Plan(method="dpfp", epsilon=epsilon, delta=1e-5, learning_rate=2e-4, epochs=2, **DATA)
    train(plan, output=RUNS / f"dpfp-{epsilon:g}", threads=1)
    audit(plan, output=RUNS / f"audit-dpfp-{epsilon:g}", canaries=200, threads=1)
made = report(RUNS, output=RUNS / "report", title="Accuracy against ε")
shutil.copy(made.index.parent / "figures/epsilon-1.png", PICTURE)
