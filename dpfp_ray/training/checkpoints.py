"""The saved state of an unfinished run: written now and then, read to continue, deleted at the end.

FOLDER/resume.pt     of a run in a folder, with its *secret seed*
FOLDER/resume.seed   that seed alone, from before the first step: a run that is killed before its
                     first save draws the same noise when it is run again, and is paid for once
STORE/states/ID.pt   of a trial of a sweep, with a mark of its seed (the sweep's file has the seed)

All are readable by their owner only. States end with a checksum (`system/whole_files.py`), and
leave the one before them as NAME.previous: what is damaged is never continued.
"""

import io
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from dpfp_ray.data.readers import files_of
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.scopes import weights_to_keep
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import keyed_integer
from dpfp_ray.system import whole_files
from dpfp_ray.system.cache import NoRoom, probe
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import Files, LocalFiles, previous
from dpfp_ray.system.whole_files import Damaged
from dpfp_ray.training.loop import KEYING, Progress, State

RESUME, SEED = "resume.pt", "resume.seed"
SMALL = 2**20  # bytes; more than all else that a run writes
# Saving takes at most one part in so many of a run's time, however slow the storage.
SAVE_SHARE = 20


def save_seconds(given: float | None = None) -> float:
    """How often unfinished work is saved: as `given`, or as the variable says, for all verbs."""
    text = os.environ.get("DPFP_SAVE_SECONDS") or "30"
    try:
        seconds = float(text) if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        name = "DPFP_SAVE_SECONDS" if given is None else "save-every"
        raise UserError(f"{name} is {text if given is None else given}; give seconds, 0 or more")
    return seconds


@dataclass
class Saver:
    """Decides when to save: every so many seconds, and less often where a save takes long."""

    save: Callable[[State], None]
    every_seconds: float = field(default_factory=save_seconds)

    def __post_init__(self) -> None:
        self.saved_at, self.saving = time.monotonic(), False

    @property
    def due(self) -> bool:
        return time.monotonic() - self.saved_at > self.every_seconds

    def save_now(self, checkpoint: Callable[[], State]) -> None:
        began, self.saving = time.monotonic(), True
        try:
            self.save(checkpoint())
        finally:
            self.saving = False
        self.saved_at = time.monotonic()
        self.every_seconds = max(self.every_seconds, SAVE_SHARE * (self.saved_at - began))


def save_state(
    folder: Path, state: State, seed: int, seed_known: bool = False, data_mark: str | None = None
) -> None:
    """Save a run in a folder; its statement must say whether the seed was given (`seed_known`).

    `data_mark` tells data in memory from others (`run_folder.data_mark`).
    """
    state = {**state, "seed": seed, "seed_known": seed_known, "data_mark": data_mark}
    _write(LocalFiles(folder), RESUME, state)


def load_state(folder: Path, plan: Plan) -> State | None:
    """The unfinished run in `folder`, if there is one; refuses another plan's."""

    def check(state: State) -> None:
        check_state(state, plan)
        if not isinstance(state.get("seed"), int) or not isinstance(state.get("seed_known"), bool):
            raise Damaged("it has no seed")

    try:
        state = _read(LocalFiles(folder), RESUME, check)
    except Damaged as error:
        raise UserError(
            f"{folder / RESUME} is damaged ({error}); restore it from a backup, or start again "
            f"with --overwrite (the ledger keeps what was spent)"
        ) from None
    if state is None:
        return None
    if state["plan_hash"] != plan.hash:
        raise UserError(
            f"{folder} holds an unfinished run of another plan ({state['plan_hash']}, this is "
            f"{plan.hash}); use another --output, or --overwrite"
        )
    whole = folder / RESUME
    refuse_changed_files(plan, whole if whole.exists() else folder / previous(RESUME))
    return state


def refuse_earlier_version(state: State, plan: Plan) -> None:
    """Its steps would be repeated with other noise, which is a second release of them."""
    if state.get("keying") != KEYING:
        raise UserError(
            f"the unfinished run of plan {plan.hash} was begun by an earlier version of dpfp-ray, "
            "which makes other noise from the same seed; finish it with that version, or "
            "--overwrite starts again (the ledger keeps what was spent)"
        )


def forget_state(folder: Path) -> None:
    """The seed goes with it, also from what a killed save has left."""
    for name in (RESUME, SEED):
        whole_files.delete_secret(folder / name)


def keep_seed(folder: Path, plan: Plan, seed: int, seed_known: bool) -> None:
    facts = {"plan_hash": plan.hash, "seed": seed, "seed_known": seed_known}
    with whole_files.whole_file(folder / SEED, whole_files.PRIVATE) as file:
        file.write(whole_files.with_checksum(whole_files.to_json(facts).encode()))


def load_seed(folder: Path, plan: Plan) -> State | None:
    """What `keep_seed` wrote for this plan; of another plan nothing was saved that goes on."""
    if not (folder / SEED).exists():
        return None
    try:
        content = whole_files.without_checksum((folder / SEED).read_bytes())
    except Damaged as error:
        raise UserError(
            f"{folder / SEED} is damaged ({error}); delete it, and the run begins with new noise"
        ) from None
    facts: State = json.loads(content)
    return facts if facts["plan_hash"] == plan.hash else None


def save_trial(files: Files, name: str, state: State, seed: int) -> None:
    """`seed` is the trial's; the file tells whether it is the same, not what it is."""
    _write(files, name, {**state, "seed_mark": keyed_integer(seed, "mark")})


