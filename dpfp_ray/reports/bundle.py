"""A replication bundle: one zip with what others need to check a report and to run it again.

    README.md            what is in it, and how to run a cell again
    bundle.json          every cell: its plan, its scores, its spread; and the sha256 of every file
    plans/CELL.yaml      the plan of each cell, for `dpfp train --plan`
    records/ID.json      the record of every run: `dpfp report BUNDLE_FOLDER` makes the report again
    report/              the page, its tables and figures
    requirements.txt     every installed package, with its exact version
    environment.json     Python, system, and a digest of dpfp-ray's own source
    commands.txt         the command of each cell

No seeds: with one, the noise could be taken off. No data, and no folders of the machine that made
it (`portable.py`). The same records in the same environment give the same bytes.
"""

import hashlib
import platform
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import dpfp_ray
from dpfp_ray.reports.model_card import train_command
from dpfp_ray.reports.portable import (
    portable_record,
    refuse_secrets,
    without_labels,
)
from dpfp_ray.results.cells import Cell, cells_of
from dpfp_ray.results.runs import read_runs
from dpfp_ray.results.store import file_name, record_id
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json, whole_file
from dpfp_ray.training.dev_scores import Select
from dpfp_ray.training.load_model import plan_of

FORMAT = 1
INDEX = "bundle.json"
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the oldest time that a zip can say: equal bundles, equal bytes
README = """\
# Replication bundle

Made by dpfp-ray {version}. `report/index.html` opens in a browser. Nothing in here is a training
record, a seed or a secret: runs that are made again draw new noise and are expected within the
spread of these, not at the same number.

    pip install -r requirements.txt        # the same versions, besides dpfp-ray {version} itself
    dpfp reproduce {name}                  # every cell again, and whether it lands in its spread
    dpfp reproduce {name} --only CELL      # one of those below
    dpfp report . --output again           # tables and figures from records/, in this folder

Cells:

{cells}
{files}"""
FILES = """
These plans read files that are not in here: {names}. Put them into one folder and give it as
`--files FOLDER`.
"""


@dataclass(frozen=True)
class Contents:
    """The records of a report as they leave, and the report that was made from them."""

    records: Sequence[Mapping[str, Any]]
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
    files["commands.txt"] = _bytes("\n".join(f"{c['cell']}\n    {c['command']}" for c in cells))
    files["requirements.txt"] = _bytes("\n".join(installed()))
    files["environment.json"] = _bytes(to_json(environment(), indent=2))
    files["README.md"] = _bytes(readme(path.name, cells))
    index = {
        "format": FORMAT,
        "made_by": f"dpfp-ray {dpfp_ray.__version__}",
        "select": contents.select,
        "cells": [
            {k: v for k, v in cell.items() if k not in ("plan", "command")} for cell in cells
        ],
        "files": {n: hashlib.sha256(content).hexdigest() for n, content in sorted(files.items())},
    }
    files[INDEX] = _bytes(to_json(index, indent=2))
    refuse_secrets(files)
    try:
        with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle:
            for name, content in sorted(files.items()):
                entry = zipfile.ZipInfo(name, LONG_AGO)
                entry.external_attr = 0o644 << 16
                bundle.writestr(entry, content, zipfile.ZIP_DEFLATED)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give another --bundle") from None


def portable_records(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [portable_record(record) for record in records]


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
    plan = {key: value for key, value in record["plan"].items() if value is not None}
    answers = cell.first.answers
    rows = [n for n in cell.first.part("dev_records").values() if isinstance(n, int)]
    return {
        "cell": name,
        "method": cell.key.method,
        "task": cell.key.task,
        "model": cell.key.model,
        "guarantee": cell.guarantee,
        "plan_file": f"plans/{name}.yaml",
        "files": record["files"],
        "accuracy": [float(run.row["accuracy"]) for run in cell.runs],
        "dev_rows": rows[0] if rows else None,
        "dev_fingerprint": None if answers is None else answers.fingerprint,
        "settings": cell.settings,
        "tuning": cell.tuning,
        "noise_multiplier": cell.first.row["noise_multiplier"],
        "runs": [str(run.row["id"]) for run in cell.runs],
        "plan": plan,
        "command": train_command(plan_of(record)),
    }


def plan_text(cell: Mapping[str, Any]) -> str:
    import yaml

    plan = {k: list(v) if isinstance(v, tuple) else v for k, v in cell["plan"].items()}
    text: str = yaml.safe_dump(plan, sort_keys=False, allow_unicode=True)
    return f"# {cell['cell']}\n{text}"


def installed() -> list[str]:
    """name==version of every package; where it was installed from is this machine's business."""
    found = {
        str(one.metadata["Name"]).lower(): one.version
        for one in metadata.distributions()
        if one.metadata["Name"]
    }
    found.pop("dpfp-ray", None)  # environment.json has it: an index may not
    return [f"{name}=={version}" for name, version in sorted(found.items())]


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


def readme(name: str, cells: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"- `{cell['cell']}`: {len(cell['accuracy'])} run{'s' * (len(cell['accuracy']) != 1)}, "
        f"accuracy {sum(cell['accuracy']) / len(cell['accuracy']):.4f}, ε {cell['guarantee']}"
        for cell in cells
    ]
    needed = sorted({str(cell["plan"][field]) for cell in cells for field in cell["files"]})
    return README.format(
        version=dpfp_ray.__version__,
        name=name,
        cells="\n".join(lines),
        files=FILES.format(names=", ".join(needed)) if needed else "",
    )


def _bytes(text: str) -> bytes:
    return (text.rstrip("\n") + "\n").encode("utf-8", "replace")
