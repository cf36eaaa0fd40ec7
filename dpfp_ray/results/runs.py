"""Runs: a record with what is asked of it again and again, such as its names and its answers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from dpfp_ray.plan.method_spec import (
    FIRST_MODE,
    MARKS,
    METHODS,
    all_specs,
    is_private,
    labels,
    reads_records,
)
from dpfp_ray.results.rows import SPLIT, flatten
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import whole_seconds
from dpfp_ray.training import LEAST_SECONDS
from dpfp_ray.training.dev_scores import DevPredictions, quote
from dpfp_ray.training.record import Record, Select

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The paper's tasks, in its order; others follow by name.
TASK_NAMES = {"mnli": "MNLI", "qqp": "QQP", "qnli": "QNLI", "sst2": "SST-2"}
SPLIT_NAMES = {("mnli", "matched"): "MNLI-m", ("mnli", "mismatched"): "MNLI-mm"}
ACCOUNTANT_NAMES = {"gdp": "GDP + CLT", "rdp": "RDP", "pld": "PLD"}
REFUTED = "‡"


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
    if plan.get("centring") not in (None, "none"):
        parts.append("centred")
    if plan.get("teacher") not in (None, "objpert"):
        parts.append(f"from {plan['teacher']}")
    if plan.get("adjacency") == "replace_one":
        parts.append("replace-one")
    return " ".join(parts)


def method_label(name: str) -> str:
    """A method's name for people: `dpfp moments` is DP-FP (moments)."""
    for spec in all_specs().values():
        if name == (spec.method if spec.mode == FIRST_MODE else f"{spec.method} {spec.mode}"):
            return spec.label
    method, _, variant = name.partition(" ")
    if method not in labels():
        return name
    return f"{labels()[method]} ({variant.replace(' ', ', ').replace('_', ' ')})"


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
    """One record; `row` holds its flat facts, None where one is missing.

    `select` is the rule by which its epoch was chosen. `apart` is what its task's name must say
    beside what other runs of the same name were run on.
    """

    record: Record
    row: Mapping[str, Any]
    select: Select = "last"
    apart: str = ""

    @cached_property
    def method(self) -> str:
        return label(self.record["plan"])

    @property
    def title(self) -> str:
        """The method for people, with the mark of an ε that is not proved."""
        return method_label(self.method) + self.mark

    @property
    def task(self) -> str:
        """The task, with what tells it from others of its name among the runs at hand."""
        return self.named_task + self.apart

    @cached_property
    def named_task(self) -> str:
        """The task; a subset, a file of one's own or another unit is another task."""
        plan, name = self.record["plan"], str(self.row["task"] or "unknown")
        task_name = TASK_NAMES.get(name, name)
        if plan.get("train_file"):
            task_name += f": {str(plan['train_file']).replace(chr(92), '/').rsplit('/', 1)[-1]}"
        if plan.get("max_train") is not None:
            records = self.row["records"]  # of an audit too: its canaries take records' places
            of = f"{self.row['unit']}s"
            task_name += f" ({records:,} {of})" if isinstance(records, int) else " (subset)"
        elif self.row["unit"] == "person":
            task_name += " (per person)"
        return task_name

    @cached_property
    def model(self) -> str:
        """A hub id as it is; of a folder only its own name, as paths say more than they should."""
        name = str(self.row["model"] or "unknown").replace("\\", "/").rstrip("/")
        return name.rsplit("/", 1)[-1] if name.startswith(("/", ".", "~")) else name

    @property
    def dev_rows(self) -> str | None:
        """How many dev rows there are, and of which file: other rows are another comparison."""
        counts = list(self.record["dev_records"].values())
        if not counts:
            return None
        file = str(self.record["plan"].get("dev_file") or "").replace("\\", "/").rsplit("/", 1)[-1]
        return f"{counts[0]:,} rows" + (f" of {file}" if file else "")

    @property
    def whole_task(self) -> bool:
        plan = self.record["plan"]
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
        return self.row["status"] == "finished" and finite(self.row["accuracy"])

    @property
    def tuning(self) -> bool:
        """Was it a candidate of `compare --tune`, and not part of the comparison itself?"""
        return self.record["trial"].get("group") == "tune"

    @property
    def refuted(self) -> bool:
        return self.outcome == "refuted"

    @property
    def outcome(self) -> str | None:
        """What an audit found: refuted, consistent or no claim; None if there was none."""
        return self.row["verdict"]

    @property
    def mark(self) -> str:
        """The mark of an ε that is no proved guarantee."""
        return MARKS.get(self.row["guarantee"] or "", "")

    @property
    def private(self) -> bool:
        return is_private(self.row["method"], self.record["plan"].get("teacher"))

    @property
    def reads_records(self) -> bool:
        return reads_records(self.row["method"], self.record["plan"].get("teacher"))

    @cached_property
    def metrics(self) -> Mapping[str, Any]:
        return quote(self.record["history"], self.select)

    @cached_property
    def predictions(self) -> dict[str, DevPredictions]:
        """Answers behind the quoted score, by dev set; empty for records that kept none."""
        for kept in self.record["predictions"]:
            if kept["epoch"] == self.metrics.get("epoch"):
                try:
                    answers = {n: DevPredictions(**facts) for n, facts in kept["dev"].items()}
                    for one_set in answers.values():
                        one_set.answers(), one_set.truth()
                    return answers
                except UserError:  # answers that cannot be unpacked count as none
                    return {}
        return {}

    @property
    def answers(self) -> DevPredictions | None:
        """Those on the task's first dev set, which the accuracy is of."""
        return next(iter(self.predictions.values()), None)

    @property
    def one_class(self) -> bool:
        return self.metrics.get("one_class") is True

    @property
    def rate(self) -> float | None:
        """Examples a second, if the training was long enough to tell."""
        seconds, rate = self.row["train_seconds"], self.row["examples_per_second"]
        return rate if finite(rate) and (seconds or 0.0) >= LEAST_SECONDS else None

    @property
    def whole_seconds(self) -> float | None:
        """What its epochs so far say that it will have taken, if it has not ended."""
        trial, history = self.record["trial"], self.record["history"]
        if self.row["status"] != "running":
            return trial.get("seconds")
        epoch = history[-1]["epoch"] if history else None
        return whole_seconds(trial.get("seconds"), epoch, self.row["epochs"])

    def seconds_left(self, now: float) -> float | None:
        """Until a running trial ends; `now` is time.time()."""
        trial, whole = self.record["trial"], self.whole_seconds
        if self.row["status"] != "running" or whole is None:
            return None
        since = max(0.0, now - trial["reported_at"]) if "reported_at" in trial else 0.0
        return max(0.0, whole - trial["seconds"] - since)

    @property
    def splits(self) -> dict[str, float]:
        """Accuracy for each dev set, in the task's own order."""
        names = self.record["dev_records"]
        return {name: self.row[SPLIT + name] for name in names if SPLIT + name in self.row}


