"""Run by tests/sweeps/test_cluster.py as a process of its own: a head without cores whose
autoscaler may start two more nodes, and a sweep that needs them.

Prints on its last line, as JSON, the records and how many nodes there were: at most, and at last.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

from dpfp_ray.sweeps.cluster import RayOptions, connected, settings
from dpfp_ray.sweeps.driver import Runner
from dpfp_ray.sweeps.trial import InputsOnce, Trial
from tests.support.ray_head import Head, ray_head
from tests.support.ray_runs import SEED, records, wait_for

MOST = 2  # nodes besides the head


def main(folder: Path) -> None:
    trials = [Trial.from_config(c) for c in json.loads((folder / "trials.json").read_text())]

    def growing(address: str) -> Path:
        config = folder / "autoscaling.json"
        config.write_text(json.dumps(autoscaling(address)))
        return config

    with settings(), ray_head("token", 0, growing) as head:
        join(head)
        most = grown_sweep(head, trials, folder / "sweep")
        with connected(head.address):
            wait_for(lambda: living() == 1, "the nodes to be given back")
            left = living()
    print(json.dumps({"records": records(folder / "sweep"), "most": most, "left": left}))


def autoscaling(address: str) -> dict[str, Any]:
    """What Ray's own `AutoscalingCluster` starts a head with. It cannot be used: it first ends
    all Ray on this machine (`ray stop --force`), and reads a file that the wheel leaves out."""
    node = {"resources": {"CPU": 1, "object_store_memory": 100 * 2**20}, "node_config": {}}
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    commands = ("initialization", "setup", "head_setup", "worker_setup")
    commands += ("head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "growing",
        "max_workers": MOST,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "available_node_types": {
            "ray.head.default": head,
            "one": {**node, "min_workers": 0, "max_workers": MOST},
        },
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in commands},
    }


def join(head: Head) -> None:
    import os

    os.environ.update(
        {name: head.environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    )


def living() -> int:
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def grown_sweep(head: Head, trials: list[Trial], storage: Path) -> int:
    """Run the trials; the most nodes that there were."""
    seen = [0]
    ended = threading.Event()

    def watch() -> None:
        import ray

        while not ended.wait(0.5):
            if ray.is_initialized():
                seen.append(living())

    options = RayOptions(address=head.address, seed=SEED, concurrency=MOST, cpus_per_worker=1)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with Runner("grows", str(storage), options, InputsOnce()) as runner:
        runner.run(trials, varied=["learning_rate"])
        ended.set()
        watcher.join()
    return max(seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
