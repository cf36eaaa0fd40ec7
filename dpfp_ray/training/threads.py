"""CPU threads, set on purpose: workers that oversubscribe their cores run ten times slower."""

import os

import torch

from dpfp_ray.plan.errors import UserError


def available_cores() -> int:
    """The cores that this process may use, which a container may have fewer of than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(count: int | None) -> None:
    """Let torch use `count` threads (default: one for each core this process may use)."""
    if count is not None and count < 1:
        raise UserError(f"threads is {count}; give a whole number of 1 or more")
    torch.set_num_threads(count or available_cores())
