"""A replication bundle: one zip with what others need to check a report and to run it again.

    README.md            what is in it, and how to run a cell again
    bundle.json          every cell: its scores, and where one more run is expected
    plans/CELL.yaml      the plan of each cell, for `dpfp train --plan`
    records/ID.json      the record of every run: `dpfp report BUNDLE_FOLDER` makes the report again
    report/              the page, its tables and figures
    requirements.txt     every installed package, with its exact version
    environment.json     Python, system, and a digest of dpfp-ray's own source

No seeds: with one, the noise could be taken off. No data, and no folders of the machine that made
it. The same records in the same environment give the same bytes.

A record may hold paths, addresses of nodes and the words of an error, which may be those of a
private record. What leaves is chosen by name (`WHOLE`, `PARTS`), so that what a later version adds
stays at home until it is named here.
"""

import hashlib
import math
import os
import platform
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import dpfp_ray
from dpfp_ray.data.columns import GLUE
from dpfp_ray.models.download import KNOWN_MODELS
from dpfp_ray.results.cells import Cell, cells_of
from dpfp_ray.results.rows import FILE_FIELDS
from dpfp_ray.results.runs import read_runs
from dpfp_ray.results.store import file_name
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json, whole_file
from dpfp_ray.training.record import Record, Select, make_record, record_id

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
    named = [
        name
        for name in FILE_FIELDS
        if fields.get(name) and not str(fields[name]).startswith("memory:")
    ]
    models = ("model", "teacher_model")
    return named + [name for name in models if is_folder(str(fields.get(name) or ""))]


def is_folder(model: str) -> bool:
    """A model on disk, not one of ours or the hub's."""
    if not model or model in KNOWN_MODELS or model.startswith("custom:"):
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
        match = HOME.search(content)
        if match or (len(home) > 2 and home in content):
            folder = match[0].decode(errors="replace")[:80] if match else str(Path.home())
            raise UserError(
                f"{name} would show the folder {folder}; change the title or the name that holds it"
            )
        for variable, value in secrets.items():
            if value in content:
                raise UserError(f"{name} would show the value of ${variable}; nothing was written")


INDEX = "bundle.json"
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the oldest time that a zip can say: equal bundles, equal bytes
README = """\
# Replication bundle

Made by dpfp-ray {version}. `report/index.html` opens in a browser. Nothing in here is a training
record, a seed or a secret: runs that are made again draw new noise and are expected within the
spread of these, not at the same number.

    pip install -r requirements.txt        # the same versions, besides dpfp-ray {version} itself
    dpfp train --plan plans/CELL.yaml --output runs/CELL      # one of the cells below, again
    dpfp report . --output again           # tables and figures from records/, in this folder

Cells, and where the accuracy of one more run lies in 95 of 100 cases:

{cells}
{files}"""
FILES = """
These plans read files that are not in here: {names}. Put them beside this page, or
give their places (`--train-file`, `--dev-file`, `--data-dir`, `--model`).
"""


@dataclass(frozen=True)
class Contents:
    """The records of a report as they leave, and the report that was made from them."""

    records: Sequence[Record]
    report: Mapping[str, bytes]
    select: Select


def write_bundle(path: Path, contents: Contents) -> None:
    """Write the zip, whole or not at all."""
    cells = [describe(cell, name) for name, cell in named_cells(contents)]
    if not cells:
        raise UserError("no run has a score yet; there is nothing to replicate")
    files = {f"report/{name}": content for name, content in contents.report.items()}
    for record in contents.records:
        name = f"records/{file_name(record_id(record))}.json"
        files[name] = _bytes(to_json(without_labels(record), indent=2))
    for cell in cells:
        files[cell["plan_file"]] = _bytes(plan_text(cell))
    files["requirements.txt"] = _bytes("\n".join(installed()))
    files["environment.json"] = _bytes(to_json(environment(), indent=2))
    files["README.md"] = _bytes(readme(cells))
    index = [{key: value for key, value in cell.items() if key != "plan"} for cell in cells]
    files[INDEX] = _bytes(to_json({"select": contents.select, "cells": index}, indent=2))
    refuse_secrets(files)
    try:
        with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle:
            for name, content in sorted(files.items()):
                entry = zipfile.ZipInfo(name, LONG_AGO)
                entry.external_attr = 0o644 << 16
                bundle.writestr(entry, content, zipfile.ZIP_DEFLATED)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give another --bundle") from None


