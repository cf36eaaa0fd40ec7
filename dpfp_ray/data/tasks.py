"""What there is to learn: a GLUE task (hub or folder), the user's own files, or the demo, with its
columns found, its labels read and every row checked.

Data that the caller holds in memory, behind the same interface as a file: a pandas DataFrame, a
`datasets.Dataset` or dict of its splits (also in streaming mode), (texts, labels) or (texts,
labels, users), or a dict of columns.

A plan is public and hashed, so it names such data by a word only: `memory:data`, or what the caller
wrote there himself, such as Plan(train_file="memory:reviews").
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpfp_ray.data import Split, Task
from dpfp_ray.data.columns import (
    GLUE,
    Glue,
    open_split,
    read_asked,
    read_split,
    require_all_classes,
)
from dpfp_ray.data.demo import DEMO_DEV_SHARE, DEMO_LABELS, MADE_UP, demo_rows, made_up_persons
from dpfp_ray.data.readers import BATCH, SUFFIXES, RawTable, Row, numbered, open_dataset, shorten
from dpfp_ray.data.split import at_most, hold_out, subset
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError, unknown

DEV_SHARE = 0.1  # of a file without a dev file
DEV_STEMS = ("dev", "validation", "valid", "val")
# How `train_file` names data that were given to a call; see `memory`.
MEMORY = "memory:"
# A training split and perhaps a dev split, opened and not yet read.
Tables = tuple[RawTable, RawTable | None]


def task_names() -> tuple[str, ...]:
    """Names that need no file of the user's: the GLUE tasks (from the hub) and the demo."""
    return (*GLUE, "demo")


def load_task(plan: Plan, tables: Tables | None = None) -> Task:
    """The records of the plan's task; every problem with them is a `UserError`.

    `tables` are what `train_file` and `dev_file` name if that is no file. `train_file` comes first,
    then `data_dir`, then the hub. Subsets (`max_train`, `max_dev`) are
    taken last, keep the file's order, and contain each other: the first 100 are in the first 200.
    With `user_column`, `max_train` counts persons; dev has none, and is refused if it has one of
    training's.
    """
    name = _task_name(plan.task)
    glue = GLUE.get(name)
    if plan.dev_file and not plan.train_file:
        raise UserError("dev_file is given without train_file; give both")
    if plan.data_dir and plan.train_file:
        raise UserError("data_dir and train_file are both given; drop one")
    if glue and plan.labels not in (None, glue.labels):
        raise UserError(f"task {name} has its own labels ({', '.join(glue.labels)}); drop labels")
    if plan.max_per_user is not None and plan.user_column is None:
        raise UserError(
            f"max_per_user is {plan.max_per_user}, but nothing says whose a record is; give "
            "--user-column NAME, or drop it"
        )
    if plan.labels and len(plan.labels) < 2:
        raise UserError(f"labels names only {plan.labels[0]!r}; two classes or more are needed")
    if plan.train_file:
        task = _from_tables(name, plan, glue, tables or _open_files(plan, glue))
    elif name == "demo":
        if plan.data_dir:
            raise UserError("data_dir is given but the task is demo; name the task, --task sst2")
        task = _demo(plan.user_column)
    elif glue is None:
        raise UserError("task custom needs train_file; give --train-file FILE")
    elif plan.data_dir:
        task = _from_folder(name, plan, glue)
    else:
        task = _from_hub(name, plan, glue)
    if task.train.users is not None:
        task = _without_dev_persons(task)
    dev = {key: subset(split, plan.max_dev) for key, split in task.dev.items()}
    train = subset(at_most(task.train, plan.max_per_user), plan.max_train)
    return Task(task.name, task.label_names, train, dev)


def _without_dev_persons(task: Task) -> Task:
    """Nobody of training may be in dev: its scores are shown as they are, and say who is in it."""
    for name, split in task.dev.items():
        dev_persons = set(split.users or ())
        both = sorted(dev_persons.intersection(task.train.users or ()))
        if both:
            raise UserError(
                f"{shorten(both[0])} is in training and in {name} (in both: {len(both):,}); "
                f"take their rows out of one of them, or drop the dev file: a tenth of the persons "
                f"is then held out"
            )
    dev = {name: replace(split, users=None) for name, split in task.dev.items()}
    return replace(task, dev=dev)


def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _task_name(given: str) -> str:
    names = (*task_names(), "custom")
    name = _squeeze(given)
    if name in names:
        return name
    raise UserError(unknown("task", given, names))


