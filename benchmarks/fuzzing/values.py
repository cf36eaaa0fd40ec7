"""Odd values, and ways to spoil good ones. All draw from the random numbers that they are given."""

import copy
from random import Random
from typing import Any

LONG = 5_000  # characters; beyond what a path or a name may have
NUMBERS = (0, -1, 1, 2, 3.5, 1e-300, 1e308, -1e308, 10**30, 2**63, -(2**63), 1e-9)
NOT_NUMBERS = (float("nan"), float("inf"), float("-inf"), "nan", "1e999", "٣", "0x10", "1_000", "²")
TEXTS = (
    "",
    " ",
    "\t",
    "\n",
    "a\nb",
    "\0",
    "a\0b",
    "\r\n",
    "\x1b[31mred\x1b[0m",
    "\u202eevil",
    "\ufeff",
    "\u2028",
    "é" * 300,
    "𝒳😀",
    "\udcff",
    "x" * LONG,
    "=1+1",
    "<script>alert(1)</script>",
    "%s%n{0}{x!r}",
    "'; drop table runs; --",
    "null",
    "true",
    "no",
    "~",
    "*x",
    "&x",
    "!!python/object/apply:os.system [id]",
)
PATHS = (
    "../../../../etc/passwd",
    "/etc/passwd",
    "/",
    ".",
    "..",
    "~",
    "~nobody-at-all/x",
    "/dev/null",
    "/proc/self/mem",
    "/nowhere/at/all.csv",
    "file:///etc/passwd",
    "s3://",
    "s3:///x",
    "nosuch://x/y",
    "://",
    "a/" * 400 + "x.csv",
    "x" * 300,
    "-",
    "--help",
    "con\0trol.csv",
)


def odd(rng: Random) -> Any:
    """Something that is rarely right."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(NOT_NUMBERS)
    if kind == 3:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice(PATHS)
    if kind == 5:
        return [odd(rng) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {str(odd_text(rng)): odd(rng) for _ in range(rng.randrange(3))}
    return rng.uniform(-10, 10) * 10 ** rng.randrange(-12, 20)


def odd_text(rng: Random) -> str:
    return str(rng.choice((*TEXTS, *PATHS, *NOT_NUMBERS, *NUMBERS)))


def deep(rng: Random, open_: str = "[", close: str = "]") -> str:
    depth = rng.choice((50, 900, 5_000, 100_000))
    return open_ * depth + (close * depth if rng.random() < 0.7 else "")


def spoil(value: Any, rng: Random) -> Any:
    """A copy of JSON-like data with one place of it changed, dropped, doubled or moved."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return odd(rng)
        holder, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[odd_text(rng)] = holder.pop(key)
        elif kind == 2:
            holder[key] = {"again": holder[key]} if rng.random() < 0.5 else [holder[key]]
        else:
            holder[key] = odd(rng)
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield value, key
        if isinstance(item, dict | list) and item:
            yield from _places(item)


def spoil_bytes(content: bytes, rng: Random) -> bytes:
    """One to three small accidents of a file."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(found) + 1)
        kind = rng.randrange(7)
        if kind == 0:
            del found[place:]
        elif kind == 1 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del found[place : place + rng.randrange(1, 40)]
        elif kind == 3:
            found[place:place] = found[place : place + rng.randrange(1, 200)]
        elif kind == 4:
            found[place:place] = odd_text(rng).encode("utf-8", "surrogatepass")
        elif kind == 5:
            found[place:place] = rng.randbytes(rng.randrange(1, 20))
        elif rng.random() < 0.3:
            found = bytearray(
                bytes(found)
                .decode("utf-8", "replace")
                .encode(rng.choice(("utf-16", "latin1")), "replace")
            )
    return bytes(found)
