"""Ctrl-C (SIGINT) and SIGTERM: both end the work in order, and say so at once.

The exit code of a command is 128 + the signal's number, as in a shell: 130 or 143.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The user asked to stop; its message says where the run is saved, if it is.

    A KeyboardInterrupt, so that a notebook's loop over runs ends with it and `except Exception`
    does not take it for a failure.
    """

    def __init__(self, message: str = "", number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


_last_signal: int = signal.SIGINT


def signal_of(error: KeyboardInterrupt) -> int:
    """The number of the signal that `error` stands for; Ray raises a KeyboardInterrupt of its own
    in place of ours."""
    return int(getattr(error, "number", _last_signal))


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


@contextmanager
def stopped_by_signals(answer: str = "") -> Iterator[None]:
    """Both signals raise Interrupted, after the line `answer` on stderr."""
    global _last_signal
    _last_signal = signal.SIGINT

    def stop(number: int, frame: FrameType | None) -> None:
        global _last_signal
        _last_signal = number
        if answer:
            with suppress(RuntimeError):  # the signal has interrupted another line on stderr
                print(answer, file=sys.stderr, flush=True)
        raise Interrupted(number=number)

    with handling(signal.SIGINT, stop), handling(signal.SIGTERM, stop):
        yield


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """A second Ctrl-C during the clean-up must not leave half of Ray running."""
    with handling(signal.SIGINT, signal.SIG_IGN), handling(signal.SIGTERM, signal.SIG_IGN):
        yield