def load_trial(files: Files, name: str, seed: int, plan: Plan) -> State | None:
    """The trial's saved state; None if there is no good one of this seed.

    The trial then runs from its start, with the same noise: that follows from its seed.
    """

    def check(state: State) -> None:
        check_state(state, plan)
        if state["plan_hash"] != plan.hash or "seed_mark" not in state:
            raise Damaged("it is not this trial's")

    try:
        state = _read(files, name, check)
    except Damaged as error:
        warnings.warn(f"{files.name}/{name} is damaged ({error}); from the start", stacklevel=2)
        return None
    same = state is not None and state.pop("seed_mark") == keyed_integer(seed, "mark")
    return state if same else None


def drop_trial(files: Files, name: str) -> None:
    files.delete(name)
    files.delete(previous(name))


def check_state(state: State, plan: Plan) -> None:
    """Damaged, unless all that the loop will ask of `state` is there; the plan may be another's."""
    progress, model, optimizer = (state.get(key) for key in ("progress", "model", "optimizer"))
    noise, step = state.get("noise_multiplier"), (progress or {}).get("step")
    keying = state.get("keying", 1)
    if not isinstance(state.get("plan_hash"), str):
        raise Damaged("it does not say of which plan")
    if not isinstance(keying, int) or keying > KEYING:
        raise Damaged(f"it is of a later version of dpfp-ray (keying {keying})")
    if not isinstance(noise, int | float) or not math.isfinite(noise) or noise < 0:
        raise Damaged("it has no noise multiplier")
    if not isinstance(progress, dict) or progress.keys() != {f.name for f in fields(Progress)}:
        raise Damaged("it does not say how far the run was")
    same = state["plan_hash"] == plan.hash
    if not isinstance(step, int) or step < 0 or (same and step > plan.steps):
        raise Damaged(f"step {step} of {plan.steps} is impossible")
    if not isinstance(model, dict) or not all(isinstance(t, Tensor) for t in model.values()):
        raise Damaged("it has no weights")
    if "optimizer" not in state and (plan.one_release or not same):
        return  # a head in closed form has none
    if not isinstance(optimizer, dict) or not optimizer.keys() >= {"state", "param_groups"}:
        raise Damaged("it has no optimizer")
    if not isinstance(state.get("loss_sum"), float) or not isinstance(state.get("loss_rows"), int):
        raise Damaged("it has no loss")


def refuse_changed_files(plan: Plan, written: Path) -> None:
    """A plan names its files, not their content: refuse what was `written` before they changed.

    Times are compared, not hashes: a hash of private records would be a release of its own.
    """
    named = [file for name in (plan.train_file, plan.dev_file) if name for file in files_of(name)]
    data = Path(plan.data_dir).glob("*") if plan.data_dir else ()
    for path in (*named, *data):
        if path.is_file() and os.path.getmtime(path) > os.path.getmtime(written):
            raise UserError(
                f"{path} has changed since {written} was written; use another --output, or "
                "--overwrite"
            )


def ask_for_room(folder: Path, model: Classifier, plan: Plan, weights: bool) -> None:
    """NoRoom if what a run leaves in `folder` would not fit: while it saves, a state and the one
    before (Adam keeps two numbers for each weight), and at its end the weights."""
    trained = sum(p.numel() * p.element_size() for _, p in trainable_parameters(model))
    states = 0 if plan.one_release else 2 * 3 * trained
    there = sum(path.stat().st_size for path in folder.glob(f"{RESUME}*"))
    final = sum(t.numel() * t.element_size() for t in weights_to_keep(model).values())
    probe(folder, max(0, states - there) + (final if weights else 0) + SMALL)


def _write(files: Files, name: str, state: State) -> None:
    checked: whole_files.ChecksumWriter | None = None
    try:
        files.keep(name)
        with files.writing(name, whole_files.PRIVATE) as stream:
            checked = whole_files.ChecksumWriter(stream)
            torch.save(state, cast(IO[bytes], checked))
            checked.finish()
    except (NoRoom, RuntimeError) as error:  # torch hides what the disk said
        if not isinstance(error, NoRoom) and (checked is None or checked.failure is None):
            raise
        if files.local:
            probe(Path(files.name), _size(state) + SMALL)
        raise NoRoom(str(error)) from None


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    parts = value.values() if isinstance(value, dict) else value
    return sum(map(_size, parts)) if isinstance(value, dict | list | tuple) else 0


def _read(files: Files, name: str, check: Callable[[State], None]) -> State | None:
    """The newest state that is whole and passes `check`; Damaged if there are only others."""
    wrong: Damaged | None = None
    for candidate in (name, previous(name)):
        try:
            content = files.read_name(candidate)
        except FileNotFoundError:
            continue
        try:
            state = _parse(content)
            check(state)
        except Damaged as error:
            wrong = wrong or error
            continue
        if wrong is not None:
            text = f"{files.name}/{name} is damaged ({wrong}); going on from the state before it"
            warnings.warn(text, stacklevel=2)
            files.delete(name)  # else the next save would keep it in place of the good one
        return state
    if wrong is not None:
        raise wrong
    return None


def _parse(content: bytes) -> State:
    whole = whole_files.without_checksum(content)
    try:
        state = torch.load(io.BytesIO(whole), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make torch fail in many ways
        raise Damaged(type(error).__name__) from None
    if not isinstance(state, dict):
        raise Damaged(f"it holds a {type(state).__name__}")
    return state
