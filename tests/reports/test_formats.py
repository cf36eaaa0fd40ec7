"""CSV, Markdown and LaTeX: right, and nothing in a name is more than a name."""

import csv
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dpfp_ray.reports.tables import (
    Column,
    Row,
    Table,
    latex_text,
    markdown_text,
    number,
    percent,
    text,
    to_csv,
    to_latex,
    to_markdown,
)
from tests.support.samples import HOSTILE


def small(name: str = "sst2", rows: int = 1) -> Table:
    columns = [Column("Task", numeric=False), Column("Accuracy", "ε = 3"), Column("σ", "ε = 3")]
    entries = [text(name), percent(0.91234, 0.002, bold=True), number(None)]
    return Table(
        "small", "A title", columns, [Row(entries)] * rows, notes=["† a note"], blocks=True
    )


def read(table: Table) -> list[list[str]]:
    return list(csv.reader(io.StringIO(to_csv(table))))


def test_csv_holds_numbers_and_leaves_missing_cells_empty() -> None:
    assert read(small()) == [["Task", "ε = 3: Accuracy", "ε = 3: σ"], ["sst2", "91.234", ""]]


@pytest.mark.parametrize("start", ["=1+1", "+1", "-1", "@SUM(A1)", " =1", "=cmd|' /C calc'!A0"])
def test_text_never_becomes_a_formula(start: str) -> None:
    assert read(small(start))[1][0].startswith("'")


def test_numbers_keep_their_sign_in_csv() -> None:
    table = Table("t", "t", [Column("a")], [Row([number(-1.5)])])
    assert read(table)[1] == ["-1.5"]


def test_markdown_stays_one_table() -> None:
    lines = to_markdown(small("a|b\nc <b> [x](y) *z*")).splitlines()
    assert lines[2] == "| Task | ε = 3: Accuracy | ε = 3: σ |"
    assert lines[4].startswith(r"| a\|b c \<b\> \[x\](y) \*z\* | **91.23 ± 0.20** | — |")
    assert len(re.findall(r"(?<!\\)\|", lines[4])) == 4


@pytest.mark.parametrize("table", [small(), small(HOSTILE), small(rows=60)], ids=["s", "h", "l"])
def test_latex_is_balanced_booktabs(table: Table) -> None:
    latex = to_latex(table)
    for rule in ("toprule", "midrule", "bottomrule", "cmidrule(lr){2-3}"):
        assert f"\\{rule}" in latex
    begun, ended = (re.findall(rf"\\{what}\{{(\w+\*?)\}}", latex) for what in ("begin", "end"))
    assert sorted(begun) == sorted(ended)
    bare = re.sub(r"\\[{}]", "", latex)
    assert bare.count("{") == bare.count("}")


def test_nothing_special_survives_in_latex() -> None:
    plain = latex_text("\\input{/etc/passwd} $x$ 5% a_b #1 a&b ~ ^ <> \"'`")
    assert "\\input" not in plain
    assert not re.search(r"(?<!\\)[$%_#&](?!-)", plain)
    assert latex_text("ε ≥ 3†") == r"$\varepsilon$ $\geq$ 3$^{\dagger}$"
    assert latex_text("模 \x1b") == "[U+6A21]"


def test_markup_is_plain_in_markdown() -> None:
    assert markdown_text("<img onerror=x>\n# a") == r"\<img onerror=x\> \# a"


@pytest.mark.skipif(
    not shutil.which("pdflatex"), reason="no pdflatex here (texlive-latex-recommended)"
)
@pytest.mark.parametrize("which", ["folder", "hostile"])
def test_all_tables_compile(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tables = request.getfixturevalue(which) / "tables"
    done = subprocess.run(
        [
            *("pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape"),
            *(f"-output-directory={tmp_path}", "all.tex"),
        ],
        cwd=tables,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:].decode(errors="replace")
    assert (tmp_path / "all.pdf").stat().st_size > 10_000
