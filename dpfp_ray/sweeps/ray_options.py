"""Where the trials of a sweep run, and with how much of it."""

from dataclasses import dataclass, field
from typing import Any, TypedDict

from dpfp_ray.sweeps.cluster import default_address
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
