"""Peak memory that forgets what ran before."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dpfp_ray.training import machine

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MEGABYTE = 2**20
linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux can reset the peak"
)


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
def test_a_reset_gives_back_what_small_tensors_have_used() -> None:
    machine.reset_peak_memory(CPU)
    calm = machine.peak_memory(CPU)
    many = [torch.ones(1000) for _ in range(50_000)]  # 200 MB, too small to be mapped one by one
    del many
    machine.reset_peak_memory(CPU)
    assert machine.peak_memory(CPU) < calm + 50 * MEGABYTE


def test_the_fallback_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = machine.peak_memory(CPU)

    def no_proc(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", no_proc)
    assert sys.platform == "darwin" or machine.peak_memory(CPU) >= 0.5 * exact
    assert machine.peak_memory(CPU) < 2**40


def test_a_system_without_the_reset_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refused)
    machine.reset_peak_memory(CPU)
    assert machine.peak_memory(CPU) > 0


@linux
def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = "from dpfp_ray.training.machine import process_seconds; print(process_seconds())"
    began = time.monotonic()
    age = float(subprocess.check_output([sys.executable, "-c", code]))
    assert 0 < age <= time.monotonic() - began + 0.1
