"""Which figures are drawn, from what, and that the files are sound."""

import io
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from dpfp_ray.reports import epsilon_figures, figures
from dpfp_ray.reports.epsilon_figures import _LINES, row_axes, rows_of
from dpfp_ray.reports.figures import all_figures, averaged, curve_of
from dpfp_ray.reports.page import Report
from dpfp_ray.reports.plots import Drawing, canvas, log_x_axis, short, styles
from dpfp_ray.reports.sweep_figures import heat_maps
from dpfp_ray.results.cells import cells_of
from dpfp_ray.results.contests import contests_of
from dpfp_ray.results.runs import method_label, read_runs
from tests.support import samples

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"


def draw(records: Any) -> list[Drawing]:
    runs = read_runs(records)
    return all_figures(cells_of(runs), runs, "dpfp report runs --output out")


def words(drawing: Drawing) -> str:
    tree = ElementTree.fromstring(drawing.svg)
    return "\n".join("".join(node.itertext()) for node in tree.iter(f"{SVG}text"))


def by_name(report: Report, start: str) -> Drawing:
    return next(d for d in report.figures if d.name.startswith(start))


def test_everything_the_paper_draws_and_more_is_drawn(report: Report) -> None:
    kinds = Counter(drawing.name.rsplit("-", 1)[0] for drawing in report.figures)
    wanted = {"epsilon", "cost", "heatmap-batch", "heatmap-clip", "micro-batches", "training"}
    of_sweeps = {"parallel", "importance", "contour", "slices", "history", "pareto"}
    assert wanted | of_sweeps | {"differences"} == set(kinds)
    assert len({drawing.name for drawing in report.figures}) == len(report.figures)


def test_a_tie_and_one_seed_are_called_so_in_the_figure(report: Report) -> None:
    said = words(by_name(report, "differences"))
    assert "difference of dev accuracies (points)" in said
    assert "tie" in said.splitlines()
    alone = next(d for d in draw(samples.comparison(seeds=1)) if d.name == "differences-1")
    assert "one seed: these models only" in words(alone)


def test_of_too_many_pairs_those_with_the_best_method_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = list(samples.comparison(seeds=1))
    drawn = next(d for d in draw(records) if d.name == "differences-1")
    monkeypatch.setattr(epsilon_figures, "MOST_PAIRS", 2)
    fewer = next(d for d in draw(records) if d.name == "differences-1")
    contests = contests_of(cells_of(read_runs(records)))
    best = {method_label(c.ranked[0].key.method) for c in contests}
    pairs = {line for line in words(fewer).splitlines() if " − " in line}
    assert pairs < {line for line in words(drawn).splitlines() if " − " in line}
    assert all(any(name in pair for name in best) for pair in pairs)
    assert "those with the best mean" in fewer.caption
    assert "those with the best mean" not in drawn.caption


def test_proved_nominal_and_refuted_differ_without_colour(report: Report) -> None:
    drawn = by_name(report, "epsilon")
    assert "Open, dashed: nominal" in drawn.caption
    assert "majority class" in words(drawn)
    lines = {cell: _LINES.get(cell, "--") for cell in ("proved", "nominal", "refuted")}
    assert len(set(lines.values())) == 3


def test_at_one_epsilon_each_method_has_a_row() -> None:
    records = [r for r in samples.comparison(seeds=1) if r["plan"]["epsilon"] in (None, 3.0)]
    (drawn,) = [drawing for drawing in draw(records) if drawing.name.startswith("epsilon")]
    said = words(drawn).splitlines()
    assert {"Non-DP", "DP-FP†", "ε = 3 by PLD", "majority class"} <= set(said)
    assert "privacy budget ε by PLD, log scale" not in said
    assert "Open: nominal (†)" in drawn.caption


def test_more_curves_than_an_eye_can_follow_become_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epsilon_figures, "MOST_CURVES", 2)
    drawn = next(d for d in draw(samples.comparison(seeds=1)) if d.name.startswith("epsilon"))
    said = words(drawn).splitlines()
    assert "privacy budget ε by PLD, log scale" not in said
    assert {"ε = 3 by PLD", "ε = 8 by PLD"} <= set(said)


def test_rows_are_without_privacy_first_then_by_accuracy() -> None:
    cells = cells_of(read_runs(samples.comparison(seeds=1)))
    private = [cell for cell in cells if cell.private]
    rows = rows_of([cell for cell in cells if not cell.private], private)
    means = [sum(cell.accuracy for cell in row) / len(row) for row in rows]
    assert [row[0].private for row in rows] == sorted(row[0].private for row in rows)
    assert means[1:] == sorted(means[1:], reverse=True)
    assert sum(len(row) for row in rows) == len(cells)


def test_a_nominal_point_of_a_row_is_open_and_a_proved_one_filled() -> None:
    cells = cells_of(read_runs(samples.comparison(seeds=1)))
    with canvas() as (_, axes):
        row_axes(axes, [[cell] for cell in cells if cell.private], "pld")
        points = [line for line in axes.lines if len(line.get_xdata()) == 1]
        open_ones = [line.get_markerfacecolor() == "white" for line in points]
    assert open_ones == [cell.guarantee != "proved" for cell in cells if cell.private]
    assert len(set(open_ones)) == 2


