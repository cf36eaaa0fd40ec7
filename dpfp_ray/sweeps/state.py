"""What an unfinished sweep needs to go on, beside its records.

STORE/sweep.secret      the seed that all trials' noise follows from; owner-only; goes at the end
STORE/states/ID.pt      a running trial's weights and optimizer; goes with the trial's final record
STORE/search-KEY.json   what a searcher has proposed, and what came of it; stays

Every file is whole or absent whenever a machine dies. That is why these are ours and not Tune's
experiment state, which is copied to its place, and older than the trials it describes.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpfp_ray.data.storage import open_files
from dpfp_ray.data.whole_files import PRIVATE, delete_secret, to_json
from dpfp_ray.privacy.sampling import fresh_seed
from dpfp_ray.results.store import file_name
from dpfp_ray.training import checkpoints
from dpfp_ray.training.loop import State

SECRET = "sweep.secret"
UNFINISHED = ("states", "tune", "train")  # the last two are Ray's own


class SweepState:
    """The files of one unfinished sweep, in a folder or behind a URI."""

    def __init__(self, storage: str) -> None:
        self.files = open_files(storage)

    def save_trial(self, identity: str, state: State, seed: int) -> None:
        checkpoints.save_trial(self.files, _state_name(identity), state, seed)

    def load_trial(self, identity: str, seed: int) -> State | None:
        return checkpoints.load_trial(self.files, _state_name(identity), seed)

    def drop_trial(self, identity: str) -> None:
        self.files.delete(_state_name(identity))

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

        In an object store, all who may read the unfinished sweep may read it.
        """
        if given is not None:
            return given
        with suppress(FileNotFoundError):
            return int(self.files.read_name(SECRET))
        seed = fresh_seed()
        self.files.write(SECRET, str(seed).encode(), PRIVATE)
        return seed

    def forget(self) -> None:
        """The sweep is finished: its seed and all that was needed only to continue go."""
        if self.files.local:
            delete_secret(Path(self.files.name) / SECRET)
        else:
            self.files.delete(SECRET)
        for name in UNFINISHED:
            self.files.delete_folder(name)


def resolve_storage(storage: str) -> str:
    """Absolute path or URI: Ray would fail on a relative path, and only when it is too late."""
    return storage if "://" in storage else str(Path(storage).expanduser().resolve())


def _state_name(identity: str) -> str:
    return f"states/{file_name(identity)}.pt"
