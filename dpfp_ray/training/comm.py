"""How the workers of one run add up what each of them has computed.

The loop asks for sums only. torch's DistributedDataParallel averages instead and hides when it does
so; a private step must add noise once, to the sum, and divide by the public B.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Comm(Protocol):
    rank: int
    world_size: int

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all workers."""
        ...


class SoloComm:
    """One process: every sum is already complete."""

    rank = 0
    world_size = 1

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        return


class TorchComm:
    """The workers of the current torch.distributed process group (gloo or NCCL)."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        # One message for each dtype instead of one for each tensor: latency dominates on a laptop.
        # In order of appearance: a set's order differs between processes, and they must agree.
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
            torch.distributed.all_reduce(flat)
            sums = flat.split([tensor.numel() for tensor in chosen])
            for tensor, total in zip(chosen, sums, strict=True):
                tensor.copy_(total.view_as(tensor))


def share(rows: int, comm: Comm) -> slice:
    """This worker's contiguous part of `rows` rows; parts differ by at most one row."""
    return slice(rows * comm.rank // comm.world_size, rows * (comm.rank + 1) // comm.world_size)
