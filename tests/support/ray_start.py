"""Starting Ray in tests: one at a time on this machine, and again if it gives up.

Ray allows its own start 30 seconds, and no setting changes that; two that start side by side on two
busy cores take longer.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

TRIES = 3
T = TypeVar("T")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait for a turn among all test processes of this machine.

    The lock is a name that the kernel frees when its holder ends, however that comes about.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind("\0dpfp-test-ray-start")
                break
            except OSError:
                time.sleep(0.2)
        yield


def start_patiently(start: Callable[[], T]) -> T:
    """What `start` returns; it is called up to three times."""
    for left in reversed(range(TRIES)):
        try:
            with one_at_a_time():
                return start()
        except Exception:  # Ray raises a bare one when it gives up
            if not left:
                raise
    raise AssertionError("unreachable")


def start_here(**options: Any) -> None:
    """A Ray of this process's own, started as the product starts it."""
    from dpfp_ray.sweeps.cluster import start_local

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    start_patiently(lambda: start_local({"address": "local", **quiet, **options}))
