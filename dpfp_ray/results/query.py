"""Questions about results in a small, safe language: which rows, in what order, which columns.

    where     method == 'dpfp' and epsilon <= 3
    sort      task,-accuracy
    columns   id,accuracy,lr

`where` looks like Python but is never evaluated: its syntax tree is read, and only comparisons of
columns with constants, joined by and / or / not, mean anything. All else is refused by name. The
bounds on length and depth make hostile input cheap to refuse, so the text may come from the web.

A comparison that makes no sense for a row (an order with a missing value, or of text with a number)
is false for that row.
"""

import ast
import difflib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from dpfp_ray.plan.values import ALIASES
from dpfp_ray.system.errors import UserError

Row = dict[str, Any]
Value = Callable[[Mapping[str, Any]], Any]
Condition = Callable[[Mapping[str, Any]], bool]

MAX_LENGTH = 2_000  # characters; also keeps Python's own parser far from its stack's end
MAX_DEPTH = 30
MAX_KEYS = 16  # columns to sort by: each is a pass over all rows
ALLOWED = "use columns, numbers, 'text', comparisons, in [...], is None, and, or, not"


def filter_rows(
    rows: Sequence[Row], where: str | None, columns: Iterable[str] | None = None
) -> list[Row]:
    """The rows for which `where` holds; `columns` are the valid names (default: the rows' own).

    >>> rows = [{"id": "a", "accuracy": 0.9}, {"id": "b", "accuracy": None}]
    >>> filter_rows(rows, "accuracy > 0.5")
    [{'id': 'a', 'accuracy': 0.9}]
    """
    if where is None:
        return list(rows)
    condition = compile_where(where, _known(rows, columns))
    return [row for row in rows if condition(row)]


def sort_rows(
    rows: Sequence[Row], sort: str | None, columns: Iterable[str] | None = None
) -> list[Row]:
    """Rows by one or more comma-separated columns; rows without a value come last, always.

    A plain name puts the best first where there is a best (accuracy, speed), else the smallest;
    `+name` means ascending and `-name` descending.
    """
    ordered = list(rows)
    if sort is None:
        return ordered
    valid = _known(rows, columns)
    keys = [(name.lstrip("+-"), name[0]) for name in _names(sort, "sort")]
    if len(keys) > MAX_KEYS:
        raise UserError(f"sort has {len(keys)} columns; use at most {MAX_KEYS}")
    for given, sign in reversed(keys):  # sorts are stable, so the first key is applied last
        name = resolve(given, valid)
        descending = sign == "-" or (sign != "+" and higher_is_better(name))
        present = [row for row in ordered if not _missing(row.get(name))]
        missing = [row for row in ordered if _missing(row.get(name))]
        present.sort(key=lambda row: (_kind(row[name]), row[name]), reverse=descending)
        ordered = present + missing
    return ordered


def select_columns(columns: str, known: Iterable[str]) -> list[str]:
    """The comma-separated `columns`, each once, by their full names."""
    valid = list(known)
    return list(dict.fromkeys(resolve(name, valid) for name in _names(columns, "columns")))


def higher_is_better(column: str) -> bool:
    return column.startswith("accuracy") or column == "examples_per_second"


def resolve(name: str, known: Sequence[str]) -> str:
    """`name` itself, or the column that the paper's symbol (B, M, C, E, lr) stands for."""
    for candidate in (name, ALIASES.get(name, name)):
        if candidate in known:
            return candidate
    symbols = [symbol for symbol, column in ALIASES.items() if column in known]
    nearest = difflib.get_close_matches(name, [*known, *symbols], n=1, cutoff=0.5)
    if nearest:
        raise UserError(
            f"unknown column {_shown(name)}; did you mean {nearest[0]!r}? (text needs quotes)"
        )
    raise UserError(
        f"unknown column {_shown(name)}; text needs quotes, and the columns are {', '.join(known)}"
    )


def compile_where(where: str, columns: Sequence[str]) -> Condition:
    """`where` as a function of a row. Refuses, in one line, whatever is not in the language."""
    text = where.strip()
    if not text:
        raise UserError("where is empty; try method == 'dpfp'")
    if len(text) > MAX_LENGTH:
        raise UserError(f"where has {len(text):,} characters; use at most {MAX_LENGTH:,}")
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        start = max(0, (error.offset or 1) - 1)
        piece = (error.text or text)[start:].strip() or text
        hint = "compare with ==" if re.match("=[^=]", piece) else ALLOWED
        raise UserError(f"where cannot be read at {_shown(piece)}; {hint}") from None
    except (RecursionError, MemoryError):
        raise UserError(f"where is nested too deeply; use at most {MAX_DEPTH} levels") from None
    except ValueError:  # null bytes, lone surrogates
        raise UserError(f"where holds characters that are no text: {_shown(text)}") from None
    return _Reader(text, columns).condition(tree.body)


