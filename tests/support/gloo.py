"""Real worker processes for tests: torch.distributed with gloo, joined through a file."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

# One server imports these once and forks all workers: importing takes longer than any test's work.
PRELOAD = ["dpfp_ray.training.loop", "torch.distributed"]


def run_workers(
    world_size: int, folder: Path, work: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """What `work(*arguments)` gives in each of `world_size` processes, by rank.

    A worker that waits for a sum which nobody joins fails after the timeout instead of hanging.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    multiprocessing.start_processes(
        _worker,
        (world_size, str(folder), work, arguments),
        nprocs=world_size,
        start_method="forkserver",
    )
    return [torch.load(folder / f"worker-{rank}.pt") for rank in range(world_size)]


def _worker(
    rank: int, world_size: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    torch.save(work(*arguments), Path(folder) / f"worker-{rank}.pt")
    torch.distributed.destroy_process_group()
