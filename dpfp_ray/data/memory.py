"""Data that the caller holds in memory, behind the same interface as a file: a pandas DataFrame, a
`datasets.Dataset` or dict of its splits (also in streaming mode), (texts, labels) or (texts,
labels, users), or a dict of columns.

A plan is public and hashed, so it names such data by a word only: `memory:data`, or what the caller
wrote there himself, such as Plan(train_file="memory:reviews").
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpfp_ray.data import Task
from dpfp_ray.data.readers import BATCH, RawTable, Row, numbered
from dpfp_ray.data.streams import open_dataset
from dpfp_ray.data.tasks import DEV_STEMS, MEMORY, load_task
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError

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
        shown = ", ".join(f"{column} {count:,}" for column, count in lengths.items())
        raise UserError(f"{name}: the columns differ in length ({shown}); give one row for each")

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
