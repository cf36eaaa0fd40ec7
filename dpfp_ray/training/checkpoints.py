"""The saved state of an unfinished run: written now and then, read to continue, deleted at the end.

FOLDER/resume.pt     of a run in a folder, with its *secret seed*: readable by its owner only
STORE/states/ID.pt   of a trial of a sweep, with a mark of its seed (the sweep's file has the seed)
"""

import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dpfp_ray.data.storage import Files, LocalFiles
from dpfp_ray.data.whole_files import PRIVATE, PUBLIC, delete_secret
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import keyed_integer
from dpfp_ray.training.loop import State

RESUME = "resume.pt"
# Saving takes at most one part in so many of a run's time, however slow the storage.
SAVE_SHARE = 20


@dataclass
class Saver:
    """Decides when to save: every so many seconds, and less often where a save takes long."""

    save: Callable[[State], None]
    every_seconds: float = 60.0

    def __post_init__(self) -> None:
        self.saved_at = time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self.saved_at > self.every_seconds

    def save_now(self, checkpoint: Callable[[], State]) -> None:
        began = time.monotonic()
        self.save(checkpoint())
        self.saved_at = time.monotonic()
        self.every_seconds = max(self.every_seconds, SAVE_SHARE * (self.saved_at - began))

    def save_if_due(self, checkpoint: Callable[[], State]) -> None:
        if self.due:
            self.save_now(checkpoint)


def save_state(
    folder: Path, state: State, seed: int, seed_known: bool = False, data_mark: str | None = None
) -> None:
    """Save a run in a folder.

    That the seed was given is kept too: the statement at the end must say so, however the run was
    resumed. `data_mark` tells data in memory from others (`run.data_mark`).
    """
    state = {**state, "seed": seed, "seed_known": seed_known, "data_mark": data_mark}
    _write(LocalFiles(folder), RESUME, state, PRIVATE)


def load_state(folder: Path, plan: Plan) -> State | None:
    """The unfinished run in `folder`, if there is one; refuses another plan's."""
    state = _read(LocalFiles(folder), RESUME, "--overwrite starts again")
    if state is None:
        return None
    if state["plan_hash"] != plan.hash:
        raise UserError(
            f"{folder} holds an unfinished run of another plan ({state['plan_hash']}, this is "
            f"{plan.hash}); use another --output, or --overwrite"
        )
    refuse_changed_files(plan, folder / RESUME)
    return state


def refuse_other_rows(state: State, plan: Plan) -> None:
    """States without the mark `keying` are of the version before, which chose rows for dev and for
    `max_train` in another way: there the run went through other records."""
    held_out = not plan.dev_file and (plan.train_file or plan.task == "demo")
    if "keying" in state or plan.one_release or not (plan.max_train or held_out):
        return
    raise UserError(
        f"the unfinished run of plan {plan.hash} is of a version that chose other training records "
        "(a held-out dev split, or max_train); --overwrite starts again"
    )


def forget_state(folder: Path) -> None:
    """The seed goes with it, also from what a killed save has left."""
    delete_secret(folder / RESUME)


def save_trial(files: Files, name: str, state: State, seed: int) -> None:
    """`seed` is the trial's; the file tells whether it is the same, not what it is."""
    _write(files, name, {**state, "seed_mark": keyed_integer(seed, "mark")})


def load_trial(files: Files, name: str, seed: int) -> State | None:
    """The trial's saved state; None if there is none, or only one of another seed."""
    state = _read(files, name, "delete it to start the trial again")
    same = state is not None and state.pop("seed_mark") == keyed_integer(seed, "mark")
    return state if same else None


def refuse_changed_files(plan: Plan, written: Path) -> None:
    """A plan names its files, not what is in them: what was `written` before they last changed is
    of other data.

    Times are compared and no hash is kept: a hash of private records in a result would be a release
    of its own.
    """
    data = Path(plan.data_dir).glob("*") if plan.data_dir else ()
    for path in (plan.train_file, plan.dev_file, *data):
        if path and Path(path).is_file() and os.path.getmtime(path) > os.path.getmtime(written):
            raise UserError(
                f"{path} has changed since {written} was written; use another --output, or "
                "--overwrite"
            )


def _write(files: Files, name: str, state: State, mode: int = PUBLIC) -> None:
    with files.writing(name, mode) as stream:
        torch.save(state, stream)


def _read(files: Files, name: str, fix: str) -> State | None:
    try:
        content = files.read_name(name)
    except FileNotFoundError:
        return None
    try:
        state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make torch fail in many ways
        raise UserError(f"{files.name}/{name} is damaged ({type(error).__name__}); {fix}") from None
    return state
