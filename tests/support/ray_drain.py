"""Run by tests/sweeps/test_experiment.py as a process of its own: a machine that will go.

`python -m tests.support.ray_drain` has two nodes, drains the one that works, and prints, as JSON,
what a process on the other one notices: before, then, and after.
"""

import json
import time

from dpfp_ray.sweeps.cluster import settings
from tests.support.ray_runs import wait_for
from tests.support.ray_start import start_patiently


class Worker:
    """Keeps its node busy: an idle one would be gone at once."""

    def works(self) -> bool:
        return True


def main() -> None:
    with settings():
        import ray
        from ray._raylet import GcsClient
        from ray.cluster_utils import Cluster
        from ray.core.generated import autoscaler_pb2

        from dpfp_ray.sweeps import experiment

        start = {"initialize_head": True, "head_node_args": {"num_cpus": 1}}
        cluster = start_patiently(lambda: Cluster(**start))
        cluster.add_node(num_cpus=1, resources={"spot": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        experiment.NOTICE_SECONDS = 0.0
        notices = experiment.Notices()
        found = [notices.new()]
        work = ray.remote(num_cpus=0, resources={"spot": 1})(Worker).remote()
        (spot,) = (node["NodeID"] for node in ray.nodes() if node["Resources"].get("spot"))
        assert ray.get(work.works.remote())
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int(1000 * time.time()) + 60_000
        GcsClient(address=cluster.gcs_address).drain_node(spot, reason, "spot", deadline)
        found += [wait_for(notices.new, "the notice", seconds=60), notices.new()]
        del work
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
