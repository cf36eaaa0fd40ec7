"""Run by tests/sweeps/test_cluster.py as a process of its own: a cluster of three nodes on
one machine, trials spread over it, one trial's process and another one's node killed.

Prints the records as JSON on its last line.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from dpfp_ray.sweeps.cluster import RayOptions, settings
from dpfp_ray.sweeps.driver import Runner
from dpfp_ray.sweeps.trial import InputsOnce, Trial
from tests.support.ray_runs import PATIENCE, SEED, records, saved_trials, wait_for
from tests.support.ray_start import start_patiently

CPUS = 1  # of each node


def main(folder: Path) -> None:
    trials = [Trial.from_config(c) for c in json.loads((folder / "trials.json").read_text())]
    with settings():
        cluster, nodes = start_patiently(start)
        try:
            spread = disturbed_sweep(cluster, nodes, trials, folder / "spread")
        finally:
            import ray

            ray.shutdown()
            cluster.shutdown()
    print(json.dumps(spread))


def start() -> tuple[Any, list[Any]]:
    """A head, which the driver is on, and two nodes that can be lost."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": CPUS,
            "include_dashboard": False,
            "object_store_memory": 100 * 2**20,
            "_system_config": {
                "health_check_period_ms": 1000,
                "health_check_failure_threshold": 3,
                # A killed node refuses at once; one that answers late is only busy.
                "health_check_timeout_ms": 300_000,
            },
        },
    )
    try:
        nodes = [cluster.add_node(num_cpus=CPUS, object_store_memory=100 * 2**20) for _ in range(2)]
        cluster.wait_for_nodes()
    except BaseException:
        cluster.shutdown()
        raise
    return cluster, nodes


def disturbed_sweep(cluster: Any, nodes: list[Any], trials: list[Trial], storage: Path) -> Any:
    """A trial on the head loses its process, one on another node loses its node."""

    def disturb() -> None:
        victims = wait_for(lambda: saved_trials(storage, 3), "three trials to have saved")
        on_head = trial_on(victims, cluster.head_node)
        os.kill(on_head["pid"], signal.SIGKILL)
        elsewhere = trial_on(victims, nodes[-1])
        cluster.remove_node(nodes[-1], allow_graceful=False)
        disturbed.extend(victim["id"] for victim in (on_head, elsewhere))
        seen.extend(victim["node"] for victim in victims)

    disturbed: list[str] = []
    seen: list[str] = []
    run(cluster, trials, storage, disturb, RayOptions(seed=SEED, save_every=0.2))
    return {"records": records(storage), "disturbed": disturbed, "nodes": seen}


def trial_on(trials: list[dict[str, Any]], node: Any) -> dict[str, Any]:
    """The trial that runs on `node`."""
    return next(one for one in trials if node.node_id.startswith(one["node"].split("/")[1]))


def run(
    cluster: Any, trials: list[Trial], storage: Path, disturb: Any, options: RayOptions
) -> None:
    from dataclasses import replace

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    options = replace(options, address=cluster.address, cpus_per_worker=CPUS)
    with Runner("nodes", str(storage), options, InputsOnce()) as runner:
        runner.run(trials, varied=["learning_rate"])
    thread.join(timeout=PATIENCE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
