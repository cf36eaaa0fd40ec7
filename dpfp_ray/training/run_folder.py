"""A run's folder: what is there before, the saved state of an unfinished run, and what stays.

DIR/result.json           the result: public facts and measurements, no secrets
DIR/weights.safetensors   the trained weights, if asked for, with their plan and a checksum
DIR/resume.pt             while unfinished: its state, with its *secret seed*
DIR/resume.seed           that seed alone, from before the first step: a run that is killed before
                          its first save draws the same noise when it is run again, and pays once
STORE/states/ID.pt        of a trial of a sweep, with a mark of its seed (the sweep's file has it)

States are readable by their owner only and end with a checksum (`system/whole_files.py`): what is
damaged is never continued.
"""

import dataclasses
import hashlib
import io
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from dpfp_ray.data.readers import files_of
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.representations import OwnEncoder
from dpfp_ray.models.scopes import weights_to_keep
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import derived_seed, keyed_integer
from dpfp_ray.system import storage, whole_files
from dpfp_ray.system.cache import NoRoom, explained, probe
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.lease import held_unless
from dpfp_ray.system.storage import Files, LocalFiles
from dpfp_ray.system.whole_files import Damaged
from dpfp_ray.training.loop import KEYING, Progress, State
from dpfp_ray.training.prepare import Data
from dpfp_ray.training.record import Record, checked_record

RESULT, WEIGHTS = storage.RESULT, "weights.safetensors"
RESUME, SEED = "resume.pt", "resume.seed"
SMALL = 2**20  # bytes; more than all else that a run writes
# Saving takes at most one part in so many of a run's time, however slow the storage.
SAVE_SHARE = 20
EXIT = "use another --output, or --overwrite"


# The folder and its result ----------------------------------------------------------------------


def make_folder(name: str | Path) -> Path:
    """The folder of a run; a new one is its owner's only: what is unfinished in it is secret."""
    folder = Path(name).expanduser()
    try:
        whole_files.private_folder(folder)
    except OSError as error:
        text = f"cannot write to {folder}: {error.strerror}; use another --output"
        raise UserError(text) from None
    return folder


def held(folder: Path, overwrite: bool) -> AbstractContextManager[None]:
    """Be the only process that runs in `folder`; who finds a result there need not be."""
    done = not overwrite and (folder / RESULT).exists()
    return held_unless(done, LocalFiles(folder), "use another --output")


def discard(folder: Path) -> None:
    for name in (RESULT, WEIGHTS):
        (folder / name).unlink(missing_ok=True)
    forget_state(folder)


def read_result(folder: Path) -> Record:
    try:
        return checked_record(whole_files.read_json(folder / RESULT))
    except ValueError as error:
        raise UserError(
            f"{folder / RESULT} is no result of dpfp train ({error}); give another folder"
        ) from None


def finished_result(folder: Path, plan: Plan, *, with_audit: bool = False) -> Record | None:
    """The result in `folder` if this very plan was finished there, on data as they are now."""
    if not (folder / RESULT).exists():
        return None
    record = read_result(folder)
    if record["audit"] and not with_audit:
        raise UserError(f"{folder} holds an audit; {EXIT}")
    refuse_other_plan(f"{folder} holds the result of another plan", record["plan_hash"], plan)
    refuse_changed_files(plan, folder / RESULT)
    forget_state(folder)  # still there if the run was killed right after its result
    return record


def write_result(folder: Path, record: Record, model: Classifier | None, plan: Plan) -> None:
    if model is not None:
        kept = weights_to_keep(model)
        weights = {name: p.detach().cpu().contiguous() for name, p in kept.items()}
        write_weights(folder / WEIGHTS, weights, plan.hash)
    with explained(folder / RESULT, SMALL):
        whole_files.write_json(folder / RESULT, record)
    forget_state(folder)


def refuse_other_plan(what: str, plan_hash: str, plan: Plan) -> None:
    if plan_hash != plan.hash:
        raise UserError(f"{what} ({plan_hash}, this is {plan.hash}); {EXIT}")


def refuse_changed_files(plan: Plan, written: Path) -> None:
    """A plan names its files, not their content: refuse what was `written` before they changed.

    Times are compared, not hashes: a hash of private records would be a release of its own.
    """
    named = [file for name in (plan.train_file, plan.dev_file) if name for file in files_of(name)]
    data = Path(plan.data_dir).glob("*") if plan.data_dir else ()
    for path in (*named, *data):
        if path.is_file() and os.path.getmtime(path) > os.path.getmtime(written):
            raise UserError(f"{path} has changed since {written} was written; {EXIT}")


