"""What a selection costs, and how many trials it has."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpfp_ray.plan.errors import UserError
from dpfp_ray.privacy.selection import parse_selection
from dpfp_ray.sweeps.cost import draw_count, privacy_choices
from dpfp_ray.sweeps.spaces import read_search_space


def space(tmp_path: Path, parameters: dict[str, Any]) -> Any:
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump({"method": "random", "parameters": parameters}))
    return read_search_space(path, {})


def test_all_batch_sizes_that_could_be_drawn_are_charged_for(tmp_path: Path) -> None:
    found = space(
        tmp_path,
        {
            "batch_size": {"distribution": "power_of_two", "min": 16, "max": 64},
            "learning_rate": {"distribution": "log_uniform", "min": 1e-5, "max": 1e-3},
        },
    )
    assert sorted(choice["batch_size"] for choice in privacy_choices(found)) == [16, 32, 64]


def test_a_batch_size_without_end_cannot_be_charged_for(tmp_path: Path) -> None:
    found = space(tmp_path, {"batch_size": {"distribution": "int_uniform", "min": 16, "max": 64}})
    with pytest.raises(UserError, match="power_of_two"):
        privacy_choices(found)


def test_the_number_of_trials_is_drawn_once(tmp_path: Path) -> None:
    chosen = parse_selection("logarithmic:30")
    first = draw_count(str(tmp_path), chosen, seed=None)
    assert [draw_count(str(tmp_path), chosen, seed=None) for _ in range(5)] == [first] * 5
    (kept,) = tmp_path.glob("selection-*.json")
    assert json.loads(kept.read_text())["trials"] == first