def columns_in(where: str, columns: Sequence[str]) -> set[str]:
    """The columns that a valid `where` asks about."""
    names = (node.id for node in ast.walk(ast.parse(where.strip())) if isinstance(node, ast.Name))
    return {resolve(name, columns) for name in names}


class _Reader:
    """Turns the allowed part of a syntax tree into closures over a row."""

    def __init__(self, text: str, columns: Sequence[str]) -> None:
        self.text = text
        self.columns = columns

    def condition(self, node: ast.expr, depth: int = 0) -> Condition:
        if depth > MAX_DEPTH:
            raise UserError(f"where is nested too deeply; use at most {MAX_DEPTH} levels")
        if isinstance(node, ast.BoolOp):
            parts = [self.condition(part, depth + 1) for part in node.values]
            combine = all if isinstance(node.op, ast.And) else any
            return lambda row: combine(part(row) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.condition(node.operand, depth + 1)
            return lambda row: not inner(row)
        if isinstance(node, ast.Compare):
            lefts = [node.left, *node.comparators]
            pairs = [
                self.comparison(left, op, right)
                for left, op, right in zip(lefts, node.ops, node.comparators, strict=False)
            ]
            return lambda row: all(pair(row) for pair in pairs)
        if isinstance(node, ast.Name | ast.Constant):
            self.value(node)  # an unknown column is the better complaint
            raise UserError(f"where: {self.piece(node)} is a value, no condition; compare it")
        self.refuse(node)

    def comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Condition:
        if isinstance(op, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise UserError(f"where: 'is' goes with None only, not {self.piece(right)}; use ==")
            compare = _COMPARE[type(op)]
            value = self.value(left)
            return lambda row: compare(value(row), None)
        first = self.value(left)
        second = self.members(right) if isinstance(op, ast.In | ast.NotIn) else self.value(right)
        test = _COMPARE[type(op)]
        return lambda row: bool(test(first(row), second(row)))

    def value(self, node: ast.expr) -> Value:
        """A column of the row, or a constant."""
        if isinstance(node, ast.Name):
            name = resolve(node.id, self.columns)
            return lambda row: row.get(name)
        constant = self.constant(node)
        return lambda row: constant

    def members(self, node: ast.expr) -> Value:
        """What may stand right of `in`: a list of constants, or a column of text to search in."""
        if isinstance(node, ast.List | ast.Tuple):
            constants = [self.constant(item) for item in node.elts]
            return lambda row: constants
        if isinstance(node, ast.Name):
            return self.value(node)
        # ('dpfp') is no tuple in Python, and a search in the word would match 'dp' too.
        raise UserError(
            f"where: 'in' needs a list, such as ['sst2', 'demo'], not {self.piece(node)}"
        )

    def constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in _CONSTANTS:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = node.operand.value if isinstance(node.operand, ast.Constant) else None
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number
        self.refuse(node)

    def refuse(self, node: ast.expr) -> NoReturn:
        raise UserError(f"where: {self.piece(node)} is not allowed; {ALLOWED}")

    def piece(self, node: ast.expr) -> str:
        return _shown(ast.get_source_segment(self.text, node) or type(node).__name__)


_CONSTANTS = (str, int, float, bool, type(None))


def _in(value: Any, members: Any) -> bool:
    if isinstance(members, str):
        return isinstance(value, str) and value in members
    return isinstance(members, list) and value in members


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def test(left: Any, right: Any) -> bool:
        kind = _kind(left)
        return kind != "" and kind == _kind(right) and compare(left, right)

    return test


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: _in,
    ast.NotIn: lambda value, members: not _in(value, members),
}


def _kind(value: Any) -> str:
    """Values of one kind have an order; those of kind "" have none."""
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else ""


def _missing(value: Any) -> bool:
    return _kind(value) == "" or value != value  # NaN has no place in an order either


def _known(rows: Sequence[Row], columns: Iterable[str] | None) -> list[str]:
    if columns is not None:
        return list(columns)
    return list(dict.fromkeys(name for row in rows for name in row))


def _names(text: str, what: str) -> list[str]:
    if len(text) > MAX_LENGTH:
        raise UserError(f"{what} has {len(text):,} characters; use at most {MAX_LENGTH:,}")
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UserError(f"{what} is {_shown(text)}; give column names with commas between")
    return names


def _shown(text: str, limit: int = 60) -> str:
    """Someone else's text inside our one line: quoted, no control characters, not too long."""
    line = " ".join(text.split())
    return repr(line if len(line) <= limit else line[: limit - 1] + "…")
