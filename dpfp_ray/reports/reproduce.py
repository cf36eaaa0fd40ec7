"""Cells of a replication bundle, run again: does the new score lie within the spread of the old?

A run that is made again has another seed. Of n runs with mean m and deviation s, one more lies in
m ± t s √(1 + 1/n) in 95 of 100 cases (t: Student's, n − 1 degrees of freedom). A single run tells
nothing of a spread over seeds; there the rows have to do: twice the variance of an accuracy over so
many dev rows. Nothing is held to less than one dev row.

A bundle comes from others. It is read in memory and never unpacked; its plans name files without
folders, which are looked for in one folder of the reader's choice.
"""

import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.reports.bundle import FORMAT, INDEX
from dpfp_ray.reports.portable import FILE_FIELDS, is_folder, own_name
from dpfp_ray.results.rows import quoted_metrics
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.whole_files import parse_yaml, read_limited
from dpfp_ray.training.dev_scores import Select
from dpfp_ray.training.train import train

CONFIDENCE = 0.95
LARGEST_BUNDLE = 2**26  # bytes
LARGEST_INDEX = 2**23
MOST_FILES = 50_000  # in a bundle
MOST_CELLS = 1_000
LARGEST_PLAN = 2**16
MOST_PLAN_VALUES = 1_000  # a plan has a few dozen fields
# What a damaged zip makes zipfile raise.
DAMAGE = (
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    ValueError,
    OverflowError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
Outcome = Literal["within", "outside"]


@dataclass(frozen=True)
class Bundled:
    """A cell of a bundle: the plan, and the scores that it had."""

    name: str
    plan: dict[str, Any]
    files: tuple[str, ...]
    accuracy: tuple[float, ...]
    dev_rows: int | None
    dev_fingerprint: str | None
    noise_multiplier: float | None
    tuning: str
    settings: int

    @property
    def interval(self) -> tuple[float, float]:
        """Where one more run of this plan is expected."""
        n, centre = len(self.accuracy), mean(self.accuracy)
        row = 1 / self.dev_rows if self.dev_rows else 0.0
        if n > 1:
            from scipy.stats import t

            quantile = float(t.ppf((1 + CONFIDENCE) / 2, n - 1))
            half = quantile * stdev(self.accuracy) * math.sqrt(1 + 1 / n)
        else:
            half = 1.96 * math.sqrt(2 * max(centre * (1 - centre), row) * row)
        half = max(half, row)
        return max(0.0, centre - half), min(1.0, centre + half)

    @property
    def basis(self) -> str:
        n = len(self.accuracy)
        return f"{n} runs" if n > 1 else "one run: over dev rows, the spread over seeds is unknown"

    def as_json(self) -> dict[str, Any]:
        return {"cell": self.name, "runs": len(self.accuracy), "expected": list(self.interval)}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.name}  expected {low:.4f} to {high:.4f} (from {self.basis})"


@dataclass(frozen=True)
class Reproduced:
    """A cell that was run again; `remarks` are what differs besides the seed."""

    cell: str
    outcome: Outcome
    accuracy: float
    before: tuple[float, ...]
    interval: tuple[float, float]
    basis: str
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        low, high = self.interval
        lines = [
            f"{self.cell}: {self.outcome} its spread",
            f"  again {self.accuracy:.4f}; expected {low:.4f} to {high:.4f}, from a mean of "
            f"{mean(self.before):.4f} ({self.basis})",
        ]
        return "\n".join([*lines, *(f"  {remark}" for remark in self.remarks)])


