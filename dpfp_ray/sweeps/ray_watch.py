"""The death of a Ray that was started on this machine, which is noticed at once.

Ray itself waits a minute for a dead GCS or raylet, then ends the whole process with a dump. All
that is finished is on storage by then, and what runs has been saved: there is nothing to wait for.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dpfp_ray.system.errors import UserError

LOOK_SECONDS = 0.5
# How long the main thread may take to leave Ray's calls; those that hang are left by force.
GRACE_SECONDS = 6.0


class RayDied(UserError):
    """At the end of the process, Ray waits a minute for what has died and then exits with 1."""

    at_once = True


def dead_part() -> str | None:
    """The first of Ray's own processes here that has ended; None while all run."""
    from ray._private import worker

    node: Any = worker._global_node
    ended = [] if node is None else [name for name, _ in node.dead_processes()]
    return next((name for name in ("gcs_server", "raylet") if name in ended), None)


class RayWatch:
    """A thread that looks; `lost` says which part has died."""

    def __init__(self, clean_up: Callable[[], None]) -> None:
        """`clean_up` ends what is left of Ray; it is called before the process ends by force."""
        self.lost: str | None = None
        self.clean_up = clean_up
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True, name="ray watch")

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()

    @property
    def line(self) -> str:
        return (
            f"Ray's {self.lost} on this machine has died; what was done is saved, and the same "
            f"command continues"
        )

    def _look(self) -> None:
        while not self.ended.wait(LOOK_SECONDS):
            with suppress(Exception):  # Ray is being shut down
                self.lost = dead_part()
            if self.lost is not None:
                break
        if self.lost is None:
            return
        import _thread

        _thread.interrupt_main()
        if not self.ended.wait(GRACE_SECONDS):
            print(f"dpfp: {self.line}", file=sys.stderr, flush=True)
            self.clean_up()
            os._exit(2)
