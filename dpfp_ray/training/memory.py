"""Peak memory of one run, also when several runs share a process."""

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch


def reset_peak(device: torch.device) -> None:
    """Forget the peak of what ran before, and give back what it has left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):  # glibc keeps freed memory for itself
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # elsewhere the peak is the process's, since its start
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the high-water mark to now


def peak(device: torch.device) -> int:
    """Bytes: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
