"""What an unfinished sweep needs to go on, beside its records.

STORE/sweep.secret      the seed that all trials' noise follows from; owner-only; goes at the end
                        (of a seed that was given: a mark of it)
STORE/states/ID.pt      a running trial's weights and optimizer; goes with the trial's final record
STORE/states/ID.drawn   the trial has drawn its first batch; goes with its final record
STORE/search-KEY.json   what a searcher has proposed, and what came of it; stays

Every file is whole or absent whenever a machine dies, and ends with a checksum; a damaged one is
replaced by the version before it, NAME.previous. That is why these are ours and not Tune's
experiment state, which is copied to its place, and older than the trials it describes.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import fresh_seed, keyed_integer
from dpfp_ray.results.store import file_name
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import RemoteFiles, open_files, previous
from dpfp_ray.system.whole_files import (
    PRIVATE,
    is_copy,
    to_json,
    with_checksum,
    without_checksum,
)
from dpfp_ray.training import checkpoints
from dpfp_ray.training.loop import State

SECRET = "sweep.secret"
UNFINISHED = ("states", "tune", "train")  # the last two are Ray's own
ANSWER_SECONDS = 120.0  # a node that does not answer by then is not asked again
Parsed = TypeVar("Parsed")


class SweepState:
    """The files of one unfinished sweep, in a folder or behind a URI."""

    def __init__(self, storage: str) -> None:
        self.files = open_files(storage)

    def save_trial(self, identity: str, state: State, seed: int) -> None:
        checkpoints.save_trial(self.files, _state_name(identity), state, seed)

    def load_trial(self, identity: str, seed: int, plan: Plan) -> State | None:
        return checkpoints.load_trial(self.files, _state_name(identity), seed, plan)

    def drop_trial(self, identity: str) -> None:
        checkpoints.drop_trial(self.files, _state_name(identity))
        self.files.delete(_drawn_name(identity))

    def mark_drawn(self, identity: str) -> None:
        self.files.write(_drawn_name(identity), b"drawn")

    def has_drawn(self, identity: str) -> bool:
        """Whether any process of the trial may have drawn a batch; earlier versions saved states
        but wrote no mark."""
        for name in (_drawn_name(identity), _state_name(identity)):
            with suppress(FileNotFoundError):
                self.files.read_name(name)
                return True
        return False

    def load_search(self, key: str) -> list[dict[str, Any]]:
        def proposals(content: bytes) -> list[dict[str, Any]]:
            found = json.loads(content)
            if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
                raise ValueError("no list of proposals")
            return found

        return self._read(f"search-{key}.json", proposals) or []

    def save_search(self, key: str, proposals: list[dict[str, Any]]) -> None:
        name = f"search-{key}.json"
        self.files.keep(name)
        self.files.write(name, with_checksum(to_json(proposals).encode()))

    def seed(self, given: int | None) -> int:
        """The sweep's secret seed: given, or made once and kept until `forget`.

        Of one that is given only a mark is kept, which tells another one: trials that have begun
        must not go on with other noise. In an object store, all who may read the unfinished sweep
        may read its seed.
        """
        known = self._read(SECRET, _Begun.parse)
        if known is None:
            seed = fresh_seed() if given is None else given
            begun = _Begun(seed if given is None else None, _seed_mark(seed))
            if self.files.create(SECRET, begun.content(), PRIVATE):
                # Twice, for it cannot be made again.
                self.files.write(previous(SECRET), begun.content(), PRIVATE)
                return seed
            return self.seed(given)  # another driver was faster
        if (given is None and known.seed is None) or (
            given is not None and known.mark != _seed_mark(given)
        ):
            asked = "was begun with a --seed" if given is None else "has another seed"
            fix = "drop --seed" if known.seed is not None else "give the --seed that it began with"
            raise UserError(
                f"{self.files.name} holds an unfinished sweep that {asked}; {fix} to continue it, "
                f"or use another --storage"
            )
        return given if known.seed is None and given is not None else int(known.seed or 0)

    def _read(self, name: str, parse: Callable[[bytes], Parsed]) -> Parsed | None:
        """The newest whole version of a file; None if there is none at all."""
        found = {}
        for candidate in (name, previous(name)):
            with suppress(FileNotFoundError):
                found[candidate] = self.files.read_name(candidate)
        damaged = False
        for content in found.values():
            try:
                return parse(without_checksum(content))
            except ValueError:  # of JSON and Unicode, too
                damaged = True
        if damaged:
            raise UserError(
                f"{self.files.name}/{name} is damaged; restore it from a backup, or use another "
                f"--storage (the ledger keeps what was spent)"
            )
        return None

    def forget(self) -> None:
        """The sweep is finished: its seed and all that was needed only to continue go."""
        for name in self.files.names():
            if is_copy(name, SECRET):
                self.files.delete(name)
        for name in UNFINISHED:
            self.files.delete_folder(name)


@dataclass(frozen=True)
class _Begun:
    """What the secret's file holds: the seed, unless it was given, and a mark of it."""

    seed: int | None
    mark: int

    def content(self) -> bytes:
        return with_checksum(
            (str(self.seed) if self.seed is not None else f"mark {self.mark}").encode()
        )

    @staticmethod
    def parse(content: bytes) -> "_Begun":
        text = content.decode()
        if text.startswith("mark "):
            return _Begun(None, int(text[5:]))
        return _Begun(int(text), _seed_mark(int(text)))


def _seed_mark(seed: int) -> int:
    return keyed_integer(seed, "sweep mark")


def resolve_storage(storage: str) -> str:
    """Absolute path or URI: Ray would fail on a relative path, and only when it is too late."""
    return storage if "://" in storage else str(Path(storage).expanduser().resolve())


def ray_storage(storage: str, name: str) -> dict[str, Any]:
    """Where Ray keeps its own files of a run: as options of its `RunConfig`.

    Behind a URI as a file system and a path, since Ray shows a URI, and with it what is secret.
    """
    files = open_files(storage)
    if isinstance(files, RemoteFiles):
        return {"storage_filesystem": files.filesystem, "storage_path": f"{files.root}/{name}"}
    return {"storage_path": str(Path(files.name) / name)}


def _state_name(identity: str) -> str:
    return f"states/{file_name(identity)}.pt"


def _drawn_name(identity: str) -> str:
    return f"states/{file_name(identity)}.drawn"


def check_seen_everywhere(storage: str, marker: str, nodes: list[dict[str, Any]]) -> None:
    """A UserError if a node does not see the file `marker` that the driver has put into the store:
    a folder of one machine would lose trials.

    `nodes` are as `ray.nodes()` tells them. What is behind a URI is the same for all.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    files = open_files(storage)
    if not files.local:
        return
    path = str(Path(files.name) / marker)
    asked = {}
    for node in nodes:
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        look: Any = ray.remote(Path.exists).options(num_cpus=0, scheduling_strategy=here)
        asked[look.remote(Path(path))] = node
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
    for answer in answered:
        try:
            seen = ray.get(answer)
        except ray.exceptions.RayError:  # that node has left the cluster: no trial will run there
            continue
        if not seen:
            name = asked[answer].get("NodeManagerHostname") or asked[answer]["NodeID"]
            raise UserError(
                f"--storage {storage} is not the same folder on {name}; use one that all machines "
                f"share (NFS), or a URI such as s3://bucket/folder"
            )