def data_mark(data: Data, own: OwnEncoder | None, seed: int) -> str:
    """Whether data (and an encoder) in memory are the same as before, for the resume file only.

    Keyed by the secret seed and gone with it: a plain hash of private records would be a release.
    """
    key = derived_seed(seed, "data mark").to_bytes(16, "big")
    digest = hashlib.blake2b(digest_size=16, key=key)

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for part in sorted(value):
                add(f"{name} {part}", value[part])
        elif isinstance(value, np.ndarray):
            digest.update(f"{name} {value.dtype} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value).data)

    for split, table in {"": data.train, **data.dev}.items():
        for column in dataclasses.fields(cast(Any, table)):
            add(f"{split} {column.name}", getattr(table, column.name))
    if own is not None:
        add("encoder", {k: v.cpu().double().numpy() for k, v in own.module.state_dict().items()})
    return digest.hexdigest()


# Weights ----------------------------------------------------------------------------------------


def write_weights(path: Path, weights: Mapping[str, Tensor], plan_hash: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    facts = {"plan_hash": plan_hash, "checksum": checksum(weights)}
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    with explained(path, size), whole_files.whole_path(path) as scratch:
        try:
            save_file(dict(weights), scratch, metadata=facts)
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else EIO, str(error)) from None
        _sort_facts(scratch)


def _sort_facts(path: Path) -> None:
    """safetensors writes its facts in any order; equal runs leave equal files."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length
        file.seek(8)
        file.write(text.ljust(length))


def read_weights(path: Path, plan_hash: str | None) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    again = "run again with --overwrite"
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {again}") from None
    if facts.get("checksum", checksum(weights)) != checksum(weights):  # older files have none
        backup = "restore it from a backup, or"
        raise UserError(f"{path} is damaged (its checksum does not match); {backup} {again}")
    if facts.get("plan_hash") != plan_hash:
        plans = f"plan {facts.get('plan_hash')}, result.json to {plan_hash}"
        raise UserError(f"{path} belongs to {plans}; {again}")
    return weights


def checksum(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# The state of an unfinished run -----------------------------------------------------------------


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
    """Save a run in a folder; its statement must say whether the seed was given (`seed_known`)."""
    state = {**state, "seed": seed, "seed_known": seed_known, "data_mark": data_mark}
    _write(LocalFiles(folder), RESUME, state)


def load_state(folder: Path, plan: Plan) -> State | None:
    try:
        state = _read(LocalFiles(folder), RESUME, lambda state: check_state(state, "seed"))
    except Damaged as error:
        raise UserError(
            f"{folder / RESUME} is damaged ({error}); restore it from a backup, or start again "
            f"with --overwrite (the ledger keeps what was spent)"
        ) from None
    if state is None:
        return None
    refuse_other_plan(f"{folder} holds an unfinished run of another plan", state["plan_hash"], plan)
    refuse_changed_files(plan, folder / RESUME)
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


def keep_seed(folder: Path, plan: Plan, seed: int, seed_known: bool, device: str = "cpu") -> None:
    facts = {"plan_hash": plan.hash, "seed": seed, "seed_known": seed_known, "device": device}
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
        check_state(state, "seed_mark")
        if state["plan_hash"] != plan.hash:
            raise Damaged("it is not this trial's")

    try:
        state = _read(files, name, check)
    except Damaged as error:
        warnings.warn(f"{files.name}/{name} is damaged ({error}); from the start", stacklevel=2)
        return None
    same = state is not None and state.pop("seed_mark") == keyed_integer(seed, "mark")
    return state if same else None


def check_state(state: State, *also: str) -> None:
    """Damaged, unless the loop can go on from it; its checksum says that no byte has changed."""
    if (keying := state.get("keying", 1)) > KEYING:
        raise Damaged(f"it is of a later version of dpfp-ray (keying {keying})")
    for key in ("plan_hash", "noise_multiplier", "progress", "model", *also):
        if key not in state:
            raise Damaged(f"it has no {key}")
    known = {f.name for f in dataclasses.fields(Progress)}
    if not known - {"fits"} <= state["progress"].keys() <= known:  # earlier versions have no `fits`
        raise Damaged("it does not say how far the run was")


def ask_for_room(folder: Path, model: Classifier, plan: Plan, weights: bool) -> None:
    """NoRoom if what a run leaves in `folder` would not fit: while it saves, a state and the one
    that it replaces (Adam keeps two numbers for each weight), and at its end the weights."""
    trained = sum(p.numel() * p.element_size() for _, p in trainable_parameters(model))
    states = 0 if plan.one_release else 2 * 3 * trained
    there = sum(path.stat().st_size for path in folder.glob(f"{RESUME}*"))
    final = sum(t.numel() * t.element_size() for t in weights_to_keep(model).values())
    probe(folder, max(0, states - there) + (final if weights else 0) + SMALL)


def _write(files: Files, name: str, state: State) -> None:
    checked: whole_files.ChecksumWriter | None = None
    try:
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
    """The saved state, if there is one; Damaged if it is not whole or does not pass `check`."""
    try:
        content = whole_files.without_checksum(files.read_name(name))
    except FileNotFoundError:
        return None
    state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    check(state)
    return state
