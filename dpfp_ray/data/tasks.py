"""What there is to learn: a GLUE task (hub or folder), the user's own files, or the demo, with its
columns found, its labels read and every row checked.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpfp_ray.data import Split, Task
from dpfp_ray.data.columns import open_split, read_split
from dpfp_ray.data.demo import DEMO_DEV_SHARE, DEMO_LABELS, MADE_UP, demo_rows, made_up_persons
from dpfp_ray.data.labels import GLUE, Glue, require_all_classes
from dpfp_ray.data.readers import SUFFIXES, RawTable, shorten
from dpfp_ray.data.split import at_most, hold_out, subset
from dpfp_ray.data.streams import open_dataset
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
        shown = set(split.users or ())
        both = sorted(shown.intersection(task.train.users or ()))
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
    known = (*task_names(), "custom")
    name = _squeeze(given)
    if name in known:
        return name
    raise UserError(unknown("task", given, known))


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
    known = glue.labels if glue else plan.labels
    whole, names = read_split(tables[0], plan, glue, known)
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
