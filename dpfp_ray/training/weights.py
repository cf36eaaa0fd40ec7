"""The trained weights of a finished run: whole or absent, with their plan and a checksum."""

import hashlib
import json
import re
from collections.abc import Mapping
from errno import EIO
from pathlib import Path

import torch
from torch import Tensor

from dpfp_ray.data.disk import explained
from dpfp_ray.data.whole_files import whole_path
from dpfp_ray.plan.errors import UserError

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
