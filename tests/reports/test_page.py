"""The page: whole, self-contained, deterministic, and deaf to what names try to tell it."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dpfp_ray.reports.page import MANIFEST, Report, make_report, render, write_report
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.record import make_record
from tests.support import samples

pytestmark = pytest.mark.slow


class Tags(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_every_table_and_figure_is_a_file_too(report: Report, folder: Path) -> None:
    for name in (
        "overview",
        "main",
        "scores",
        "pairs",
        "cost",
        "noise",
        "accounting",
        "audit",
        "runs",
        "paper",
    ):
        assert name in report.tables
        for ending in ("csv", "md", "tex"):
            assert (folder / "tables" / f"{name}.{ending}").stat().st_size > 0
    for drawing in report.figures:
        assert (folder / f"figures/{drawing.name}.svg").read_bytes().startswith(b"<?xml")
        assert (folder / f"figures/{drawing.name}.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_loaded_from_anywhere(folder: Path) -> None:
    tags = Tags((folder / "index.html").read_text(encoding="utf-8")).found
    for tag, attributes in tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        source = attributes.get("src")
        assert source is None or source.startswith("data:image/svg+xml;base64,")
        target = attributes.get("href")
        assert target is None or target.startswith(("#", "tables/", "figures/"))
        if target and not target.startswith("#"):
            assert (folder / target).exists()


def test_links_within_the_page_lead_somewhere(folder: Path) -> None:
    tags = Tags((folder / "index.html").read_text(encoding="utf-8")).found
    ids = [attributes["id"] for _, attributes in tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    targets = {a["href"] for _, a in tags if (a.get("href") or "").startswith("#")}
    assert targets <= {f"#{identity}" for identity in ids}


def test_the_calls_are_in_the_json_too(folder: Path, report: Report) -> None:
    facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert facts["headline"] == report.headline
    outcomes = {one["outcome"] for one in facts["comparisons"]}
    assert "few seeds" in outcomes
    assert all((one["winner"] is None) == (one["outcome"] != "won") for one in facts["comparisons"])


def test_the_first_screen_has_the_answer(folder: Path) -> None:
    page = (folder / "index.html").read_text(encoding="utf-8")
    head = page[: page.index("<nav")]
    for said in ("Too few seeds to tell", "Against non-private", "ε ≥ 3.09", "refuted", "<figure"):
        assert said in head
    assert "what the accounting says, and no guarantee" in head


def test_statements_and_errors_are_on_the_page(folder: Path) -> None:
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert "logarithmic:30" in page
    assert "CUDA out of memory" in page
    assert "3 of " in page


def test_hostile_names_inject_nothing(hostile: Path) -> None:
    page = (hostile / "index.html").read_text(encoding="utf-8")
    tags = Tags(page).found
    assert [tag for tag, _ in tags].count("script") == 1
    assert "<script>alert" not in page
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert not any((a.get("href") or "").startswith("javascript") for _, a in tags)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_policy_allows_our_script_alone(folder: Path) -> None:
    page = (folder / "index.html").read_text(encoding="utf-8")
    policy = next(a["content"] for t, a in Tags(page).found if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'$", policy)


def test_the_same_records_give_the_same_page_and_figures() -> None:
    records = list(samples.comparison(budgets=(3.0,), seeds=1))[:2]
    one, two = (make_report(r, "dpfp report x", "t") for r in (records, records[::-1]))
    assert len(one.figures) > 1
    assert one.figures == two.figures
    assert b"<dc:date>" not in one.figures[0].svg
    assert render(one) == render(two)


def test_odd_records_do_not_break_the_report(tmp_path: Path) -> None:
    nothing = make_record(plan_hash="a")
    unknown = make_record(plan_hash="b", finished=True, plan={"method": "new"})
    strange = samples.sample("s")
    strange["privacy"]["epsilon"] = {"gdp": math.inf, "rdp": None, "pld": math.nan}
    strange["cost"] = {"train_seconds": -1.0}
    strange["statement"] = {"version": 99}
    strange["audit"] = {"verdict": "refuted"}
    infinite = samples.sample("t")
    infinite["plan"]["epsilon"] = math.inf
    write_report(make_report([nothing, unknown, strange, infinite], "x"), tmp_path)
    assert (tmp_path / "index.html").exists()


def test_what_an_earlier_build_left_goes_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    for name in ("tables/old.csv", "tables/mine.csv", "keep.txt"):
        (tmp_path / name).write_text("x")
    outside = tmp_path.parent / "outside.csv"
    outside.write_text("x")
    listed = ["tables/old.csv", "keep.txt", "../outside.csv", "tables/../keep.txt", 3]
    (tmp_path / MANIFEST).write_text(json.dumps({"files": listed}))
    write_report(make_report([samples.failed("a", "s", "e")], "x"), tmp_path)
    assert not (tmp_path / "tables/old.csv").exists()
    assert (tmp_path / "tables/mine.csv").exists()
    assert (tmp_path / "keep.txt").exists()
    assert outside.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="use another --output"):
        write_report(make_report([samples.failed("a", "s", "e")], "x"), tmp_path / "file")
