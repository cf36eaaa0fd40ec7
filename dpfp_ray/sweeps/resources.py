"""Where the trials of a sweep run, and what each worker gets of the nodes."""

from dataclasses import dataclass, field
from typing import Any, TypedDict

from dpfp_ray.sweeps.cluster import default_address
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.checkpoints import save_seconds


@dataclass(frozen=True)
class RayOptions:
    """Where to run and with how much; what the command line's Ray flags say."""

    address: str = "local"
    workers: int = 1
    cpus_per_worker: int | None = None
    gpus_per_worker: float = 0.0
    concurrency: int | None = None
    seed: int | None = None
    save_every_seconds: float = field(default_factory=save_seconds)
    tracker: str | None = None
    show_training_loss: bool = False


class RayChoices(TypedDict, total=False):
    """Where trials run and with how much; see `RayOptions`.

    address  local starts Ray here (default), auto joins this machine's cluster, or ray://HOST:PORT
    seed     fixes the secret seed, for tests only
    tracker  mlflow, wandb or tensorboard
    save_every  seconds between two saves of a trial (default: 30)
    """

    address: str | None
    workers: int
    cpus_per_worker: int | None
    gpus_per_worker: float
    concurrency: int | None
    seed: int | None
    tracker: str | None
    show_training_loss: bool
    save_every: float | None


def ray_options(choices: RayChoices) -> RayOptions:
    given: dict[str, Any] = {**choices}
    given["save_every_seconds"] = save_seconds(given.pop("save_every", None))
    given["address"] = choices.get("address") or default_address()
    return RayOptions(**given)


def node_resources() -> list[dict[str, Any]]:
    """What each living node of the cluster has."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@dataclass(frozen=True)
class Resources:
    """What one worker gets, and how many trials run side by side, on the nodes that there are."""

    cpus_per_worker: int
    gpus_per_worker: float
    workers: int
    slots: int  # trials at a time, at most


def plan_resources(
    nodes: list[dict[str, Any]],
    workers: int = 1,
    cpus: int | None = None,
    gpus: float = 0.0,
    concurrency: int | None = None,
    *,
    may_grow: bool = False,
) -> Resources:
    """Fill the nodes without oversubscribing them; a worker does not span nodes.

    Where the cluster `may_grow`, `concurrency` trials are asked for whatever there is now: those
    that do not fit wait, and what waits is what an autoscaler brings machines for.

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
    asked = concurrency if may_grow else None
    if places(cpus) < workers and asked is None:
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
    return Resources(cpus, gpus, workers, asked or min(concurrency or slots, slots))


def _fits(node: dict[str, Any], cpus: int, gpus: float) -> int:
    """How many such workers fit on one node."""
    count = int(node.get("CPU", 0) // cpus)
    return min(count, int(node.get("GPU", 0) / gpus + 1e-9)) if gpus else count
