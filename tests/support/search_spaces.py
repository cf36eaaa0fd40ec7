"""A small search space, written to a file with any keys changed, and read."""

from pathlib import Path
from typing import Any

import yaml

from dpfp_ray.sweeps.space import SearchSpace, read_search_space

GOOD: dict[str, Any] = {
    "name": "x",
    "method": "random",
    "samples": 3,
    "budget": {"epsilon": 3},
    "plan": {"task": "demo", "method": "dpfp"},
    "parameters": {"learning_rate": {"distribution": "log_uniform", "min": 1e-5, "max": 1e-3}},
}


def read(tmp_path: Path, changes: dict[str, str] | None = None, **keys: Any) -> SearchSpace:
    path = tmp_path / "space.yaml"
    content = {key: value for key, value in {**GOOD, **keys}.items() if value is not None}
    path.write_text(yaml.safe_dump(content))
    return read_search_space(path, changes or {})
