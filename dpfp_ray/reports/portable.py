"""Records and plans for other people: what was done and found, nothing of the machine it was on.

A record may hold paths, addresses of nodes and the words of an error, which may be those of a
private record. What leaves is chosen by name, so that what a later version adds stays at home
until it is named here.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpfp_ray.data.columns import GLUE
from dpfp_ray.models.download import known_models
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.record import Record, make_record

FILE_FIELDS = ("data_dir", "train_file", "dev_file")
# Sections that are facts and measurements throughout, and parts of those that are not.
WHOLE = (
    *("schema", "plan_hash", "finished", "labels", "dev_records", "metrics", "history", "select"),
    *("statement", "cost", "environment", "audit", "columns", "predictions"),
)
PARTS = {
    "trial": ("id", "sweep", "group", "seed_index", "status", "seconds"),
    "privacy": (
        *("guarantee", "epsilon", "delta", "noise_multiplier", "sigma", "p", "steps", "draws"),
        "noise_coordinates",
    ),
}
PUBLIC_DEV = {"demo", *GLUE}  # whose dev labels anybody can download
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
HOME = re.compile(rb"(?:/home/|/Users/|/root/|\\Users\\)[^\s\"'<>]*")
SHORTEST_SECRET = 8  # characters; a shorter value would be found by chance


def portable_plan(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Plan fields without folders: of files, and of a model in a folder, only their own names."""
    named = {name: own_name(fields[name]) for name in needed_files(fields)}
    return {**fields, **named}


def needed_files(fields: Mapping[str, Any]) -> list[str]:
    """The fields that name something on disk, which whoever runs the plan must have."""
    found = [
        name
        for name in FILE_FIELDS
        if fields.get(name) and not str(fields[name]).startswith("memory:")
    ]
    return found + (["model"] if is_folder(str(fields.get("model") or "")) else [])


def is_folder(model: str) -> bool:
    """A model on disk, not one of ours or the hub's."""
    if not model or model in known_models() or model.startswith("custom:"):
        return False
    return model.startswith(("/", ".", "~", "\\")) or Path(model).expanduser().is_dir()


def own_name(path: Any) -> str:
    return str(path).replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


def portable_record(record: Record) -> Record:
    """The record with what is named above, its plan without folders."""
    whole: dict[str, Any] = {name: record[name] for name in WHOLE}  # type: ignore[literal-required]
    for section, names in PARTS.items():
        facts: Mapping[str, Any] = record[section]  # type: ignore[literal-required]
        whole[section] = {name: facts[name] for name in names if name in facts}
    return make_record(**whole, plan=portable_plan(record["plan"]))


def without_labels(record: Record) -> Record:
    """Predictions come with the right answers: only those of public dev sets leave."""
    public = record["plan"].get("task") in PUBLIC_DEV
    return record if public else {**record, "predictions": []}


def refuse_secrets(files: Mapping[str, bytes]) -> None:
    """The last look before anything is handed out: no home folder, no token of this machine."""
    secrets = {
        name: value.encode()
        for name, value in os.environ.items()
        if SECRET_NAMES.search(name) and len(value) >= SHORTEST_SECRET and not os.path.exists(value)
    }
    home = f"{Path.home()}{os.sep}".encode()
    for name, content in files.items():
        if name.endswith(".png"):
            continue  # compressed; whatever is drawn is in the .svg too
        found = HOME.search(content)
        if found or (len(home) > 2 and home in content):
            shown = found[0].decode(errors="replace")[:80] if found else str(Path.home())
            raise UserError(
                f"{name} would show the folder {shown}; change the title or the name that holds it"
            )
        for variable, value in secrets.items():
            if value in content:
                raise UserError(f"{name} would show the value of ${variable}; nothing was written")
