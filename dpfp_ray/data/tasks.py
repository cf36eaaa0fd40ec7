"""What there is to learn: a GLUE task (hub or folder), the user's own files, or the demo, with its
columns found, its labels read and every row checked.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dpfp_ray.data import Split, Task, hold_out, subset
from dpfp_ray.data.demo import DEMO_DEV_ROWS, DEMO_LABELS, demo_rows
from dpfp_ray.data.files import (
    SUFFIXES,
    BadRows,
    Row,
    Table,
    find_column,
    open_table,
    shorten,
    text_problem,
)
from dpfp_ray.errors import UserError

__all__ = ["GLUE", "PAPER_RECORDS", "DataChoice", "Split", "Task", "load_task", "task_names"]

# The paper's own D for each task; except for SST-2 they are not the sizes of GLUE's training sets.
PAPER_RECORDS = {"mnli": 240_942, "qqp": 384_348, "qnli": 104_374, "sst2": 67_349}

# Column names in use, best first. A GLUE task takes the best that is there; for the user's own
# files two candidates are a question only the user can answer.
TEXT = ("text", "sentence", "review", "content", "tweet", "comment", "document", "message", "body")
FIRST = ("sentence1", "premise", "question1", "#1 string", "text1", "text_a", "question")
SECOND = ("sentence2", "hypothesis", "question2", "#2 string", "text2", "text_b", "sentence")
LABEL = (
    *("gold_label", "label", "is_duplicate", "quality"),
    *("labels", "target", "class", "category", "sentiment", "polarity"),
)

DEV_STEMS = ("dev", "validation", "valid", "val")


class DataChoice(Protocol):
    """The fields of a `Plan` that decide which records a run sees."""

    @property
    def task(self) -> str: ...
    @property
    def data_dir(self) -> str | None: ...
    @property
    def train_file(self) -> str | None: ...
    @property
    def dev_file(self) -> str | None: ...
    @property
    def text_column(self) -> str | None: ...
    @property
    def pair_column(self) -> str | None: ...
    @property
    def label_column(self) -> str | None: ...
    @property
    def labels(self) -> tuple[str, ...] | None: ...
    @property
    def max_train(self) -> int | None: ...
    @property
    def max_dev(self) -> int | None: ...
    @property
    def bad_rows(self) -> str: ...


@dataclass(frozen=True)
class Glue:
    """One line of the registry. The label order is the hub's, so that numbers mean the same."""

    folder: str
    labels: tuple[str, ...]
    paired: bool = False
    dev: tuple[str, ...] = ("dev",)
    synonyms: Mapping[str, int] = field(default_factory=dict)
    # Columns of the original file where that has no header.
    headerless: tuple[str, ...] = ()


_YES_NO = {"false": 0, "true": 1}
_COLA = ("source", "label", "star", "sentence")
_ENTAILMENT = ("entailment", "not_entailment")
GLUE = {
    "sst2": Glue("SST-2", ("negative", "positive"), synonyms={"neg": 0, "pos": 1, **_YES_NO}),
    "qnli": Glue("QNLI", _ENTAILMENT, paired=True),
    "qqp": Glue("QQP", ("not_duplicate", "duplicate"), paired=True, synonyms=_YES_NO),
    "mnli": Glue(
        "MNLI",
        ("entailment", "neutral", "contradiction"),
        paired=True,
        dev=("matched", "mismatched"),
    ),
    "cola": Glue("CoLA", ("unacceptable", "acceptable"), synonyms=_YES_NO, headerless=_COLA),
    "mrpc": Glue("MRPC", ("not_equivalent", "equivalent"), paired=True, synonyms=_YES_NO),
    "rte": Glue("RTE", _ENTAILMENT, paired=True),
    "wnli": Glue("WNLI", _ENTAILMENT[::-1], paired=True),
}


def task_names() -> tuple[str, ...]:
    """Names that need no file of the user's: the GLUE tasks (from the hub) and the demo."""
    return (*GLUE, "demo")


