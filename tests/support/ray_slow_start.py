"""Run by tests/sweeps/test_cluster.py as a process of its own: Ray's first COUNT starts time out.

`python -m tests.support.ray_slow_start COUNT` prints, as JSON, the number of nodes or the error's
one line, and how many folders of Ray's it left.
"""

import json
import os
import sys
import time
from itertools import count
from types import SimpleNamespace
from typing import Any

from dpfp_ray.plan.errors import UserError
from dpfp_ray.sweeps.cluster import connected, ray_folder, settings


def main(failing: int) -> None:
    with settings():
        import ray
        from ray._private import node, services

        find_node, start = services.get_node, node.Node.__init__
        starts = count(1)

        def never(*_: Any, **__: Any) -> None:
            raise RuntimeError("the node is not there yet")

        def slow_start(self: Any, *arguments: Any, **options: Any) -> None:
            late = next(starts) <= failing
            services.get_node = never if late else find_node
            clock = count(step=10)  # ten seconds at a look: Ray gives up after four of them
            timer = (lambda: float(next(clock))) if late else time.monotonic
            node.time = SimpleNamespace(**{**vars(time), "monotonic": timer})
            start(self, *arguments, **options)

        node.Node.__init__ = slow_start
        found: dict[str, Any] = {}
        try:
            with connected("local"):
                found["nodes"] = len(ray.nodes())
        except UserError as error:
            found["error"] = str(error)
    found["folders"] = len(list(ray_folder().glob(f"session_*_{os.getpid()}")))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