class Bundle:
    """A replication bundle as `dpfp report --bundle` writes it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        with self._opened() as files:
            self._read_cells(files)

    def _read_cells(self, files: zipfile.ZipFile) -> None:
        index = self._json(files, INDEX)
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise UserError(f"{self.path} is no bundle of this version; make it with dpfp report")
        self.select: Select = "best" if index.get("select") == "best" else "last"
        try:
            if len(index["cells"]) > MOST_CELLS:
                raise UserError(
                    f"{self.path} holds {len(index['cells']):,} cells; at most {MOST_CELLS:,} are "
                    "read"
                )
            self.cells = [self._cell(files, facts) for facts in index["cells"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{self.path} is damaged ({error}); get it again") from None

    def _cell(self, files: zipfile.ZipFile, facts: dict[str, Any]) -> Bundled:
        name = str(facts["plan_file"])
        plan = parse_yaml(
            self._read(files, name, LARGEST_PLAN), f"{name} in {self.path}", MOST_PLAN_VALUES
        )
        scores = tuple(float(value) for value in facts["accuracy"])
        cell, rows = str(facts["cell"]), int(facts.get("dev_rows") or 0)
        # The name becomes that of a folder.
        usable = re.fullmatch(r"[a-z0-9.-]+", cell) and cell.strip(".") and isinstance(plan, dict)
        if not usable or not scores or not all(0 <= s <= 1 for s in scores) or rows < 0:
            raise ValueError(f"cell {cell}")
        noise = facts.get("noise_multiplier")
        return Bundled(
            cell,
            plan,
            tuple(str(name) for name in facts["files"]),
            scores,
            rows or None,
            facts.get("dev_fingerprint"),
            None if noise is None else float(noise),
            str(facts.get("tuning") or ""),
            int(facts.get("settings") or 1),
        )

    def _opened(self) -> zipfile.ZipFile:
        try:
            content = read_limited(self.path, LARGEST_BUNDLE)
            # Counted first: a ZipFile makes an object for every entry of the zip's directory.
            if content.count(b"PK\x01\x02") > MOST_FILES:
                raise UserError(f"{self.path} holds more than {MOST_FILES:,} files; give another")
            return zipfile.ZipFile(io.BytesIO(content))
        except FileNotFoundError:
            raise UserError(f"there is no file {self.path}; give a bundle") from None
        except DAMAGE as error:
            raise UserError(f"{self.path} is no bundle ({error}); give another") from None

    def _read(self, files: zipfile.ZipFile, name: str, most: int) -> bytes:
        try:
            # Other compressions may ask for gigabytes before the first byte.
            if files.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"the compression of {name}")
            with files.open(name) as file:
                content = file.read(most + 1)
        except DAMAGE as error:
            raise UserError(f"{self.path} is no bundle ({error}); give another") from None
        if len(content) > most:
            raise UserError(f"{name} in {self.path} is too large for a bundle; get it again")
        return content

    def _json(self, files: zipfile.ZipFile, name: str) -> Any:
        try:
            return json.loads(self._read(files, name, LARGEST_INDEX))
        except ValueError as error:
            raise UserError(f"{self.path} is damaged ({error}); get it again") from None

    def chosen(self, only: Sequence[str]) -> list[Bundled]:
        known = {cell.name: cell for cell in self.cells}
        for name in only:
            if name not in known:
                raise UserError(unknown("cell", name, tuple(known)))
        return [known[name] for name in only] if only else self.cells


def bundle_cells(bundle: str | Path, only: Sequence[str] = ()) -> list[Bundled]:
    """The cells of a bundle (those named, else all), with the scores that they had."""
    return Bundle(bundle).chosen(only)


def reproduce(
    bundle: str | Path,
    *,
    only: str | Sequence[str] = (),
    files: str | Path = ".",
    output: str | Path | None = None,
    **options: Any,
) -> list[Reproduced]:
    """Run the cells of a bundle again, all or `only` some, and hold each against its spread.

    files    the folder with the data files, and models, that the plans name
    output   a folder that keeps the new runs; the same call then continues an unfinished one
    options  threads, reporter, ledger, total_epsilon, total_delta, seed: as in `train`
    """
    opened = Bundle(bundle)
    cells = opened.chosen([only] if isinstance(only, str) else list(only))
    plans = [found_plan(cell, Path(files).expanduser()) for cell in cells]  # all, before the first
    found = []
    for cell, plan in zip(cells, plans, strict=True):
        folder = None if output is None else Path(output).expanduser() / own_name(cell.name)
        record = train(plan, output=folder, **options).record
        accuracy = float(quoted_metrics(record, opened.select)["accuracy"])
        found.append(held_against(cell, accuracy, record))
    return found


def found_plan(cell: Bundled, folder: Path) -> Plan:
    """The cell's plan with the reader's own files; a name with folders in it loses them."""
    values = dict(cell.plan)
    for name in (*FILE_FIELDS, "model"):
        value = str(values.get(name) or "")
        if value and (name in (*FILE_FIELDS, *cell.files) or is_folder(value)):
            values[name] = str(_found(cell, name, value, folder))
    return make_plan(values)


def _found(cell: Bundled, field: str, value: str, folder: Path) -> Path:
    if value.startswith(("memory:", "custom:")):
        raise UserError(
            f"cell {cell.name} was run on {value}, which was in the memory of a program; nobody "
            f"else can run it"
        )
    name = own_name(value)
    place = folder / name
    if field == "data_dir" and not place.is_dir() and folder.is_dir():
        return folder
    if name in ("", ".", "..") or not place.exists():
        raise UserError(
            f"cell {cell.name} needs {name!r} ({field}), which a bundle does not hold, and it is "
            f"not in {folder}; give --files FOLDER"
        )
    return place


def held_against(cell: Bundled, accuracy: float, record: dict[str, Any]) -> Reproduced:
    low, high = cell.interval
    remarks = []
    kept = record.get("predictions") or [{"dev": {}}]
    prints = [facts["fingerprint"] for facts in kept[-1]["dev"].values()]
    if cell.dev_fingerprint and prints and cell.dev_fingerprint != prints[0]:
        remarks.append("the dev rows differ from those of the bundle: this is another task")
    noise = float(record["privacy"]["noise_multiplier"])
    known = cell.noise_multiplier
    if known is not None and not math.isclose(noise, known, rel_tol=2e-3):
        remarks.append(f"the noise differs: σ/C = {noise:.4f}, in the bundle {known:.4f}")
    if cell.tuning == "picked":
        remarks.append(
            f"the bundle's score is the best of {cell.settings} settings by this very dev set, "
            f"which flatters it: less is to be expected"
        )
    # Accuracies are counts of rows: an end of the interval is not missed by rounding.
    within = low - 1e-9 <= accuracy <= high + 1e-9
    outcome: Outcome = "within" if within else "outside"
    return Reproduced(
        cell.name, outcome, accuracy, cell.accuracy, (low, high), cell.basis, tuple(remarks)
    )
