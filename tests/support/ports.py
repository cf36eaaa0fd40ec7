"""Ports that nobody else takes between being found and being used."""

import random
import socket
from contextlib import suppress

# Below what Linux hands out by itself (from 32768), above what Ray gives its workers (to 19999).
RANGE = (20_000, 32_000)
_kept: list[socket.socket] = []  # one a port, open until this process ends


def free_ports(count: int) -> list[int]:
    """Ports that are free, and that no other test process on this machine is given.

    A port is claimed by binding a name that the kernel frees with the process: nothing is written.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randint(*RANGE)
        claim = socket.socket(socket.AF_UNIX)
        with suppress(OSError), socket.socket() as probe:
            claim.bind(f"\0dpfp-test-port-{port}")
            probe.bind(("127.0.0.1", port))
            _kept.append(claim)
            found.append(port)
    return found


def free_port() -> int:
    return free_ports(1)[0]
