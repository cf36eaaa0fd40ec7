"""Tables on stdout: plain at home, and still tables in the log viewer of the Ray dashboard."""

import html
import re

import pytest
from rich.table import Table

from dpfp_ray.data.terminal import print_table, that_fit
from dpfp_ray.sweeps.cluster import JOB


def columns() -> Table:
    table = Table("method", "accuracy", box=None)
    table.add_row("dpfp", "0.5")
    table.add_row("non_private", "0.75")
    return table


def test_a_table_has_ordinary_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(columns(), 40)
    assert "\u00a0" not in capsys.readouterr().out


def test_in_a_job_html_does_not_fold_the_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_table(columns(), 40)
    plain = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    monkeypatch.setenv(JOB, "{}")
    print_table(columns(), 40)
    folded = re.sub(" +", " ", html.escape(capsys.readouterr().out))
    assert [line.replace("\u00a0", " ") for line in folded.splitlines()] == plain


def test_columns_go_from_the_least_wanted_until_a_table_fits() -> None:
    table = {"method": ["dpfp"], "ε": ["3†"], "speed": ["0.75 ± 0.01"], "σ": ["1.5"]}  # 6+2+11+3
    wanted = ("σ", "speed")
    assert that_fit(table, wanted, 2, 28) == ["method", "ε", "speed", "σ"]
    assert that_fit(table, wanted, 2, 27) == ["method", "ε", "σ"]
    assert that_fit(table, wanted, 2, 14) == ["method", "ε"]
    assert that_fit(table, wanted, 2, 3) == ["method", "ε"]  # what is not optional stays