# Where the records come from -----------------------------------------------------------------


def _demo(user_column: str | None = None) -> Task:
    if user_column not in (None, MADE_UP):
        raise UserError(
            f"user_column is {user_column!r}, but the demo has no persons; {MADE_UP!r} groups its "
            f"rows by chance, for a try"
        )
    texts, labels = demo_rows()
    users = made_up_persons(texts) if user_column else None
    train, dev = hold_out(Split(texts, None, labels, users=users), DEMO_DEV_SHARE)
    return Task("demo", DEMO_LABELS, train, {"dev": dev})


def _open_files(plan: Plan, glue: Glue | None) -> Tables:
    if str(plan.train_file).startswith(MEMORY):
        raise UserError(f"train_file {plan.train_file} names data in memory; give them as data=")
    train = open_split(Path(str(plan.train_file)).expanduser(), glue, plan.header)
    if not plan.dev_file:
        return train, None
    return train, open_split(Path(plan.dev_file).expanduser(), glue, plan.header)


def _from_tables(name: str, plan: Plan, glue: Glue | None, tables: Tables) -> Task:
    labels = glue.labels if glue else plan.labels
    whole, names = read_split(tables[0], plan, glue, labels)
    require_all_classes(whole, names, tables[0].path)
    if tables[1] is not None:
        dev, _ = read_split(tables[1], plan, glue, names)
        return Task(name, names, whole, {"dev": dev})
    train, dev = hold_out(whole, DEV_SHARE)
    if not len(dev):
        raise UserError(
            f"{tables[0].path}: nothing can be held out without emptying a class; give --dev-file "
            f"FILE"
        )
    return Task(name, names, train, {"dev": dev})


def _from_folder(name: str, plan: Plan, glue: Glue) -> Task:
    folder = _task_folder(Path(str(plan.data_dir)).expanduser(), name, glue)
    train_path = _file_of(folder, ("train",))
    if train_path is None:
        raise UserError(f"{folder}: no train.tsv (or .csv, .jsonl, .parquet); add it")
    train, _ = read_split(open_split(train_path, glue), plan, glue, glue.labels)
    require_all_classes(train, glue.labels, train_path)
    dev: dict[str, Split] = {}
    for key in glue.dev:
        suffix = "" if key == "dev" else f"_{key}"
        path = _file_of(folder, tuple(stem + suffix for stem in DEV_STEMS))
        if path is not None:
            dev[key], _ = read_split(open_split(path, glue), plan, glue, glue.labels)
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


def _from_hub(name: str, plan: Plan, glue: Glue) -> Task:
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


def task_from_hub(name: str, data: Mapping[str, Any], plan: Plan) -> Task:
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
        table = open_dataset(Path("nyu-mll/glue") / name / stored, data[stored])
        splits[key], _ = read_split(table, plan, glue, glue.labels, skip=True)
    return Task(name, glue.labels, splits.pop("train"), splits)


ACCEPTED = "a DataFrame, a datasets.Dataset, (texts, labels), or a dict of columns or splits"
USER = "user"  # the column of (texts, labels, users), and of users that come apart
# What messages about files advise, in the words of a call.
ADVICE = {
    "give --dev-file FILE": "give dev=",
    "give another --label-column": "give another label=",
    "pass --bad-rows skip": "use a plan with bad_rows='skip'",
    "--labels": "the plan's labels",
    "--user-column": "users=",
    "drop the dev file": "drop dev=",
} | {f"--{name}-column": f"{name}=" for name in ("text", "pair", "label")}


def in_memory(
    plan: Plan,
    data: Any,
    *,
    dev: Any = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    users: Any = None,
) -> tuple[Plan, Task]:
    """`plan` on `data` in place of a file, and the data as a task, checked as files are.

    `users` names the column that says whose a row is, or is that column.
    """
    if users is not None and not isinstance(users, str):
        train, *more = _splits(data)
        data = {"train": {**_columns("data", train), USER: _plain(users)}}
        data |= dict(zip(DEV_STEMS, more, strict=False))
        users = USER
    has_dev = dev is not None or bool(_splits(data)[1:])
    plan = name_memory(plan, has_dev, text, pair, label, users)
    return plan, memory_task(plan, data, dev)


