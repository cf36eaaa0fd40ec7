"""Run by tests/sweeps/test_cluster.py as a process of its own: Ray's starts take too long.

`python -m tests.support.ray_slow_start` has a session whose first two starts time out, then one
whose first does. It prints, as JSON, the error's one line, the number of nodes, and how many
folders of Ray's the second left.
"""

import json
import os
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dpfp_ray.sweeps.cluster import connected, ray_folder, settings
from dpfp_ray.system.errors import UserError


def main() -> None:
    with settings():
        import ray
        from ray._private import node, services

        find_node, start = services.get_node, node.Node.__init__
        late = iter((True, True, True, False))

        def never(*_: Any, **__: Any) -> None:
            raise RuntimeError("the node is not there yet")

        def slow_start(self: Any, *arguments: Any, **options: Any) -> None:
            slow = next(late)
            services.get_node = never if slow else find_node
            clock = count(step=10)  # ten seconds at a look: Ray gives up after four of them
            timer = (lambda: float(next(clock))) if slow else time.monotonic
            node.time = SimpleNamespace(**{**vars(time), "monotonic": timer})
            start(self, *arguments, **options)

        node.Node.__init__ = slow_start
        found: dict[str, Any] = {}
        try:
            with connected("local"):
                raise AssertionError("Ray has started")
        except UserError as error:
            found["error"] = str(error)
        before = sessions()
        with connected("local"):
            found["nodes"] = len(ray.nodes())
        found["folders"] = len(sessions() - before)
    print(json.dumps(found))


def sessions() -> set[Path]:
    return set(ray_folder().glob(f"session_*_{os.getpid()}"))


if __name__ == "__main__":
    main()