def load_task(plan: DataChoice) -> Task:
    """The records of the plan's task; every problem with them is a `UserError`.

    `train_file` comes first, then `data_dir`, then the hub. Subsets (`max_train`, `max_dev`) are
    taken last, keep the file's order, and contain each other: the first 100 are in the first 200.
    """
    name = _task_name(plan.task)
    glue = GLUE.get(name)
    if plan.dev_file and not plan.train_file:
        raise UserError("dev_file is given without train_file; give both")
    if plan.data_dir and plan.train_file:
        raise UserError("data_dir and train_file are both given; drop one")
    if glue and plan.labels not in (None, glue.labels):
        raise UserError(f"task {name} has its own labels ({', '.join(glue.labels)}); drop labels")
    if plan.labels and len(plan.labels) < 2:
        raise UserError(f"labels names only {plan.labels[0]!r}; two classes or more are needed")
    if plan.train_file:
        task = _from_files(name, plan, glue)
    elif name == "demo":
        if plan.data_dir:
            raise UserError("data_dir is given but the task is demo; name the task, --task sst2")
        task = _demo()
    elif glue is None:
        raise UserError("task custom needs train_file; give --train-file FILE")
    elif plan.data_dir:
        task = _from_folder(name, plan, glue)
    else:
        task = _from_hub(name, plan, glue)
    dev = {key: subset(split, plan.max_dev) for key, split in task.dev.items()}
    return Task(task.name, task.label_names, subset(task.train, plan.max_train), dev)


def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _task_name(given: str) -> str:
    known = (*task_names(), "custom")
    name = _squeeze(given)
    if name in known:
        return name
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"use one of {', '.join(known)}"
    raise UserError(f"unknown task {given!r}; {hint}")


# Where the records come from -----------------------------------------------------------------


def _demo() -> Task:
    texts, labels = demo_rows()
    train, dev = hold_out(Split(texts, None, labels), DEMO_DEV_ROWS)
    return Task("demo", DEMO_LABELS, train, {"dev": dev})


