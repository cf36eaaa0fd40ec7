"""Memory that is kept and peaks that are forgotten; sums over workers."""

import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dpfp_ray.training import machine
from dpfp_ray.training.machine import TorchComm, share
from tests.support.gloo import run_workers

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MEGABYTE = 2**20
linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux can reset the peak"
)


FAULTS = """
import resource, torch
from dpfp_ray.training.machine import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(16 * 2**20).sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
keep_freed_memory()
print(before, faults())
"""


def allocate(megabytes: int) -> None:
    torch.ones(megabytes * MEGABYTE // 4).sum()


def test_the_peak_counts_what_was_freed_again() -> None:
    before = machine.peak_memory(CPU)
    allocate(200 + before // MEGABYTE)
    assert machine.peak_memory(CPU) - before > 100 * MEGABYTE


@linux
def test_a_reset_forgets_the_peak() -> None:
    machine.reset_peak_memory(CPU)
    calm = machine.peak_memory(CPU)
    allocate(300)
    high = machine.peak_memory(CPU)
    machine.reset_peak_memory(CPU)
    assert high - calm > 250 * MEGABYTE
    assert machine.peak_memory(CPU) < high - 200 * MEGABYTE


@linux
def test_steps_find_the_memory_that_the_last_one_freed() -> None:
    """In a process of its own: it holds for all that comes later."""
    command = [sys.executable, "-c", FAULTS]
    shares = []
    for _ in range(3):  # a machine that is short of memory takes pages back
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        before, after = map(int, done.stdout.split())
        shares.append(after / before)
        if shares[-1] < 0.5:  # none in the end, but it takes two or three blocks to find its place
            return
    pytest.fail(f"shares of pages that were fetched again: {shares}")


@linux
def test_a_reset_gives_back_what_steps_have_kept() -> None:
    machine.keep_freed_memory()
    allocate(300)
    high = machine.peak_memory(CPU)
    machine.reset_peak_memory(CPU)
    assert machine.peak_memory(CPU) < high - 200 * MEGABYTE


def worker(rank: int, world_size: int) -> Any:
    return SimpleNamespace(rank=rank, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 32, 33])
def test_shares_cover_all_rows_once_in_order(rows: int, world_size: int) -> None:
    everyone = list(range(rows))
    shares = [everyone[share(rows, worker(rank, world_size))] for rank in range(world_size)]
    assert list(chain.from_iterable(shares)) == everyone
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def tensors_of(rank: int) -> list[Tensor]:
    """Two dtypes in turn, several shapes, one of them empty and one not contiguous."""
    return [
        torch.full((2, 3), 1.0 + rank),
        torch.tensor(0.25 * (rank + 1), dtype=torch.float64),
        torch.full((4,), 10.0 * (rank + 1)),
        torch.zeros(0),
        (torch.arange(6.0).reshape(2, 3) * (rank + 1)).t(),
        torch.tensor([rank, 1], dtype=torch.int64),
    ]


def sum_tensors() -> list[Tensor]:
    comm = TorchComm()
    assert comm.world_size == 3
    tensors = tensors_of(comm.rank)
    comm.sum_(tensors)
    return tensors


def test_real_workers_all_hold_the_sum(tmp_path: Path) -> None:
    naive = [sum(parts) for parts in zip(*map(tensors_of, range(3)), strict=True)]
    for tensors in run_workers(3, tmp_path, sum_tensors):
        for tensor, expected in zip(tensors, naive, strict=True):
            assert tensor.dtype == expected.dtype  # type: ignore[union-attr]
            assert torch.equal(tensor, expected)  # type: ignore[arg-type]


def test_dtypes_are_sent_in_an_order_that_all_processes_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of a set of dtypes differs between processes, and then they wait for each other."""
    sent: list[torch.dtype] = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: sent.append(flat.dtype))
    kinds = [torch.float64, torch.int32, torch.float32, torch.int64, torch.bfloat16, torch.int16]
    for order in (kinds, kinds[::-1]):
        sent.clear()
        TorchComm().sum_([torch.zeros(2, dtype=kind) for kind in [*order, *kinds]])
        assert sent == order


def test_sums_take_no_new_memory_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", sent.append)
    comm = TorchComm()
    for size in (4, 3, 4):  # an evaluation between two steps sends less
        comm.sum_([torch.ones(size), torch.ones(size)])
    assert [flat.numel() for flat in sent] == [8, 6, 8]
    assert len({flat.data_ptr() for flat in sent}) == 1
