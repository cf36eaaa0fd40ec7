"""JSON files that are whole or absent, whatever is killed while they are written."""

import json
import math
import os
from pathlib import Path
from typing import Any

from dpfp_ray.plan.errors import UserError


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); delete it or restore it") from None


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: an infinite ε becomes the string "inf", not a token other readers choke on."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