def test_a_crowded_figure_of_cost_names_no_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = next(d for d in draw(samples.comparison(seeds=1)) if d.name == "cost-1")
    assert "ε=3" in words(drawn).splitlines()
    monkeypatch.setattr(figures, "MOST_CURVES", 1)
    crowded = next(d for d in draw(samples.comparison(seeds=1)) if d.name == "cost-1")
    assert "ε=3" not in words(crowded).splitlines()
    assert "its budgets" in crowded.caption


def test_ticks_of_a_wide_axis_do_not_touch() -> None:
    with canvas() as (_, axes):
        log_x_axis(axes, [0.02, 20_000.0])
        axes.set_xlim(0.02, 20_000.0)
        shown = [tick for tick in axes.get_xticks() if 0.02 <= tick <= 20_000]
    assert shown == pytest.approx([0.1, 1, 10, 100, 1000, 10_000])


def test_without_data_nothing_is_drawn() -> None:
    assert draw([]) == []
    assert draw([samples.failed("a", "s", "e")]) == []


def test_text_is_text_with_units_marks_and_the_command(report: Report) -> None:
    said = words(by_name(report, "epsilon"))
    for wanted in (
        "dev accuracy (%)",
        "privacy budget ε by PLD",
        "DP-FP†",
        "Non-DP",
        "dpfp report",
    ):
        assert wanted in said
    assert "ε spent, by GDP + CLT (dotted)" in words(by_name(report, "training"))
    assert "time before and of training (s)" in words(by_name(report, "cost"))
    assert "micro-batches a step M" in words(by_name(report, "micro"))
    assert "# sweep figure-batch" in words(by_name(report, "heatmap-batch"))


def test_a_png_carries_its_title_as_an_svg_does(report: Report) -> None:
    drawn = by_name(report, "epsilon")
    with Image.open(io.BytesIO(drawn.png)) as picture:
        assert picture.info["Title"] == drawn.title
    assert f"<dc:title>{drawn.title}</dc:title>".encode() in drawn.svg


def test_a_heat_map_shows_the_grid_and_its_gap(report: Report) -> None:
    said = words(by_name(report, "heatmap-batch")).splitlines()
    assert {"16", "32", "64", "128", "256", "1e-6", "5e-6", "1e-4"} <= set(said)
    assert "Hatched: not run, failed or refused." in by_name(report, "heatmap-batch").caption
    assert "Hatched" not in by_name(report, "heatmap-clip").caption


def test_a_random_search_is_no_grid() -> None:
    rates = [1e-6, 3e-6, 7e-6, 2e-5, 5e-5]
    records = [
        samples.sample(f"r{i}", batch_size=2 ** (i + 5), micro_batches=1, learning_rate=rate)
        for i, rate in enumerate(rates)
    ]
    assert list(heat_maps(read_runs(records), "batch_size", "", "")) == []


def test_hostile_names_are_drawn_as_they_are(hostile: Path) -> None:
    files = sorted(hostile.glob("figures/*.svg"))
    assert files
    for file in files:
        assert b"<script" not in file.read_bytes()
        said = "".join(ElementTree.parse(file).getroot().itertext())
        assert "<script>alert(1)</script>" in said
        assert "$x^2$" in said


def test_a_mean_curve_has_the_epochs_that_all_seeds_have() -> None:
    records = [samples.sample("a", seed=seed, epochs=3) for seed in range(2)]
    del records[1]["history"][2]
    runs = read_runs(records)
    assert [round(point[0], 2) for point in curve_of(runs[0])] == [1.0, 2.0, 3.0]
    assert len(averaged(runs)) == 2


def test_numbers_are_written_as_in_the_paper() -> None:
    assert [short(v) for v in (5e-6, 1e-4, 2.5e-4, 0.02, 32, 1e6)] == [
        *("5e-6", "1e-4", "2.5e-4", "0.02", "32", "1e6")
    ]


def test_all_methods_in_all_scopes_are_told_apart() -> None:
    parts = ("", " head", " bias", " lora", " top:2")
    names = [f"{method}{part}" for method in ("non_private", "dpfp", "dpsgd") for part in parts]
    looks = styles([*names, "dpfp moments", "dpfp release_once", "objpert head", "rgp"])
    assert len({look["color"] for look in looks.values()}) == len(looks)
    assert len({(look["marker"], look["linestyle"]) for look in looks.values()}) == len(looks)


def test_a_method_that_nobody_listed_always_looks_the_same() -> None:
    assert styles(["new"])["new"] == styles(["dpfp", "rgp", "new"])["new"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("dpfp release_once", "DP-FP (release once)"),
        ("rgp head", "RGP (head)"),
        ("dpfp release_once replace-one", "DP-FP (release once, replace-one)"),
        ("objpert head", "ObjPert (head)"),
        ("objpert head centred", "ObjPert (head, centred)"),
        ("new head", "new head"),
    ],
)
def test_names_are_shown_as_people_write_them(name: str, shown: str) -> None:
    assert method_label(name) == shown


def test_threads_draw_one_after_the_other() -> None:
    """matplotlib's settings and fonts belong to the whole process."""
    drew = threading.Event()

    def draw() -> None:
        with canvas():
            drew.set()

    with canvas():
        other = threading.Thread(target=draw)
        other.start()
        assert not drew.wait(0.2)
    other.join()
    assert drew.is_set()
