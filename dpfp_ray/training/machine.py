"""What a run takes of its machine: CPU threads, and peak memory even if runs share a process."""

import contextlib
import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import torch

from dpfp_ray.plan.errors import UserError


def available_cores() -> int:
    """The cores that this process may use, which a container may have fewer of than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(count: int | None) -> None:
    """Let torch use `count` threads (default: one for each core this process may use).

    Set on purpose: workers with more threads than cores run ten times slower.
    """
    if count is not None and count < 1:
        raise UserError(f"threads is {count}; give a whole number of 1 or more")
    torch.set_num_threads(count or available_cores())


def process_seconds() -> float | None:
    """How long ago this process was started; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        up = float(Path("/proc/uptime").read_text().split()[0])
        return up - int(ticks) / os.sysconf("SC_CLK_TCK")
    return None


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak of what ran before, and give back what it has left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):  # glibc keeps freed memory for itself
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # elsewhere the peak is the process's, since its start
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the high-water mark to now


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
