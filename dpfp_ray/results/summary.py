"""From records to what is compared: runs, and cells of runs that may be averaged.

A cell is (model, task, method, ε, accountant). Its seeds of one setting are averaged; where several
settings were tried (a sweep), the best one stands for the cell, and `settings` says of how many.
The table of `dpfp compare`, the report and the service all show these cells.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, stdev
from typing import Any, NamedTuple

from dpfp_ray.plan.method_spec import FIRST_MODE, METHODS, is_private
from dpfp_ray.results.rows import flatten, section

# The paper's tasks, in its order; others follow by name.
TASK_NAMES = {"mnli": "MNLI", "qqp": "QQP", "qnli": "QNLI", "sst2": "SST-2"}
SPLIT_NAMES = {("mnli", "matched"): "MNLI-m", ("mnli", "mismatched"): "MNLI-mm"}
ACCOUNTANT_NAMES = {"gdp": "GDP + CLT", "rdp": "RDP", "pld": "PLD"}
NOMINAL, REFUTED = "†", "‡"


def label(plan: Mapping[str, Any]) -> str:
    """A method's name, with what makes it a variant: `dpfp moments`, `dpsgd top:2`."""
    parts = [str(plan.get("method") or "unknown")]
    if plan.get("mode") not in (None, FIRST_MODE):
        parts.append(str(plan["mode"]))
    elif plan.get("scope") not in (None, "all"):
        parts.append(str(plan["scope"]))
    if plan.get("lora_freeze_a"):
        parts.append("frozen-A")
    if plan.get("clip_style") not in (None, "abadi"):
        parts.append(str(plan["clip_style"]))
    if plan.get("adjacency") == "replace_one":
        parts.append("replace-one")
    return " ".join(parts)


class Key(NamedTuple):
    model: str
    task: str
    method: str
    epsilon: float | None
    accountant: str | None


class Budget(NamedTuple):
    """Comparable are only runs whose ε was calibrated by the same accountant."""

    accountant: str
    epsilon: float

    def __str__(self) -> str:
        return f"ε = {self.epsilon:g} ({ACCOUNTANT_NAMES.get(self.accountant, self.accountant)})"


@dataclass(frozen=True)
class Run:
    """One record; `row` holds its flat facts, where what is missing or nonsense is None."""

    record: Mapping[str, Any]
    row: Mapping[str, Any]

    def part(self, name: str) -> Mapping[str, Any]:
        return section(self.record, name)

    @property
    def history(self) -> list[Mapping[str, Any]]:
        """What the record says of each epoch."""
        found = self.record.get("history")
        return [e for e in found if isinstance(e, Mapping)] if isinstance(found, list) else []

    @cached_property
    def method(self) -> str:
        return label(self.part("plan"))

    @cached_property
    def task(self) -> str:
        """The task; a subset or a file of one's own is another task than the whole."""
        plan, name = self.part("plan"), str(self.row["task"] or "unknown")
        shown = TASK_NAMES.get(name, name)
        if plan.get("train_file"):
            shown += f": {str(plan['train_file']).replace(chr(92), '/').rsplit('/', 1)[-1]}"
        if plan.get("max_train") is not None:
            records = self.row["records"]  # of an audit too: its canaries take records' places
            shown += f" ({records:,} records)" if isinstance(records, int) else " (subset)"
        return shown

    @cached_property
    def model(self) -> str:
        """A hub id as it is; of a folder only its own name, as paths say more than they should."""
        name = str(self.row["model"] or "unknown").replace("\\", "/").rstrip("/")
        return name.rsplit("/", 1)[-1] if name.startswith(("/", ".", "~")) else name

    @property
    def whole_task(self) -> bool:
        plan = self.part("plan")
        return plan.get("max_train") is None and plan.get("max_dev") is None

    @property
    def key(self) -> Key:
        row = self.row
        return Key(self.model, self.task, self.method, row["epsilon"], row["accountant"])

    @property
    def setting(self) -> str:
        """Equal for repetitions of one plan with other seeds."""
        return str(self.row["plan_hash"] or self.row["id"])

    @property
    def scored(self) -> bool:
        return self.row["status"] == "finished" and _finite(self.row["accuracy"])

    @property
    def tuning(self) -> bool:
        """Was it a candidate of `compare --tune`, and not part of the comparison itself?"""
        return self.part("trial").get("group") == "tune"

    @property
    def refuted(self) -> bool:
        return self.outcome == "refuted"

    @property
    def outcome(self) -> str | None:
        """What an audit found: refuted, consistent or no claim; None if there was none."""
        return self.row["verdict"]

    @property
    def nominal(self) -> bool:
        """Is its ε what an accounting says, and no guarantee?"""
        return self.row["guarantee"] == "nominal"

    @property
    def mark(self) -> str:
        return NOMINAL if self.nominal else ""

    @property
    def private(self) -> bool:
        return is_private(self.row["method"])

    @property
    def splits(self) -> dict[str, float]:
        """Accuracy for each dev set, in the task's own order."""
        order = [str(name) for name in self.part("dev_records")]
        known = {
            name.removeprefix("accuracy_"): value
            for name, value in self.row.items()
            if name.startswith("accuracy_") and _finite(value)
        }
        return {name: known[name] for name in order if name in known}


