import json
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
    shorten,
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


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x0b", "\x0c", "\x85", "\x1c", "\x00", "\r"])
def test_tsv_only_newline_ends_a_line(tmp_path: Path, mark: str) -> None:
    path = write(tmp_path / "a.tsv", f"text\tlabel\none{mark}two\t1\nx\t0\n")
    assert rows_of(path) == [Row(2, [f"one{mark}two", "1"]), Row(3, ["x", "0"])]


@pytest.mark.parametrize("mark", ["\u2028", "\x0b", "\x85", "\x00", "\t"])
def test_csv_only_newline_ends_a_line(tmp_path: Path, mark: str) -> None:
    path = write(tmp_path / "a.csv", f"text,label\none{mark}two,1\nx,0\n")
    assert rows_of(path) == [Row(2, [f"one{mark}two", "1"]), Row(3, ["x", "0"])]


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


def test_csv_quote_that_never_closes_names_the_line_it_opened_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\na,1\n"open,0\nb,1\n')
    with pytest.raises(UserError, match=r"a\.csv: line 3: a quote that opens here"):
        rows_of(path)


def test_csv_text_after_a_closing_quote_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\n"a" b,1\nc,0\n')
    first, second = rows_of(path)
    assert "not valid CSV" in first.problem
    assert second == Row(3, ["c", "0"])


@pytest.mark.parametrize(("line", "count"), [("a", 1), ("a\t1\tmore", 3)])
def test_wrong_number_of_fields_is_a_bad_row(tmp_path: Path, line: str, count: int) -> None:
    path = write(tmp_path / "a.tsv", f"text\tlabel\n{line}\n")
    assert rows_of(path) == [Row(2, [], f"{count} fields, expected 2")]


def test_bytes_that_are_not_utf8_name_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", b"text\tlabel\nok\t1\ncaf\xe9\t0\n")
    with pytest.raises(UserError, match=r"a\.tsv: line 3: byte 4 is not UTF-8"):
        rows_of(path)


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.parquet"])
def test_empty_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="the file is empty"):
        open_table(write(tmp_path / name, ""))


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl"])
def test_file_of_blank_lines(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"the file is empty|no rows"):
        open_table(write(tmp_path / name, "\n\n"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        open_table(tmp_path / "a.tsv")


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        open_table(tmp_path / "a.tsv")


def test_unknown_file_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown file type '\.xlsx'; use one of"):
        open_table(write(tmp_path / "a.xlsx", "x"))


def test_jsonl_columns_are_all_keys_of_all_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"label": 1, "text": "b"}\n')
    assert open_table(path).columns == ("text", "label")
    assert rows_of(path) == [Row(1, ["a", None]), Row(2, ["b", 1])]


@pytest.mark.parametrize("line", ['{"text": ', "[1, 2]", "3"])
def test_jsonl_line_that_is_no_object_is_a_bad_row(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "a", "label": 0}}\n{line}\n')
    assert rows_of(path)[1].line == 2
    assert "JSON" in rows_of(path)[1].problem


def test_jsonl_line_separator_inside_a_text(tmp_path: Path) -> None:
    line = json.dumps({"text": "a\u2028b", "label": 1}, ensure_ascii=False)
    assert rows_of(write(tmp_path / "a.jsonl", line)) == [Row(1, ["a\u2028b", 1])]


def test_parquet_reads_the_wanted_columns_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [1, 0], "id": [7, 8], "text": ["a", "b"]}), path)
    table = open_table(path)
    assert list(table.rows([2, 0])) == [Row(1, ["a", 1]), Row(2, ["b", 0])]


def test_damaged_parquet(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a readable Parquet file"):
        open_table(write(tmp_path / "a.parquet", "PAR1 nothing here"))


def table_with(*columns: str) -> RawTable:
    return RawTable(Path("a.tsv"), columns, lambda wanted: iter(()))


def test_named_column_is_found_ignoring_case() -> None:
    assert find_column(table_with("Text", "Label"), "label", "--label-column") == 1


def test_exact_spelling_of_a_column_wins() -> None:
    assert find_column(table_with("Text", "text"), "text", "--text-column") == 1


def test_missing_column_lists_those_there_are_and_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"line 1: no column 'lable'.*mean 'label'.*'text', 'label'"
    ):
        find_column(table_with("text", "label"), "lable", "--label-column")


def test_two_columns_of_one_name() -> None:
    with pytest.raises(UserError, match="2 columns are called 'text'"):
        find_column(table_with("text", "text"), "text", "--text-column")


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


@pytest.mark.parametrize("value", ["a", "null", "\x00", "🙂"])
def test_values_that_are_text(value: str) -> None:
    assert text_problem(value, "text") == ""


def test_long_values_are_shortened() -> None:
    assert len(shorten("x" * 10_000)) == 60