def named_cells(contents: Contents) -> list[tuple[str, Cell]]:
    """Cells with short names of their own, for `--only`."""
    named: dict[str, Cell] = {}
    for cell in cells_of(read_runs(contents.records, contents.select)):
        key = cell.key
        budget = "" if key.epsilon is None else f"eps{key.epsilon:g}"
        task = key.task.replace(",", "")
        words = f"{task} {key.method} {budget} {key.model.rsplit('/', 1)[-1]}"
        name = base = re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")
        number = 1
        while name in named:
            number += 1
            name = f"{base}-{number}"
        named[name] = cell
    return list(named.items())


def describe(cell: Cell, name: str) -> dict[str, Any]:
    """What a cell is, and what running it again is held against."""
    record = cell.first.record
    scores = [float(run.row["accuracy"]) for run in cell.runs]
    rows = next(iter(record["dev_records"].values()), None)
    return {
        "cell": name,
        "method": cell.key.method,
        "task": cell.key.task,
        "model": cell.key.model,
        "guarantee": cell.guarantee,
        "plan_file": f"plans/{name}.yaml",
        "files": needed_files(record["plan"]),
        "accuracy": scores,
        "expected": expected_interval(scores, rows),
        "settings": cell.settings,
        "tuning": cell.tuning,
        "runs": [str(run.row["id"]) for run in cell.runs],
        "plan": {key: value for key, value in record["plan"].items() if value is not None},
    }


def expected_interval(scores: Sequence[float], rows: int | None) -> tuple[float, float]:
    """Where one more run with a new seed lies in 95 of 100 cases.

    For n runs with mean m and deviation s it is m ± t·s·√(1 + 1/n), with Student's t of n − 1
    degrees of freedom. A single run tells nothing of seeds: there it is twice the variance of an
    accuracy over so many dev rows. The half width is at least one dev row.
    """
    n, centre = len(scores), mean(scores)
    row = 1 / rows if rows else 0.0
    if n > 1:
        from scipy.stats import t

        half = float(t.ppf(0.975, n - 1)) * stdev(scores) * math.sqrt(1 + 1 / n)
    else:
        half = 1.96 * math.sqrt(2 * max(centre * (1 - centre), row) * row)
    half = max(half, row)
    return max(0.0, centre - half), min(1.0, centre + half)


def plan_text(cell: Mapping[str, Any]) -> str:
    import yaml

    plan = {k: list(v) if isinstance(v, tuple) else v for k, v in cell["plan"].items()}
    text: str = yaml.safe_dump(plan, sort_keys=False, allow_unicode=True)
    return f"# {cell['cell']}\n{text}"


def installed() -> list[str]:
    """name==version of every package; where it was installed from is this machine's business."""
    versions = {
        str(one.metadata["Name"]).lower(): one.version
        for one in metadata.distributions()
        if one.metadata["Name"]
    }
    versions.pop("dpfp-ray", None)  # environment.json has it: an index may not
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def environment() -> dict[str, Any]:
    source = Path(dpfp_ray.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*.py")):
        digest.update(path.relative_to(source).as_posix().encode() + path.read_bytes())
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "dpfp_ray": dpfp_ray.__version__,
        "dpfp_ray_source_sha256": digest.hexdigest(),
    }


def readme(cells: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for cell in cells:
        low, high = cell["expected"]
        n = len(cell["accuracy"])
        picked = f", the best of {cell['settings']} settings" * (cell["tuning"] == "picked")
        lines.append(
            f"- `{cell['cell']}`: accuracy {mean(cell['accuracy']):.4f} ({n} run{'s' * (n > 1)}"
            f"{picked}), ε {cell['guarantee']}; expected {low:.4f} to {high:.4f}"
        )
    needed = sorted({str(cell["plan"][field]) for cell in cells for field in cell["files"]})
    return README.format(
        version=dpfp_ray.__version__,
        cells="\n".join(lines),
        files=FILES.format(names=", ".join(needed)) if needed else "",
    )


def _bytes(text: str) -> bytes:
    return (text.rstrip("\n") + "\n").encode("utf-8", "replace")
