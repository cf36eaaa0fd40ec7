"""Classes and what they are called: in the GLUE tasks, and by the spellings that any file has."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from dpfp_ray.data import Split
from dpfp_ray.data.readers import RawTable, shorten
from dpfp_ray.system.errors import UserError


@dataclass(frozen=True)
class Glue:
    """One of the GLUE tasks: its folder, labels, dev sets, what its files are known to look like.

    The label order is the hub's, so that numbers mean the same.
    """

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


def label_text(value: object) -> str:
    """A label as written, except that 1, 1.0, "1" and "1.0" are one label; "" if there is none."""
    return (
        _label_of(value) if isinstance(value, str | int | float) else _label_of.__wrapped__(value)
    )


@lru_cache(maxsize=4096, typed=True)  # true, 1 and 1.0 are not one key; lists have no hash
def _label_of(value: object) -> str:
    text = "" if value is None else str(value).strip()
    if text == "nan" and isinstance(value, float):
        return ""
    whole = re.fullmatch(r"([+-]?\d{1,18})(\.0*)?", text)
    return str(int(whole[1])) if whole else text


def label_numbers(names: tuple[str, ...], glue: Glue | None) -> dict[str, int]:
    """Every accepted spelling of every class. Exact names win over looser readings."""
    numbers = {label_text(name): i for i, name in enumerate(names)}
    if len(numbers) != len(names):
        raise UserError(f"labels {', '.join(names)} name a class twice; drop the repetition")
    loose = {_loose(name): i for i, name in enumerate(names)}
    if not any(re.fullmatch(r"[+-]?\d+", name) for name in numbers):
        loose |= {str(i): i for i in range(len(names))}
    return {**(glue.synonyms if glue else {}), **loose, **numbers}


def number_of(label: str, numbers: Mapping[str, int]) -> int | None:
    exact = numbers.get(label)
    return numbers.get(_loose(label)) if exact is None else exact


def _loose(label: str) -> str:
    return re.sub(r"(?<=\w)[ -](?=\w)", "_", label.casefold())


def classes_of(
    classes: Collection[str], rows: int, table: RawTable, column: str
) -> tuple[str, ...]:
    if len(classes) < 2:
        only = shorten(next(iter(classes)))
        raise UserError(f"{table.path}: {column!r} is always {only}; two are needed")
    if rows > 20 and len(classes) > rows // 2:
        raise UserError(
            f"{table.path}: {column!r} has {len(classes)} different values in {rows} rows; "
            f"it is not a class label, give another --label-column"
        )
    try:
        return tuple(sorted(classes, key=float))
    except ValueError:
        return tuple(sorted(classes))


def require_all_classes(train: Split, names: tuple[str, ...], path: Path) -> None:
    counts = np.bincount(train.labels, minlength=len(names))
    never = [name for name, count in zip(names, counts, strict=True) if not count]
    if never:
        raise UserError(
            f"{path}: no row has the label {shorten(never[0])}; add rows of that class, "
            f"or leave it out of --labels"
        )
