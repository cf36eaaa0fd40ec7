"""What goes with a job to the cluster: the local files that its command names, and nothing else.

A relative path means a file here: it is sent along. An absolute path or a URI means what the
cluster sees, and is left alone. Results must not be relative: a job's folder goes with the job.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpfp_ray.plan.errors import UserError

LARGEST = 100 * 2**20  # bytes in all; Ray keeps them in its head's memory
OUTSIDE = "outside"  # for files above the present folder


def named_files(words: Iterable[str]) -> dict[str, Path]:
    """Words that are relative paths of files here, and those files."""
    found = {}
    for word in words:
        if not word or word.startswith("-") or "://" in word or Path(word).is_absolute():
            continue
        path = Path(word)
        try:
            if path.is_file():
                found[word] = path
            elif path.is_dir() and "/" in word.rstrip("/"):
                raise UserError(
                    f"{word} is a folder here; give its absolute path on storage that the cluster "
                    "sees, or send a folder along with --working-dir"
                )
        except (OSError, ValueError):  # a condition or a text, far too long for a path
            continue
    return found


def words_of(command: Sequence[str]) -> list[str]:
    """The words of a command that may be paths; of `--flag=value` the value."""
    return [
        word.partition("=")[2] if word.startswith("--") and "=" in word else word
        for word in command
    ]


def stage(command: Sequence[str], more: Iterable[str], folder: Path) -> tuple[list[str], list[str]]:
    """Copy what `command` and the plan's own paths `more` name to `folder`.

    The command with the paths as they will be on the cluster, and what was copied.
    """
    files = named_files([*words_of(command), *more])
    total = sum(path.stat().st_size for path in files.values())
    if total > LARGEST:
        raise UserError(
            f"{', '.join(files)}: {total / 2**20:,.0f} MiB are too much to send with a job; put "
            "them on storage that the cluster sees and give their absolute paths"
        )
    renamed = {}
    here = Path.cwd().resolve()
    for number, (word, path) in enumerate(files.items()):
        real = Path(word).absolute()
        inside = ".." not in Path(word).parts and real.is_relative_to(here)
        target = Path(word) if inside else Path(OUTSIDE) / f"{number}-{path.name}"
        if not inside and word not in words_of(command):
            raise UserError(f"{word} is outside this folder; give its absolute path on the cluster")
        renamed[word] = str(target)
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / target)
    return [_rename(word, renamed) for word in command], list(files)


def _rename(word: str, renamed: dict[str, str]) -> str:
    flag, equals, value = word.partition("=")
    if word.startswith("--") and equals:
        return f"{flag}={renamed.get(value, value)}"
    return renamed.get(word, word)


def check_place(what: str, place: str | None) -> None:
    """Results of a job must be where they outlive it."""
    if place and ("://" in place or Path(place).is_absolute()):
        return
    shown = f"{what} is {place!r}" if place else f"{what} is missing"
    raise UserError(
        f"{shown}; a job's own folder goes with it: give {what} an absolute path or a URI that "
        "every node sees, such as /shared/runs or s3://bucket/runs"
    )
