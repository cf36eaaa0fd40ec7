"""Files and folders that are whole or absent, whatever is killed while they are written, and bytes
that tell whether they are still what was written.

They are written under another name in the same folder, because a rename is atomic only within one
file system. That name starts with a dot and does not end in .json: no reader takes it for a record.

A checksum is put after bytes, where torch and others who know nothing of it do not look.

Files that somebody else may have written are read within limits: `/dev/zero` has no end.
"""

import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EMLINK, ENOTDIR, ENOTSUP, EPERM
from pathlib import Path
from typing import IO, Any, BinaryIO
from uuid import uuid4

from dpfp_ray.system.errors import UserError

# Modes of new files: as the user's umask has it, or readable by their owner only.
PUBLIC, PRIVATE = 0o666, 0o600
PRIVATE_FOLDER = 0o700
NO_LINKS = (EPERM, ENOTSUP, EMLINK)  # what file systems without links say


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """A name to write to; what is there replaces `path` in one step if the block ends without an
    error, and else it goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_of(path)
    try:
        yield scratch
        with scratch.open("rb") as file:
            os.fsync(file.fileno())  # without it, a power failure may leave the new name empty
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path, mode: int = PUBLIC) -> Iterator[BinaryIO]:
    """As `whole_path`, for writers that want an open file."""
    if mode == PRIVATE:
        private_folder(path.parent)
    with whole_path(path) as scratch, _new(scratch, mode) as file:
        yield file


def scratch_of(path: Path) -> Path:
    """The name under which `path` is written; `delete_secret` knows its form."""
    return path.with_name(f".{path.name}.{uuid4().hex}")


def _new(scratch: Path, mode: int) -> BinaryIO:
    file = os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
    if mode == PRIVATE:
        os.fchmod(file.fileno(), mode)  # a umask may have taken more than it should
    return file


def new_file(path: Path, content: bytes, mode: int = PUBLIC) -> bool:
    """Make `path`, whole; False, and nothing done, if it is there. Of several, one succeeds."""
    if mode == PRIVATE:
        private_folder(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The scratch file carries its target's name, so that `delete_secret` removes it after a kill.
    scratch = scratch_of(path)
    try:
        with _new(scratch, mode) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(scratch, path)  # unlike a rename, fails if the name is taken
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            with suppress(FileExistsError), path.open("xb") as file:
                file.write(content)
                return True
            return False
    finally:
        scratch.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else a power failure may take the name away again
    finally:
        os.close(folder)
    return True


def private_folder(path: Path) -> None:
    """Make a folder for its owner only, whatever the umask; one that is there stays as it is, and
    so do the folders above it, which are the user's."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_FOLDER)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(path)) from None
    else:
        path.chmod(PRIVATE_FOLDER)


@contextmanager
def whole_folder(
    path: Path, keep: Callable[[Path], bool] = Path.is_dir, mode: int = PUBLIC
) -> Iterator[Path]:
    """An empty folder to fill; it becomes `path` if the block ends without an error.

    Its parent is a temporary folder, for files that are needed only on the way. Where another
    process has put a folder at `path` by then, that one stays if `keep` accepts it. With the mode
    PRIVATE, all in it is for its owner only.
    """
    if mode == PRIVATE:
        private_folder(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        yield built
        if mode == PRIVATE:
            for inside in (built, *built.rglob("*")):
                inside.chmod(PRIVATE_FOLDER if inside.is_dir() else PRIVATE)
        try:
            os.rename(built, path)
        except OSError:
            if not path.exists():
                raise
            if not keep(path):
                # Should another process replace it first, that is as good.
                with suppress(OSError):
                    os.rename(path, Path(scratch) / "replaced")
                with suppress(OSError):
                    os.rename(built, path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process of this machine at a time, where the file system has locks; a dead one's ends."""
    private_folder(path.parent)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE), "w") as file:
        os.fchmod(file.fileno(), PRIVATE)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_text(path: Path, text: str, mode: int = PUBLIC) -> None:
    with whole_file(path, mode) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, mode: int = PUBLIC) -> None:
    write_text(path, to_json(value, indent=2) + "\n", mode)


def delete_secret(path: Path) -> None:
    """Delete a file, its copies and what killed writes of it have left."""
    for other in path.parent.glob("*"):
        if is_copy(other.name, path.name):
            other.unlink(missing_ok=True)


def is_copy(name: str, secret: str) -> bool:
    """Whether a file called `name` may hold what the file `secret` holds, or a part of it."""
    return name == secret or name.startswith((f"{secret}.", f".{secret}."))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); delete it or restore it") from None


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: an infinite ε becomes the string "inf", not a word that other readers refuse."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


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
        self.failure: OSError | None = None  # torch raises a RuntimeError in its place

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        try:
            return self.stream.write(content)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self.stream.flush()

    def finish(self) -> None:
        self.stream.write(MARK + self.digest.digest())


def with_checksum(content: bytes) -> bytes:
    return content + MARK + hashlib.blake2b(content, digest_size=DIGEST).digest()


def without_checksum(content: bytes) -> bytes:
    """What was written, without its checksum; Damaged if it has changed."""
    if content[-TRAILER:-DIGEST] != MARK:
        raise Damaged("its checksum is missing")
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
    if trailer != MARK + digest.digest():
        raise Damaged("its checksum does not match")


LARGEST_YAML = 2**22  # bytes
MOST_VALUES = 100_000  # in one YAML file
MOST_DIGITS = 300  # of a whole number in YAML; longer ones take quadratic time, and mean nothing


def read_limited(path: Path, most: int) -> bytes:
    """The bytes of a file; a UserError if there are more than `most`."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path} is larger than {most / 2**20:g} MB; give another file")
    return content


def parse_yaml(content: bytes, name: str) -> Any:
    """The value in a YAML text; a UserError, which calls the text `name`, if there is none.

    Refused are too many values, endless numbers, and aliases (*): a few hundred bytes of these can
    unfold to billions of values.
    """
    import yaml

    class LimitedLoader(yaml.SafeLoader):
        values = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise UserError(f"{name} has an alias (*{self.peek_event().anchor}); write it out")
            node: Any = super().compose_node(parent, index)
            self.values += 1
            number = node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS
            if number or self.values > MOST_VALUES:
                raise UserError(
                    f"{name} holds more than {MOST_VALUES:,} values, or a number of more than "
                    f"{MOST_DIGITS} digits"
                )
            return node

    try:
        return yaml.load(content.decode("utf-8"), LimitedLoader)
    except RecursionError:
        raise UserError(f"{name} is nested too deeply; a plan is a list of key: value") from None
    except (yaml.YAMLError, ValueError) as error:  # also of bytes, dates and endless numbers
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None


def shipped(folder: str) -> Path:
    """`search_spaces` or `docs`: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder
