"""What one worker gets, and how many trials run side by side, on the nodes that there are."""

from dataclasses import dataclass
from typing import Any

from dpfp_ray.plan.errors import UserError


@dataclass(frozen=True)
class Resources:
    cpus_per_worker: int
    gpus_per_worker: float
    workers: int
    slots: int  # trials at a time


def plan_resources(
    nodes: list[dict[str, Any]],
    workers: int = 1,
    cpus: int | None = None,
    gpus: float = 0.0,
    concurrency: int | None = None,
) -> Resources:
    """Fill the nodes without oversubscribing them; a worker does not span nodes.

    By default a worker has one thread, which gives the most trials an hour (threads wait for each
    other); cores that would otherwise be idle are given to the workers.

    >>> plan_resources([{"CPU": 8}])
    Resources(cpus_per_worker=1, gpus_per_worker=0.0, workers=1, slots=8)
    >>> plan_resources([{"CPU": 8}], concurrency=2).cpus_per_worker
    4
    """

    def places(cpus: int) -> int:
        return sum(_fits(node, cpus, gpus) for node in nodes)

    wanted = workers * (concurrency or 1)
    if cpus is None:
        cpus = 1
        if gpus and not concurrency:
            wanted = max(workers, places(1))
        if gpus or concurrency or workers > 1:
            while places(cpus + 1) >= wanted:
                cpus += 1
    if places(cpus) < workers:
        have = ", ".join(
            f"{node.get('CPU', 0):g} CPUs" + (f" and {node['GPU']:g} GPUs" if gpus else "")
            for node in ({"GPU": 0.0, **node} for node in nodes)
        )
        need = f"{cpus} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        raise UserError(
            f"{workers} workers of {need} each do not fit the cluster ({have}); use fewer "
            f"--workers, --cpus-per-worker{' or --gpus-per-worker' if gpus else ''}"
        )
    slots = places(cpus) // workers
    return Resources(cpus, gpus, workers, min(concurrency or slots, slots))


def _fits(node: dict[str, Any], cpus: int, gpus: float) -> int:
    """How many such workers fit on one node."""
    count = int(node.get("CPU", 0) // cpus)
    return min(count, int(node.get("GPU", 0) / gpus + 1e-9)) if gpus else count