def name_memory(
    plan: Plan,
    has_dev: bool,
    text: str | None,
    pair: str | None,
    label: str | None,
    user: str | None = None,
) -> Plan:
    """`plan` with words in place of files, and the columns that the caller names."""
    for name in ("train_file", "dev_file", "data_dir"):
        value = getattr(plan, name)
        if value is not None and not value.startswith(MEMORY):
            raise UserError(f"data= and {name} {value} are both given; drop one")
    columns: dict[str, Any] = {"text_column": text, "pair_column": pair, "label_column": label}
    columns["user_column"] = user
    return dataclasses.replace(
        plan,
        train_file=plan.train_file or f"{MEMORY}data",
        dev_file=plan.dev_file or (f"{MEMORY}dev" if has_dev else None),
        **{name: value for name, value in columns.items() if value is not None},
    )


def memory_task(plan: Plan, data: Any, dev: Any = None) -> Task:
    """The records of `data` for a plan that names them."""
    train, *more = _splits(data)
    if dev is not None and more:
        raise UserError("data= has a validation split and dev= is given too; drop one")
    dev = dev if dev is not None else next(iter(more), None)
    tables = (_table("data", train), None if dev is None else _table("dev", dev))
    with _advice_for_calls():
        return load_task(plan, tables)


@contextmanager
def _advice_for_calls() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        message = str(error)
        for flag, argument in ADVICE.items():
            message = message.replace(flag, argument)
        raise UserError(message) from None


def rows_in_memory(
    data: Any, plan: Plan, names: tuple[str, ...]
) -> tuple[bool, Iterator[tuple[tuple[str, ...], int | None]]]:
    """As `read_asked`, of data that the caller holds."""
    with _advice_for_calls():
        return read_asked(_table("data", data), plan, None, names)


def _splits(data: Any) -> list[Any]:
    """The training split and, if `data` is a dict of splits that has one, the dev split."""
    if not isinstance(data, Mapping) or "train" not in data:
        return [data]
    return [data["train"], *(data[stem] for stem in DEV_STEMS if stem in data)][:2]


def _table(name: str, data: Any) -> RawTable:
    if _is_dataset(data):
        return open_dataset(Path(name), data)
    if _is_frame(data):
        return _frame_table(name, data)
    columns = _columns(name, data)
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{column} {count:,}" for column, count in lengths.items())
        raise UserError(f"{name}: the columns differ in length ({counts}); give one row for each")

    def rows(wanted: Sequence[int]) -> Iterator[Row]:
        return numbered([[list(columns.values())[i] for i in wanted]])

    return RawTable(Path(name), tuple(columns), rows, unit="row")


def _frame_table(name: str, data: Any) -> RawTable:
    def rows(wanted: Sequence[int]) -> Iterator[Row]:
        chosen, starts = list(wanted), range(0, len(data), BATCH)
        return numbered(_plain_frame(data.iloc[at : at + BATCH, chosen]) for at in starts)

    return RawTable(Path(name), tuple(map(str, data.columns)), rows, unit="row")


def _plain_frame(data: Any) -> list[list[Any]]:
    """The columns as plain Python objects; what is missing is None."""
    frame = data.astype(object).where(data.notna(), None)
    return [frame.iloc[:, i].tolist() for i in range(frame.shape[1])]


def _is_frame(data: Any) -> bool:
    return hasattr(data, "iloc") and hasattr(data, "columns")


def _is_dataset(data: Any) -> bool:
    return hasattr(data, "column_names") and hasattr(data, "select_columns")


def _columns(name: str, data: Any) -> dict[str, Sequence[Any]]:
    """Column names and their values as plain Python objects; what is missing is None."""
    if _is_frame(data):
        return dict(zip(map(str, data.columns), _plain_frame(data), strict=True))
    if _is_dataset(data) and hasattr(data, "__len__"):
        return {str(column): list(data[column]) for column in data.column_names}
    if isinstance(data, Mapping) and data:
        return {str(column): _plain(values) for column, values in data.items()}
    if isinstance(data, tuple | list) and len(data) in (2, 3) and not isinstance(data[0], str):
        return dict(zip(("text", "label", USER), map(_plain, data), strict=False))
    if _is_dataset(data):
        raise UserError(f"{name} is a stream; name the column that says whose a row is, users=NAME")
    raise UserError(f"{name} is a {type(data).__name__}; give {ACCEPTED}")


def _plain(values: Any) -> list[Any]:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise UserError(f"{values!r:.60} is no column; give {ACCEPTED}")
    return list(values.tolist() if hasattr(values, "tolist") else values)
