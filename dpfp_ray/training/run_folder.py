"""A run's folder: what is there before, and what stays when it ends.

DIR/result.json           the result: public facts and measurements, no secrets
DIR/weights.safetensors   the trained weights, if asked for, with their plan and a checksum
DIR/resume.pt, .seed      only while unfinished, see `checkpoints.py`
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from errno import EIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.own_encoder import OwnEncoder
from dpfp_ray.models.scopes import weights_to_keep
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import derived_seed
from dpfp_ray.system import storage
from dpfp_ray.system.cache import explained
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.lease import held_unless
from dpfp_ray.system.whole_files import private_folder, read_json, whole_path, write_json
from dpfp_ray.training.checkpoints import SMALL, forget_state, refuse_changed_files
from dpfp_ray.training.prepare import Data
from dpfp_ray.training.record import Record, checked_record

WEIGHTS = "weights.safetensors"


def write_weights(path: Path, weights: Mapping[str, Tensor], plan_hash: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    facts = {"plan_hash": plan_hash, "checksum": checksum(weights)}
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    with explained(path, size), whole_path(path) as scratch:
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
    """The weights by name; a UserError if they are damaged or of another plan."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); run again with --overwrite") from None
    if facts.get("checksum", checksum(weights)) != checksum(weights):  # older files have none
        raise UserError(
            f"{path} is damaged (its checksum does not match); restore it from a backup, or run "
            f"again with --overwrite"
        )
    if facts.get("plan_hash") != plan_hash:
        raise UserError(
            f"{path} belongs to plan {facts.get('plan_hash')}, result.json to {plan_hash}; run "
            f"again with --overwrite"
        )
    return weights


def checksum(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


RESULT = storage.RESULT


def make_folder(name: str | Path) -> Path:
    """The folder of a run; a new one is its owner's only: what is unfinished in it is secret."""
    folder = Path(name).expanduser()
    try:
        private_folder(folder)
    except OSError as error:
        text = f"cannot write to {folder}: {error.strerror}; use another --output"
        raise UserError(text) from None
    return folder


def held(folder: Path, overwrite: bool) -> AbstractContextManager[None]:
    """Be the only process that runs in `folder`; who finds a result there need not be."""
    done = not overwrite and (folder / RESULT).exists()
    return held_unless(done, storage.LocalFiles(folder), "use another --output")


def discard(folder: Path) -> None:
    """Remove what an earlier run left in `folder`."""
    for name in (RESULT, WEIGHTS):
        (folder / name).unlink(missing_ok=True)
    forget_state(folder)


def read_result(folder: Path) -> Record:
    """The record in `folder`, whole; a UserError if it is none."""
    try:
        return checked_record(read_json(folder / RESULT))
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
        raise UserError(f"{folder} holds an audit; use another --output, or --overwrite")
    if record["plan_hash"] != plan.hash:
        raise UserError(
            f"{folder} holds the result of another plan ({record['plan_hash']}, this is "
            f"{plan.hash}); use another --output, or --overwrite"
        )
    refuse_changed_files(plan, folder / RESULT)
    forget_state(folder)  # still there if the run was killed right after its result
    return record


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
        for field in dataclasses.fields(cast(Any, table)):
            add(f"{split} {field.name}", getattr(table, field.name))
    if own is not None:
        add("encoder", {k: v.cpu().double().numpy() for k, v in own.module.state_dict().items()})
    return digest.hexdigest()


def write_result(folder: Path, record: Record, model: Classifier | None, plan: Plan) -> None:
    """Result and weights into `folder`; the resume file, and the seed in it, go."""
    if model is not None:
        kept = weights_to_keep(model)
        weights = {name: p.detach().cpu().contiguous() for name, p in kept.items()}
        write_weights(folder / WEIGHTS, weights, plan.hash)
    with explained(folder / RESULT, SMALL):
        write_json(folder / RESULT, record)
    forget_state(folder)