def correct_answers(runs: Sequence[Run]) -> "NDArray[np.bool_] | None":
    """Which rows each run has right, (runs, rows); None if one kept no answers, or has others."""
    from dpfp_ray.training.dev_scores import stack

    kept = [run.answers for run in runs]
    answers = [one for one in kept if one is not None]
    if not answers or len(answers) < len(kept) or answers[0].rows < 2:
        return None
    try:
        correct: NDArray[np.bool_] = stack(answers) == answers[0].truth()
        return correct
    except UserError:
        return None


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_runs(records: Iterable[Record], select: Select = "last") -> list[Run]:
    """Runs in a fixed order, so that the same records always give the same report.

    Runs of one task's name on different numbers of records, or of dev rows, are different tasks.
    """
    runs = [Run(record, flatten(record, select), select) for record in records]
    sizes: dict[str, set[Any]] = {}
    devs: dict[str, set[Any]] = {}
    for run in runs:
        if run.row["records"] is not None:
            sizes.setdefault(run.named_task, set()).add(run.row["records"])
        if run.dev_rows is not None:
            devs.setdefault(run.named_task, set()).add(run.dev_rows)
    for at, run in enumerate(runs):
        said = ""
        if len(sizes.get(run.named_task, ())) > 1 and run.row["records"] is not None:
            said += f" (D = {run.row['records']:,})"
        if len(devs.get(run.named_task, ())) > 1 and run.dev_rows is not None:
            said += f" (dev: {run.dev_rows})"
        runs[at] = replace(run, apart=said)
    return sorted(runs, key=lambda run: (order(run.key), str(run.row["id"])))


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
