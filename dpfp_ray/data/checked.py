"""Bytes that tell whether they are still what was written.

A checksum is put after them, where torch and others who know nothing of it do not look. Bytes of a
version before, without one, are taken as they are.
"""

import hashlib
import os
from pathlib import Path
from typing import IO

MARK = b"dpfp-checksum-1:"
DIGEST = 16  # bytes
TRAILER = len(MARK) + DIGEST


class Damaged(ValueError):
    """What was read is not what was written; the message says what is wrong."""


class ChecksumWriter:
    """A stream to write through; `finish` puts the checksum of all that was written at its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.digest = hashlib.blake2b(digest_size=DIGEST)

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self.stream.write(content)

    def flush(self) -> None:
        self.stream.flush()

    def finish(self) -> None:
        self.stream.write(MARK + self.digest.digest())


def with_checksum(content: bytes) -> bytes:
    return content + MARK + hashlib.blake2b(content, digest_size=DIGEST).digest()


def without_checksum(content: bytes, required: bool = False) -> bytes:
    """What was written, without its checksum; Damaged if it has changed.

    `required`: it was written with one, so that without one it has lost its end.
    """
    if content[-TRAILER:-DIGEST] != MARK:
        if required:
            raise Damaged("its checksum is missing")
        return content
    kept, digest = content[:-TRAILER], content[-DIGEST:]
    if hashlib.blake2b(kept, digest_size=DIGEST).digest() != digest:
        raise Damaged("its checksum does not match")
    return kept


def check_file(path: Path) -> None:
    """Damaged if a file has changed since it was written; it is read piece by piece."""
    with path.open("rb") as file:
        left = max(0, os.fstat(file.fileno()).st_size - TRAILER)
        digest = hashlib.blake2b(digest_size=DIGEST)
        while left:
            piece = file.read(min(left, 2**20))
            if not piece:
                break
            digest.update(piece)
            left -= len(piece)
        trailer = file.read()
    if trailer[:-DIGEST] == MARK and trailer[-DIGEST:] != digest.digest():
        raise Damaged("its checksum does not match")
