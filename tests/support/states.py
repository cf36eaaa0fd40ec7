"""Saved states of runs, whole and damaged."""

from pathlib import Path
from typing import Any

import torch

from dpfp_ray.plan.plan import Plan
from dpfp_ray.training.loop import Progress


def whole_state(plan: Plan, step: int) -> dict[str, Any]:
    """A state with all that the loop of a version before this one has saved."""
    return {
        "plan_hash": plan.hash,
        "noise_multiplier": 1.5,
        "epsilon": {},
        "progress": vars(Progress(step)),
        "loss_sum": 0.0,
        "loss_rows": 0,
        "model": {"w": torch.arange(3.0)},
        "optimizer": {"state": {}, "param_groups": []},
    }


def flip_byte(path: Path, where: float) -> None:
    """One wrong byte at this share of the file's length."""
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 0x10
    path.write_bytes(content)
