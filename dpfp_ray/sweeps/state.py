"""What an unfinished sweep needs to go on, beside its records.

STORE/sweep.secret      the seed that all trials' noise follows from; owner-only; goes at the end
STORE/states/ID.pt      a running trial's weights and optimizer; goes with the trial's final record
STORE/search-KEY.json   what a searcher has proposed, and what came of it; stays

Every file is whole or absent whenever a machine dies. That is why these are ours and not Tune's
experiment state, which is copied to its place, and older than the trials it describes.
"""

import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.fs
import torch

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.privacy.sampling import fresh_seed, keyed_integer
from dpfp_ray.results.store import Store, file_name
from dpfp_ray.training.loop import State

SECRET = "sweep.secret"
SCRATCH = ("states", "tune", "train")  # the last two are Ray's own


class SweepState:
    """The files of one unfinished sweep, in a folder or behind a URI."""

    def __init__(self, storage: str) -> None:
        self.storage = storage
        self.files = Store(storage).files

    def save_trial(self, identity: str, state: State, seed: int) -> None:
        """`seed` is the trial's; the file tells whether it is the same, not what it is."""
        buffer = io.BytesIO()
        torch.save({**state, "seed_mark": keyed_integer(seed, "mark")}, buffer)
        self.files.write(_state_name(identity), buffer.getvalue())

    def load_trial(self, identity: str, seed: int) -> State | None:
        """Where the trial was; None if it never was anywhere, or with another seed."""
        try:
            content = self.files.read_name(_state_name(identity))
        except FileNotFoundError:
            return None
        state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return state if state.pop("seed_mark") == keyed_integer(seed, "mark") else None

    def drop_trial(self, identity: str) -> None:
        self._delete(_state_name(identity))

    def load_search(self, key: str) -> list[dict[str, Any]]:
        try:
            proposals = json.loads(self.files.read_name(f"search-{key}.json"))
        except FileNotFoundError:
            return []
        return list(proposals)

    def save_search(self, key: str, proposals: list[dict[str, Any]]) -> None:
        self.files.write(f"search-{key}.json", to_json(proposals).encode())

    def seed(self, given: int | None) -> int:
        """The sweep's secret seed: given, or made once and kept until `forget`.

        In an object store, whoever may read the unfinished sweep may read it.
        """
        if given is not None:
            return given
        with suppress(FileNotFoundError):
            return int(self.files.read_name(SECRET))
        seed = fresh_seed()
        if self.files.local:
            _, root = filesystem_of(self.storage)
            Path(root).mkdir(parents=True, exist_ok=True)
            scratch = f"{root}/.{SECRET}"
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(str(seed))
            os.replace(scratch, f"{root}/{SECRET}")
        else:
            self.files.write(SECRET, str(seed).encode())
        return seed

    def forget(self) -> None:
        """The sweep is finished: its seed and all scratch go."""
        self._delete(SECRET)
        filesystem, root = filesystem_of(self.storage)
        for name in SCRATCH:
            with suppress(FileNotFoundError):
                filesystem.delete_dir(f"{root}/{name}")

    def _delete(self, name: str) -> None:
        filesystem, root = filesystem_of(self.storage)
        with suppress(FileNotFoundError):
            filesystem.delete_file(f"{root}/{name}")


def filesystem_of(storage: str) -> tuple[pyarrow.fs.FileSystem, str]:
    if "://" in storage:
        filesystem, root = pyarrow.fs.FileSystem.from_uri(storage)
        return filesystem, root.rstrip("/")
    return pyarrow.fs.LocalFileSystem(), storage.rstrip("/")


def resolve_storage(storage: str) -> str:
    """Absolute path or URI: Ray would fail on a relative path, and only when it is too late."""
    return storage if "://" in storage else str(Path(storage).expanduser().resolve())


def _state_name(identity: str) -> str:
    return f"states/{file_name(identity)}.pt"
