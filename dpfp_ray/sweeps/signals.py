"""Signals while Ray runs: a sweep that is told to end ends in order."""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a sweep as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with handling(signal.SIGTERM, stop):
        yield


def ignoring_ctrl_c() -> AbstractContextManager[None]:
    """A second Ctrl-C during the clean-up must not leave half of Ray running."""
    return handling(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    """`handler` for a signal; only the main thread may set one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, old)
