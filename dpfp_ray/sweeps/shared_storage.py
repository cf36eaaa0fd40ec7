"""Does every machine of the cluster see the store? A folder of one machine would lose trials."""

from pathlib import Path
from typing import Any

from dpfp_ray.data.storage import open_files
from dpfp_ray.plan.errors import UserError

PATIENCE = 120.0  # seconds; a node that does not answer by then is not asked again


def check_seen_everywhere(storage: str, marker: str, nodes: list[dict[str, Any]]) -> None:
    """A UserError if a node does not see the file `marker` that the driver has put into the store.

    `nodes` are as `ray.nodes()` tells them. What is behind a URI is the same for all.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    files = open_files(storage)
    if not files.local:
        return
    path = str(Path(files.name) / marker)
    asked = {}
    for node in nodes:
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        look: Any = ray.remote(Path.exists).options(num_cpus=0, scheduling_strategy=here)
        asked[look.remote(Path(path))] = node
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE)
    for answer in answered:
        if not ray.get(answer):
            name = asked[answer].get("NodeManagerHostname") or asked[answer]["NodeID"]
            raise UserError(
                f"--storage {storage} is not the same folder on {name}; use one that all machines "
                f"share (NFS), or a URI such as s3://bucket/folder"
            )
