"""The CPU threads and the peak memory of a run, and how workers add up what each has computed.

The loop asks for sums only. torch's DistributedDataParallel averages instead and hides when it does
so; a private step must add noise once, to the sum, and divide by the public B.
"""

import contextlib
import ctypes
import functools
import gc
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfp_ray.methods.parts.base import steady
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


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


freeze_modules = functools.cache(gc.freeze)  # searching modules takes longer than a short trial


@functools.cache
def keep_freed_memory() -> None:
    """Once a process, before steps on a CPU: what a step frees is there for the next one.

    glibc gives blocks of 32 MB and more, such as the gradient of the word embeddings, back to the
    system at once, and asks for them again page by page: 12,000 page faults in a step of MiniLM, a
    twentieth of its time (benchmarks/profile.md). Between runs `reset_peak_memory` gives it back.
    """
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak of what ran before, and give back what it has left behind."""
    gc.collect()
    freeze_modules()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # another trial's process may share the GPU
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):  # glibc keeps freed memory for itself
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # elsewhere the peak is the process's, since its start
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the high-water mark to now


def await_device(device: torch.device) -> None:
    """Before a clock is read: a GPU may still have steps to do that the host has long asked for."""
    if device.type == "cuda":
        torch.zeros((), device=device).item()  # there when all before it on the stream is done


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


@contextlib.contextmanager
def repeatable(private: bool, device: torch.device) -> Iterator[None]:
    """In here a private run on a GPU adds up in a fixed order.

    A step that is repeated then has the same sum under the same noise, as it has on a CPU: two sums
    that differ in a last digit, under equal noise, would show that digit without noise.
    """
    if not private or device.type != "cuda":
        yield
        return
    deterministic: Any = torch.utils.deterministic
    kept = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0])
        deterministic.fill_uninitialized_memory = kept[1]


def free_memory(device: torch.device) -> None:
    """Give back what a step that was broken off has left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


SHARE = 0.8  # of a GPU's free memory, for what a step keeps for its backward pass
STATE_BYTES = 16  # a trained weight: gradient, Adam's two numbers, and the sum's copy


def token_budget(model: Classifier, plan: Plan) -> int | None:
    """Tokens of a part of a step, padding included, that fit a GPU's free memory; None on a CPU."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens = int(SHARE * max(0, free - STATE_BYTES * trained) / bytes_of_token(model, plan))
    return max(1, steady(tokens))


def bytes_of_token(model: Classifier, plan: Plan) -> float:
    """What a step keeps of a token until its backward pass, about; docs/gpu.md holds it against
    simulated peaks. In a layer of width h that widens to i: inputs, query, key, value, attention,
    two sums and their norms, and what widens before and after its activation, 10 h + 2.5 i."""
    config: Any = getattr(getattr(model, "encoder", None), "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    if layers is None:
        return 16.0 * model.width
    width = int(config.hidden_size)
    layer = 10 * width + 2.5 * (getattr(config, "intermediate_size", None) or 4 * width)
    if getattr(config, "_attn_implementation", "eager") == "eager":
        layer += 3 * config.num_attention_heads * plan.max_length
    if plan.gradient_checkpointing:  # of one layer all, of the others what came in
        kept = layer if "clipping" in plan.spec.uses else width  # ghost norms keep all the same
        return 4.0 * (layers * kept + layer)
    return 4.0 * layers * layer


class Comm(Protocol):
    rank: int
    world_size: int

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all workers."""


class SoloComm:
    """One process: every sum is already complete."""

    rank, world_size = 0, 1

    def sum_(self, tensors: Sequence[Tensor]) -> None: ...


class TorchComm:
    """The workers of the current torch.distributed process group (gloo or NCCL)."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        # What is sent, of each dtype and device. Kept: new memory of a model's size costs more each
        # step than all the rest of the sum, as the machine must clear it page by page.
        self.kept: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        if self.world_size == 1:  # the copies below would be a tenth of a step
            return
        # One message for each dtype instead of one for each tensor: latency dominates on a laptop.
        # In order of appearance: a set's order differs between processes, and they must agree.
        messages = {
            dtype: [tensor for tensor in tensors if tensor.dtype == dtype]
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
        }
        # All memory first: once a message is sent, no worker can take the step again.
        for dtype, chosen in messages.items():
            key, size = (dtype, chosen[0].device), sum(tensor.numel() for tensor in chosen)
            if key not in self.kept or self.kept[key].numel() < size:
                self.kept[key] = chosen[0].new_empty(size)
        for dtype, chosen in messages.items():
            sizes = [tensor.numel() for tensor in chosen]
            flat = self.kept[dtype, chosen[0].device][: sum(sizes)]
            torch.cat([tensor.reshape(-1) for tensor in chosen], out=flat)
            torch.distributed.all_reduce(flat)
            sums = flat.split(sizes)
            for tensor, total in zip(chosen, sums, strict=True):
                tensor.copy_(total.view_as(tensor))


def share(rows: int, comm: Comm) -> slice:
    return slice(rows * comm.rank // comm.world_size, rows * (comm.rank + 1) // comm.world_size)
