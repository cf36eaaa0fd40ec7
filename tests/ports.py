"""Ports that stay free until a test uses them."""

import random
import socket
from contextlib import suppress

# Below what Linux hands out by itself (from 32768), above what Ray gives its workers (to 19999): a
# port that is found free here is not taken by a passer-by a moment later.
RANGE = (20_000, 32_000)


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.randint(*RANGE)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


def free_port() -> int:
    return free_ports(1)[0]
