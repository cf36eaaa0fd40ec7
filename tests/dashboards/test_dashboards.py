"""dashboards/: the JSON is what the script builds, and Grafana and Prometheus can read it."""

import json
import shutil
import subprocess
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

from dashboards.check import DISCOVERY

FOLDER = Path(__file__).parents[2] / "dashboards"


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads((FOLDER / "dpfp.json").read_text(encoding="utf-8"))


def shown(dashboard: Any) -> list[Any]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_the_committed_file_is_what_the_script_builds() -> None:
    built = run_path(str(FOLDER / "build.py"))["text"]()
    assert (FOLDER / "dpfp.json").read_text(encoding="utf-8") == built


def test_panels_have_ids_of_their_own_and_fill_the_grid_without_overlap(dashboard: Any) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells: list[tuple[int, int]] = []
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        rows = range(at["y"], at["y"] + at["h"])
        cells += [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in rows]
    assert len(set(cells)) == len(cells)


def test_queries_of_a_panel_have_different_letters_which_tables_name(dashboard: Any) -> None:
    for panel in shown(dashboard):
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        for step in panel.get("transformations", []):
            if step["id"] == "organize":
                names = {f"Value #{letter}" for letter in letters}
                assert set(step["options"]["renameByName"]) == names


def test_whatever_shows_epsilon_of_a_trial_over_time_says_what_it_is_worth(dashboard: Any) -> None:
    curves = [panel for panel in shown(dashboard) if panel["type"] == "timeseries"]
    targets = [target for panel in curves for target in panel["targets"]]
    legends = [t["legendFormat"] for t in targets if "epsilon_spent" in t["expr"]]
    assert legends
    assert all("{{guarantee}}" in legend for legend in legends)


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here")
def test_prometheus_takes_the_settings_and_looks_where_ray_writes(tmp_path: Path) -> None:
    """With a list of nodes of its own: promtool wants one to exist, and no Ray may run here."""
    (tmp_path / "nodes.json").write_text("[]")
    text = (FOLDER / "prometheus.yml").read_text()
    (ray,) = yaml.safe_load(text)["scrape_configs"]
    assert ray["file_sd_configs"][0]["files"] == [DISCOVERY]
    (tmp_path / "p.yml").write_text(text.replace(DISCOVERY, str(tmp_path / "nodes.json")))
    command = ["promtool", "check", "config", str(tmp_path / "p.yml")]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