@dataclass(frozen=True)
class Cell:
    """The runs behind one number of the main table: one setting, any number of seeds."""

    key: Key
    runs: Sequence[Run]
    settings: int = 1
    others: Sequence[Run] = field(default=())  # other settings, failed, stopped, audited

    @cached_property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def base_method(self) -> str:
        return str(self.first.row["method"])

    @property
    def private(self) -> bool:
        return self.first.private

    @property
    def accuracy(self) -> float:
        return mean(run.row["accuracy"] for run in self.runs)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return _deviation([run.row["accuracy"] for run in self.runs])

    def split(self, name: str) -> tuple[float, float | None] | None:
        """Mean and deviation on one dev set."""
        scores = [run.splits[name] for run in self.runs if name in run.splits]
        return (mean(scores), _deviation(scores)) if scores else None

    def average(self, name: str) -> float | None:
        """Mean of a numeric column over the seeds that have it."""
        values = [run.row[name] for run in self.runs if _finite(run.row.get(name))]
        return mean(values) if values else None

    @property
    def refutation(self) -> Run | None:
        """The audited run with the highest bound, if an audit refuted this cell's ε."""
        refuted = [run for run in (*self.runs, *self.others) if run.refuted]
        return max(refuted, key=lambda run: run.row["audit_epsilon"] or 0.0, default=None)

    @property
    def guarantee(self) -> str:
        """none | proved | nominal | refuted | unknown"""
        if self.refutation is not None:
            return "refuted"
        return str(self.first.row["guarantee"] or "unknown")

    @property
    def mark(self) -> str:
        return self.first.mark + (REFUTED if self.guarantee == "refuted" else "")

    @property
    def budget(self) -> Budget | None:
        if self.key.epsilon is None:
            return None
        return Budget(self.key.accountant or "unknown", self.key.epsilon)

    @property
    def standard_error(self) -> float:
        """Of the accuracy: over seeds if there are some, else of a sample of dev records."""
        if self.spread is not None:
            return self.spread / math.sqrt(len(self.runs))
        counts = [n for n in self.first.part("dev_records").values() if isinstance(n, int)]
        score = self.accuracy
        return math.sqrt(max(score * (1 - score), 0.0) / counts[0]) if counts and counts[0] else 0.0


def _deviation(scores: Sequence[float]) -> float | None:
    return stdev(scores) if len(scores) > 1 else None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_runs(records: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Runs in a fixed order, so that the same records always give the same report."""
    runs = [Run(record, flatten(record)) for record in records]
    return sorted(runs, key=lambda run: (order(run.key), str(run.row["id"])))


def by_key(runs: Iterable[Run]) -> dict[Key, list[Run]]:
    """All runs of each cell, also those that failed."""
    grouped: dict[Key, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.key, []).append(run)
    return grouped


def cells_of(runs: Iterable[Run]) -> list[Cell]:
    """One cell for each key that has at least one finished run."""
    cells = []
    for key, members in by_key(runs).items():
        scored = [run for run in members if run.scored]
        # Candidates of a tuning, and runs with an audit's canaries in their data, only stand in.
        compared = [run for run in scored if not run.tuning]
        clean = [run for run in compared if not run.part("audit")]
        settings: dict[str, list[Run]] = {}
        for run in clean or compared or scored:
            settings.setdefault(run.setting, []).append(run)
        if not settings:
            continue
        best = max(settings.values(), key=lambda same: mean(run.row["accuracy"] for run in same))
        tried = len({run.setting for run in scored if run in best or not run.part("audit")})
        chosen = {id(run) for run in best}
        cells.append(Cell(key, best, tried, [run for run in members if id(run) not in chosen]))
    return sorted(cells, key=lambda cell: order(cell.key))


def order(key: Key) -> tuple[Any, ...]:
    """Models, then tasks as in the paper, methods as in the paper, then ε."""
    tasks = list(TASK_NAMES.values())
    task, method = key.task.split(" (")[0], key.method.split(" ")[0]
    return (
        key.model,
        tasks.index(task) if task in tasks else len(tasks),
        key.task,
        METHODS.index(method) if method in METHODS else len(METHODS),
        key.method,
        key.accountant or "",
        key.epsilon if key.epsilon is not None else -1.0,
    )


def budgets_of(cells: Iterable[Cell]) -> list[Budget]:
    """The accountant by which most was run comes first, then ε ascending."""
    found = [cell.budget for cell in cells if cell.budget is not None]
    uses = Counter(budget.accountant for budget in found)
    return sorted(set(found), key=lambda b: (-uses[b.accountant], b.accountant, b.epsilon))
