import json
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpfp_ray.data.readers import (
    BadRows,
    RawTable,
    Row,
    find_column,
    open_table,
    text_problem,
)
from dpfp_ray.system.errors import UserError


def rows_of(path: Path) -> list[Row]:
    table = open_table(path)
    return list(table.rows(range(len(table.columns))))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_tsv_quotes_are_literal(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'text\tlabel\n"open\t1\nsaid "so" \'\t0\n')
    assert [row.fields for row in rows_of(path)] == [['"open', "1"], ['said "so" \'', "0"]]


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl"])
@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x0b", "\x0c", "\x85", "\x1c", "\x00"])
def test_only_newline_ends_a_line(tmp_path: Path, kind: str, mark: str) -> None:
    between = "," if kind == "csv" else "\t"
    lines = [between.join(row) for row in (("text", "label"), (f"one{mark}two", "1"), ("x", "0"))]
    first = 2
    if kind == "jsonl":
        rows = ({"text": f"one{mark}two", "label": "1"}, {"text": "x", "label": "0"})
        lines, first = [json.dumps(row, ensure_ascii=False) for row in rows], 1
    path = write(tmp_path / f"a.{kind}", "\n".join(lines) + "\n")
    assert rows_of(path) == [Row(first, [f"one{mark}two", "1"]), Row(first + 1, ["x", "0"])]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_byte_order_mark_crlf_and_missing_last_newline(tmp_path: Path, name: str) -> None:
    mark = "," if name.endswith("csv") else "\t"
    content = f"text{mark}label\r\na{mark}1\r\nb{mark}0".encode("utf-8-sig")
    path = write(tmp_path / name, content)
    assert open_table(path).columns == ("text", "label")
    assert rows_of(path) == [Row(2, ["a", "1"]), Row(3, ["b", "0"])]


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "text\tlabel\n\na\t1\n\n\n")
    assert rows_of(path) == [Row(3, ["a", "1"])]


def test_csv_line_numbers_after_a_field_over_several_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\n"one\ntwo ""quoted"", three\n",1\nlast,0\n')
    assert rows_of(path) == [Row(2, ['one\ntwo "quoted", three\n', "1"]), Row(5, ["last", "0"])]


def test_csv_text_after_a_closing_quote_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\n"a" b,1\nc,0\n')
    first, second = rows_of(path)
    assert "not valid CSV" in first.problem
    assert second == Row(3, ["c", "0"])


@pytest.mark.parametrize(("line", "count"), [("a", 1), ("a\t1\tmore", 3)])
def test_wrong_number_of_fields_is_a_bad_row(tmp_path: Path, line: str, count: int) -> None:
    path = write(tmp_path / "a.tsv", f"text\tlabel\n{line}\n")
    assert rows_of(path) == [Row(2, [], f"{count} fields, expected 2")]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.tsv",
            b"text\tlabel\n" + b"ok\t1\n" * 300_000 + b"caf\xe9\t0\n",
            r"line 300002: byte 4 is not UTF-8",
        ),
        ("a.csv", b'text,label\na,1\n"open,0\nb,1\n', "line 3: a quote that opens here"),
    ],
)
def test_what_would_lose_rows_names_the_line(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    with pytest.raises(UserError, match=f"{name}: {says}"):
        rows_of(write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("encoding", "says"),
    [("utf-16", ""), ("cp1252", "not UTF-8; read as cp1252"), ("utf-8-sig", "")],
)
def test_files_of_windows_are_read_and_what_was_guessed_is_said(
    tmp_path: Path, encoding: str, says: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("text;label\nein schöner, langer Film;1\nübel;0\n".encode(encoding))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = rows_of(path)
    assert [row.fields for row in rows] == [["ein schöner, langer Film", "1"], ["übel", "0"]]
    said = " ".join(str(one.message) for one in caught)
    assert says in said
    assert "separated by ';'" in said


def test_a_comma_in_a_text_does_not_hide_the_semicolons(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na; b; c,1\nd,0\n")
    assert [row.fields for row in rows_of(path)] == [["a; b; c", "1"], ["d", "0"]]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *((f"a.{kind}", "", "the file is empty") for kind in ("tsv", "csv", "jsonl", "parquet")),
        *((f"a.{kind}", "\n\n", "the file is empty|no rows") for kind in ("tsv", "csv", "jsonl")),
        ("a.tsv", None, "no such file"),
        ("a.xlsx", "x", r"unknown file type '\.xlsx'; use one of"),
        ("a.parquet", "PAR1 nothing here", "not a readable Parquet file"),
    ],
)
def test_files_that_cannot_be_opened_say_why(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    path = tmp_path / name
    with pytest.raises(UserError, match=says):
        open_table(path if content is None else write(path, content))


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        open_table(tmp_path / "a.tsv")


def test_jsonl_columns_are_all_keys_of_all_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"label": 1, "text": "b"}\n')
    assert open_table(path).columns == ("text", "label")
    assert rows_of(path) == [Row(1, ["a", None]), Row(2, ["b", 1])]


@pytest.mark.parametrize("line", ['{"text": ', "[1, 2]", "3"])
def test_jsonl_line_that_is_no_object_is_a_bad_row(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "a", "label": 0}}\n{line}\n')
    assert rows_of(path)[1].line == 2
    assert "JSON" in rows_of(path)[1].problem


def test_parquet_reads_the_wanted_columns_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [1, 0], "id": [7, 8], "text": ["a", "b"]}), path)
    table = open_table(path)
    assert list(table.rows([2, 0])) == [Row(1, ["a", 1]), Row(2, ["b", 0])]


def table_with(*columns: str) -> RawTable:
    return RawTable(Path("a.tsv"), columns, lambda wanted: iter(()))


@pytest.mark.parametrize(
    ("columns", "wanted"), [(("Text", "Label"), "label"), (("Label", "label"), "label")]
)
def test_a_column_is_found_by_its_exact_name_else_ignoring_case(
    columns: tuple[str, ...], wanted: str
) -> None:
    assert find_column(table_with(*columns), wanted, "--label-column") == 1


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (("text", "lable"), r"line 1: no column 'label'.*mean 'lable'.*'text', 'lable'"),
        (("label", "label"), "2 columns are called 'label'"),
    ],
)
def test_a_column_that_is_not_there_once_is_refused(columns: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        find_column(table_with(*columns), "label", "--label-column")


def test_bad_row_is_an_error_with_file_line_and_fix() -> None:
    with pytest.raises(UserError, match=r"^a\.tsv: line 7: empty; .*--bad-rows skip$"):
        BadRows(table_with("text"), skip=False).add(7, "empty")


def test_skipped_rows_are_counted_in_one_warning() -> None:
    bad = BadRows(table_with("text"), skip=True)
    bad.add(7, "empty")
    bad.add(9, "empty")
    with pytest.warns(UserWarning, match=r"2 of 5 rows skipped; the first: a\.tsv: line 7: empty"):
        bad.warn(kept=3)


def test_nothing_left_after_skipping_is_an_error() -> None:
    bad = BadRows(table_with("text"), skip=True)
    bad.add(2, "empty")
    with pytest.raises(UserError, match="no usable row is left"):
        bad.warn(kept=0)


@pytest.mark.parametrize("value", ["", "  ", "\u3000", None, float("nan"), 3, "\ud800"])
def test_values_that_are_no_text(value: object) -> None:
    assert "'text'" in text_problem(value, "text")
    assert text_problem("null \x00 🙂", "text") == ""
