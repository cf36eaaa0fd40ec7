"""The smallest input that still does it: delta debugging (Zeller 2002), in short."""

from collections.abc import Callable, Sequence
from typing import TypeVar

MOST = 400  # tries
Piece = TypeVar("Piece", int, str)


def minimise(
    payload: bytes | tuple[str, ...], fails: Callable[[bytes | tuple[str, ...]], bool]
) -> bytes | tuple[str, ...]:
    """`payload` with as much taken away as `fails` allows."""
    tries = MOST

    def still(candidate: bytes | tuple[str, ...]) -> bool:
        nonlocal tries
        tries -= 1
        return tries > 0 and fails(candidate)

    if isinstance(payload, bytes):
        return bytes(_shrink(list(payload), lambda left: still(bytes(left))))
    words = _shrink(list(payload), lambda left: still(tuple(left)))
    for place, word in enumerate(words):

        def with_word(letters: Sequence[str], place: int = place) -> bool:
            return still((*words[:place], "".join(letters), *words[place + 1 :]))

        words[place] = "".join(_shrink(list(word), with_word))
    return tuple(words)


def _shrink(whole: list[Piece], fails: Callable[[list[Piece]], bool]) -> list[Piece]:
    size = max(1, len(whole) // 2)
    while whole:
        start, shrunk = 0, False
        while start < len(whole):
            candidate = whole[:start] + whole[start + size :]
            if fails(candidate):
                whole, shrunk = candidate, True
            else:
                start += size
        if size == 1 and not shrunk:
            break
        size = max(1, size // 2)
    return whole
