"""From a table to a split: columns found, every row checked.

Classes and what they are called: in the GLUE tasks, and by the spellings that any file has.
"""

import re
import warnings
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from unicodedata import category

import numpy as np

from dpfp_ray.data import Split
from dpfp_ray.data.readers import (
    CSV,
    TSV,
    BadRows,
    RawTable,
    find_column,
    open_files,
    shorten,
    text_problem,
)
from dpfp_ray.data.texts import Texts, TextWriter, distinct, normal
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import Guess, UserError


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
    if len(classes) > MANY_CLASSES and rows < FEW_ROWS * len(classes):
        warnings.warn(
            Guess(
                f"{table.path}: {column!r} has {len(classes)} different values in {rows:,} rows; "
                "is it an id? (--label-column to change it)"
            ),
            stacklevel=2,
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


# Column names in use, best first. A GLUE task takes the best that is there; for the user's own
# files two candidates are a question only the user can answer.
TEXT = ("text", "sentence", "review", "content", "tweet", "comment", "document", "message", "body")
FIRST = ("sentence1", "premise", "question1", "#1 string", "text1", "text_a", "question")
SECOND = ("sentence2", "hypothesis", "question2", "#2 string", "text2", "text_b", "sentence")
# A value in more rows than both of these says nothing about whose row it is.
COMMON_ROWS, COMMON_SHARE = 10, 0.01
# More classes than this, with fewer rows each on average, look like an id's values.
MANY_CLASSES, FEW_ROWS = 50, 20
# Columns that may say whose a row is, by a word of their names.
PERSON = re.compile(
    r"(^|_)(user|author|person|patient|customer|client|speaker|reviewer|account|member)(_|s?$)"
)
LABEL = (
    *("gold_label", "label", "is_duplicate", "quality"),
    *("labels", "target", "class", "category", "sentiment", "polarity"),
)


def open_split(path: Path, glue: Glue | None, header: str = "first_line") -> RawTable:
    """The file with its columns named by its header; by GLUE, or by number, where it has none."""
    table = open_files(path)
    if header == "none":
        if path.suffix.lower() not in (*TSV, *CSV):
            raise UserError(f"{path} names its own columns; drop --no-header")
        return open_files(path, names=tuple(str(n + 1) for n in range(len(table.columns))))
    if glue and len(table.columns) == len(glue.headerless) and table.columns[1] in ("0", "1"):
        return open_files(path, names=glue.headerless)
    return table


def read_split(
    table: RawTable,
    plan: Plan,
    glue: Glue | None,
    names: tuple[str, ...] | None,
    skip: bool = False,
) -> tuple[Split, tuple[str, ...]]:
    """The table's records and the class names (those given, else those found in it)."""
    texts_at, label_at = _choose_columns(table, plan, glue)
    assert label_at is not None
    user_at = _user_column(table, plan, [*texts_at, label_at])
    text_columns, label_column = [table.columns[i] for i in texts_at], table.columns[label_at]
    numbers = label_numbers(names, glue) if names else None
    bad = BadRows(table, skip or plan.bad_rows == "skip")
    used = [*texts_at, label_at, *([] if user_at is None else [user_at])]
    # A later run on the same file may train on another of its columns.
    others = [i for i in table.with_text if i not in used]
    if user_at is None and not glue:
        _ask_for_persons(table, used)
    width = len(texts_at)
    texts = [TextWriter() for _ in texts_at]
    users = TextWriter()
    beside = [TextWriter() for _ in others]
    met: dict[str, int] = {}  # spellings of labels, in the order of their first rows
    codes = array("q")
    for row in table.rows([*used, *others]):
        values, (raw, *whose) = row.fields[:width], row.fields[width : len(used)] or [None]
        label = label_text(raw)
        problem = row.problem or next(
            filter(None, map(text_problem, values, text_columns)),
            "" if label else f"no {label_column!r}",
        )
        user = "".join(map(label_text, whose))
        if not problem and user_at is not None and not user:
            problem = f"no {table.columns[user_at]!r}: whose record it is must be known"
        if not problem and numbers is not None and number_of(label, numbers) is None:
            classes = ", ".join(shorten(name) for name in (names or ())[:12])
            problem = f"{label_column!r} is {shorten(raw)}, expected one of {classes}"
        if problem:
            bad.add(row.line, problem, row.path)
            continue
        for writer, value in zip(texts, values, strict=True):
            writer.add(value)
        for writer, value in zip(beside, row.fields[len(used) :], strict=True):
            writer.add(value if _is_text(value) else "")
        if user_at is not None:
            users.add(user)
        codes.append(met.setdefault(label, len(met)))
    if not codes and not bad.count:
        raise UserError(f"{table.path}: a header but no rows; add rows")
    bad.warn(kept=len(codes))
    if names is None or numbers is None:
        names = classes_of(met, len(codes), table, label_column)
        numbers = label_numbers(names, glue)
    by_code = np.array([number_of(label, numbers) for label in met], dtype=np.int64)
    roles = dict(zip(("text", "pair"), text_columns, strict=False)) | {"label": label_column}
    guessed = [role for role in roles if not glue and not getattr(plan, f"{role}_column")]
    first, *second = (writer.finish() for writer in texts)
    split = Split(
        first,
        second[0] if second else None,
        by_code[np.frombuffer(codes, np.int64)],
        tuple(column for writer in beside if any(column := without_common(writer.finish()))),
        {**roles, "guessed": guessed},
        None if user_at is None else users.finish(),
    )
    return split, names


def _ask_for_persons(table: RawTable, used: Sequence[int]) -> None:
    """Hint at a column that may say whose a row is, if its values repeat."""
    for i, name in enumerate(table.columns):
        if i in used or not PERSON.search(name.casefold()):
            continue
        rows, values = 0, set()
        for row in table.rows([i]):
            rows += 1
            values.add(label_text(row.fields[0]) if row.fields else "")
        if 1 < len(values) < rows:
            warnings.warn(
                Guess(
                    f"{table.path}: {name!r} has {len(values):,} values in {rows:,} rows; if it "
                    f"says whose a row is, --user-column {name} protects persons, not rows alone"
                ),
                stacklevel=2,
            )


def _is_text(value: object) -> bool:
    """Whether a cell holds text of any script, and not only a number, a date or an empty field.

    Numbers are left out because row numbers are the same in all files.
    """
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return any(letter.isalpha() or category(letter) == "So" for letter in value)
    return False


def without_common(column: Texts) -> Texts:
    """The column with "" for values that repeat too often in it to tell whose row it is.

    Such values (a country, a category) would make one group of people of unrelated files. A value
    counts as common above ten rows and above a hundredth of the rows, so that oversampled
    rows, and texts that several annotators labelled, still count.
    """
    groups, _ = distinct(normal(text) for text in column)
    rows_of_value = np.bincount(groups)
    rare = rows_of_value[groups] <= max(COMMON_ROWS, COMMON_SHARE * len(column))
    return column.blank(~rare)


def _user_column(table: RawTable, plan: Plan, taken: Sequence[int]) -> int | None:
    if plan.user_column is None:
        return None
    column = find_column(table, plan.user_column, "--user-column")
    if column in taken:
        raise UserError(
            f"{table.header}: {plan.user_column!r} is the text or the label; give another "
            f"--user-column"
        )
    return column


def read_asked(
    table: RawTable, plan: Plan, glue: Glue | None, names: tuple[str, ...]
) -> tuple[bool, Iterator[tuple[tuple[str, ...], int | None]]]:
    """Rows to predict: whether they have labels, and (texts, class number) one after the other.

    Columns are those of the plan, or found as training finds them; a label may be missing.
    """
    texts_at, label_at = _choose_columns(table, plan, glue, label_needed=False)
    names_of = [table.columns[i] for i in texts_at]
    numbers = label_numbers(names, glue)
    bad = BadRows(table, plan.bad_rows == "skip")

    def rows() -> Iterator[tuple[tuple[str, ...], int | None]]:
        kept = 0
        for row in table.rows([*texts_at] if label_at is None else [*texts_at, label_at]):
            values = row.fields[: len(texts_at)]
            problem = row.problem or next(filter(None, map(text_problem, values, names_of)), "")
            label = None
            if not problem and label_at is not None:
                label = number_of(label_text(row.fields[-1]), numbers)
                if label is None:
                    classes = ", ".join(shorten(name) for name in names[:12])
                    written = shorten(row.fields[-1])
                    where = f"{table.columns[label_at]!r}"
                    problem = f"{where} is {written}, expected one of {classes}"
            if problem:
                bad.add(row.line, problem, row.path)
            else:
                kept += 1
                yield tuple(values), label
        bad.warn(kept)

    return label_at is not None, rows()


def texts_of(table: RawTable) -> Iterator[str]:
    """The texts of a file in which nothing else matters; the column is found as for training."""
    texts_at, _ = _choose_columns(table, Plan(), None, label_needed=False)
    for row in table.rows(texts_at[:1]):
        if not row.problem and row.fields[0]:
            yield str(row.fields[0])


def _choose_columns(
    table: RawTable, plan: Plan, glue: Glue | None, *, label_needed: bool = True
) -> tuple[list[int], int | None]:
    """Positions of the text (and the second text if there is one), and of the label."""
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
    texts = [text] if pair is None else [text, pair]
    label: int | None
    if label_needed:
        label = the_one("label", plan.label_column, present(LABEL))
    else:
        named = [i for i, name in enumerate(table.columns) if name == plan.label_column]
        labels = named if plan.label_column else present(LABEL)
        label = labels[0] if len(labels) == 1 or (labels and glue) else None
    if not glue and table.path.suffix:  # data in memory have no suffix, and names of their own
        columns = {"text": text, "pair": pair, "label": label}
        _say_guesses(table, {r: i for r, i in columns.items() if not getattr(plan, f"{r}_column")})
    return texts, label


def _say_guesses(table: RawTable, guessed: Mapping[str, int | None]) -> None:
    """Nobody should find out from a score that another column was read than the one meant."""
    roles = {role: table.columns[i] for role, i in guessed.items() if i is not None}
    roles = {role: name for role, name in roles.items() if name.casefold() != role}
    if roles:
        guesses = ", ".join(f"{role} from column {shorten(name)}" for role, name in roles.items())
        flags = ", ".join(f"--{role}-column" for role in roles)
        warnings.warn(Guess(f"{table.path}: {guesses} (by its name; {flags} to change it)"))  # noqa: B028