def _from_files(name: str, plan: DataChoice, glue: Glue | None) -> Task:
    path = Path(str(plan.train_file)).expanduser()
    known = glue.labels if glue else plan.labels
    whole, names = _read_split(_open(path, glue), plan, glue, known)
    _require_all_classes(whole, names, path)
    if plan.dev_file:
        dev_path = Path(plan.dev_file).expanduser()
        dev, _ = _read_split(_open(dev_path, glue), plan, glue, names)
        return Task(name, names, whole, {"dev": dev})
    train, dev = hold_out(whole, max(1, len(whole) // 10))
    if not len(dev):
        raise UserError(
            f"{path}: no row can be held out without emptying a class; give --dev-file FILE"
        )
    return Task(name, names, train, {"dev": dev})


def _from_folder(name: str, plan: DataChoice, glue: Glue) -> Task:
    folder = _task_folder(Path(str(plan.data_dir)).expanduser(), name, glue)
    train_path = _file_of(folder, ("train",))
    if train_path is None:
        raise UserError(f"{folder}: no train.tsv (or .csv, .jsonl, .parquet); add it")
    train, _ = _read_split(_open(train_path, glue), plan, glue, glue.labels)
    _require_all_classes(train, glue.labels, train_path)
    dev: dict[str, Split] = {}
    for key in glue.dev:
        suffix = "" if key == "dev" else f"_{key}"
        path = _file_of(folder, tuple(stem + suffix for stem in DEV_STEMS))
        if path is not None:
            dev[key], _ = _read_split(_open(path, glue), plan, glue, glue.labels)
        elif key != "mismatched":
            raise UserError(f"{folder}: no dev{suffix}.tsv (or .csv, .jsonl, .parquet); add it")
    return Task(name, glue.labels, train, dev)


def _task_folder(root: Path, name: str, glue: Glue) -> Path:
    """`root` itself, or the folder of the task inside it under any usual spelling."""
    if not root.is_dir():
        raise UserError(f"data_dir {root}: there is no such folder; check the path")
    inside = [p for p in sorted(root.iterdir()) if p.is_dir() and _squeeze(p.name) == name]
    usable = [p for p in inside if _file_of(p, ("train",))]
    if len(usable) > 1:
        both = " and ".join(p.name for p in usable)
        raise UserError(f"data_dir {root}: both {both} look like {name}; name one of them")
    if inside:
        return (usable or inside)[0]
    if _file_of(root, ("train",)) is None:
        raise UserError(
            f"data_dir {root}: neither a folder {glue.folder} nor a train.tsv in it; "
            f"give the folder that holds {glue.folder}/train.tsv"
        )
    own = _squeeze(root.resolve().name)
    if own in GLUE and own != name:
        # SST-2 and CoLA have the same columns: nothing later would notice the mix-up.
        raise UserError(f"data_dir {root} is a folder of {own}, not of {name}; change one of them")
    return root


def _file_of(folder: Path, stems: Sequence[str]) -> Path | None:
    """The file of a split. `-00000-of-00001` is how the hub's own Parquet files are called."""
    for suffix in SUFFIXES:
        for path in sorted(folder.glob("*")):
            stem = path.stem.lower().removesuffix("-00000-of-00001").replace("-", "_")
            if path.suffix.lower() == suffix and stem in stems and path.is_file():
                return path
    return None


def _from_hub(name: str, plan: DataChoice, glue: Glue) -> Task:
    import datasets

    try:
        data = datasets.load_dataset("nyu-mll/glue", name)
    except Exception as error:
        # No connection, a proxy, offline mode, a full disk: each library below raises its own.
        raise UserError(
            f"cannot load {name} from the hub ({shorten(str(error), 120)}); "
            f"give --data-dir FOLDER with {glue.folder}/train.tsv and its dev file"
        ) from error
    return task_from_hub(name, data, plan)


def task_from_hub(name: str, data: Mapping[str, Any], plan: DataChoice) -> Task:
    """The `datasets` splits of `nyu-mll/glue` as a task.

    A few published QQP rows have an empty question. The user cannot correct those, so on this
    path bad rows are always skipped (and counted in a warning).
    """
    glue = GLUE[name]
    keys = {"train": "train"} | {
        key: "validation" if key == "dev" else f"validation_{key}" for key in glue.dev
    }
    splits: dict[str, Split] = {}
    for key, stored in keys.items():
        table = _hub_table(Path("nyu-mll/glue") / name / stored, data[stored])
        splits[key], _ = _read_split(table, plan, glue, glue.labels, skip=True)
    return Task(name, glue.labels, splits.pop("train"), splits)


def _hub_table(path: Path, data: Any) -> Table:
    columns = tuple(data.column_names)

    def rows(wanted: Sequence[int]) -> Iterator[Row]:
        names = [columns[i] for i in wanted]
        values = data.select_columns(names)[:]
        for number, fields in enumerate(zip(*(values[n] for n in names), strict=True), start=1):
            yield Row(number, list(fields))

    return Table(path, columns, rows, unit="row")


# From a table to a split ---------------------------------------------------------------------


def _open(path: Path, glue: Glue | None) -> Table:
    table = open_table(path)
    if glue and len(table.columns) == len(glue.headerless) and table.columns[1] in ("0", "1"):
        return open_table(path, names=glue.headerless)
    return table


def _read_split(
    table: Table,
    plan: DataChoice,
    glue: Glue | None,
    names: tuple[str, ...] | None,
    skip: bool = False,
) -> tuple[Split, tuple[str, ...]]:
    """The table's records and the class names (those given, else those found in it)."""
    wanted = _choose_columns(table, plan, glue)
    *text_columns, label_column = [table.columns[i] for i in wanted]
    numbers = _label_numbers(names, glue) if names else None
    bad = BadRows(table, skip or plan.bad_rows == "skip")
    texts: list[list[str]] = []
    found: list[str] = []
    for row in table.rows(wanted):
        *values, raw = row.fields or [None]
        label = _label_text(raw)
        problem = row.problem or next(
            filter(None, map(text_problem, values, text_columns)),
            "" if label else f"no {label_column!r}",
        )
        if not problem and numbers is not None and _number_of(label, numbers) is None:
            classes = ", ".join(shorten(name) for name in (names or ())[:12])
            problem = f"{label_column!r} is {shorten(raw)}, expected one of {classes}"
        if problem:
            bad.add(row.line, problem)
        else:
            texts.append(values)
            found.append(label)
    if not texts and not bad.found:
        raise UserError(f"{table.path}: a header but no rows; add rows")
    bad.warn(kept=len(texts))
    if names is None or numbers is None:
        names = _classes_of(found, table, label_column)
        numbers = _label_numbers(names, glue)
    labels = np.array([_number_of(label, numbers) for label in found], dtype=np.int64)
    pairs = [pair for _, pair in texts] if len(text_columns) == 2 else None
    return Split([values[0] for values in texts], pairs, labels), names


def _choose_columns(table: Table, plan: DataChoice, glue: Glue | None) -> list[int]:
    """Positions of the text, the second text if there is one, and the label."""
    lowered = [name.casefold() for name in table.columns]

    def present(aliases: Sequence[str], but: Sequence[int] = ()) -> list[int]:
        hits = [i for alias in aliases for i, name in enumerate(lowered) if name == alias]
        return [i for i in hits if i not in but]

    def the_one(role: str, given: str | None, hits: list[int]) -> int:
        flag = f"--{role}-column"
        if given:
            return find_column(table, given, flag)
        if len(hits) == 1 or (hits and glue):
            return hits[0]
        what = "several columns could be" if hits else "no column is known to be"
        raise UserError(f"{table.header}: {what} the {role}; {table.listed()}; give {flag} NAME")

    pair = find_column(table, plan.pair_column, "--pair-column") if plan.pair_column else None
    but = [] if pair is None else [pair]
    singles, firsts = present(TEXT, but), present(FIRST, but)
    seconds = present(SECOND, but)
    if glue:
        paired, choice = glue.paired, firsts if glue.paired else singles or firsts
    else:
        # A pair is guessed only where no column could be a text by itself.
        paired = plan.text_column is None and not singles and bool(firsts and seconds)
        choice = sorted({*singles, *firsts})
    text = the_one("text", plan.text_column, choice)
    if pair is None and paired:
        pair = the_one("pair", None, [i for i in seconds if i != text])
    label = the_one("label", plan.label_column, present(LABEL))
    return [text, label] if pair is None else [text, pair, label]


def _label_text(value: object) -> str:
    """A label as written, except that 1, 1.0, "1" and "1.0" are one label; "" if there is none."""
    text = "" if value is None else str(value).strip()
    if text == "nan" and isinstance(value, float):
        return ""
    whole = re.fullmatch(r"([+-]?\d{1,18})(\.0*)?", text)
    return str(int(whole[1])) if whole else text


def _label_numbers(names: tuple[str, ...], glue: Glue | None) -> dict[str, int]:
    """Every accepted spelling of every class. Exact names win over looser readings."""
    numbers = {_label_text(name): i for i, name in enumerate(names)}
    if len(numbers) != len(names):
        raise UserError(f"labels {', '.join(names)} name a class twice; drop the repetition")
    loose = {_loose(name): i for i, name in enumerate(names)}
    if not any(re.fullmatch(r"[+-]?\d+", name) for name in numbers):
        loose |= {str(i): i for i in range(len(names))}
    return {**(glue.synonyms if glue else {}), **loose, **numbers}


def _number_of(label: str, numbers: Mapping[str, int]) -> int | None:
    exact = numbers.get(label)
    return numbers.get(_loose(label)) if exact is None else exact


def _loose(label: str) -> str:
    return re.sub(r"(?<=\w)[ -](?=\w)", "_", label.casefold())


def _classes_of(found: Sequence[str], table: Table, column: str) -> tuple[str, ...]:
    classes = set(found)
    if len(classes) < 2:
        raise UserError(f"{table.path}: {column!r} is always {shorten(found[0])}; two are needed")
    if len(found) > 20 and len(classes) > len(found) // 2:
        raise UserError(
            f"{table.path}: {column!r} has {len(classes)} different values in {len(found)} rows; "
            f"it is not a class label, give another --label-column"
        )
    try:
        return tuple(sorted(classes, key=float))
    except ValueError:
        return tuple(sorted(classes))


def _require_all_classes(train: Split, names: tuple[str, ...], path: Path) -> None:
    counts = np.bincount(train.labels, minlength=len(names))
    never = [name for name, count in zip(names, counts, strict=True) if not count]
    if never:
        raise UserError(
            f"{path}: no row has the label {shorten(never[0])}; add rows of that class, "
            f"or leave it out of --labels"
        )
