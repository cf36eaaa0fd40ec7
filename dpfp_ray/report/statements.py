"""What a report takes from a run's privacy statement; records of failed or older runs have none."""

import math
from collections.abc import Mapping
from typing import Any

from dpfp_ray.files import to_json
from dpfp_ray.report.runs import Run

# Keys of a statement (or record) under which these numbers are found, wherever they are nested.
_UNAMPLIFIED = ("without_amplification", "epsilon_without_amplification", "unamplified")
_SELECTION = ("selection", "tuning", "sweep")
_DEEPEST = 6


def statement_text(run: Run) -> str | None:
    """The statement as its own module words it; its bare facts if that is not to be had."""
    statement = run.record.get("statement")
    if isinstance(statement, str):
        return statement
    if not isinstance(statement, Mapping):
        return None
    try:
        from dpfp_ray.privacy.statement import render

        return str(render(statement))
    except Exception:  # a statement of another version must not cost the whole report
        return to_json(dict(statement), indent=2)


def amplification(run: Run) -> float | None:
    """ε if sampling is not counted on; by the calibrating accountant where there are several."""
    found = _find(run.part("statement"), _UNAMPLIFIED)
    if isinstance(found, Mapping):
        ordered = (run.row["accountant"], "pld", "gdp", "rdp", "epsilon")
        found = next((found[name] for name in ordered if name in found), None)
    return _number(found)


def tuning_epsilon(run: Run) -> float | None:
    """ε of the sweep as a whole, if its best trial is released."""
    for where in (run.record, run.part("trial"), run.part("statement"), run.part("privacy")):
        for name in _SELECTION:
            part = where.get(name)
            if isinstance(part, Mapping):
                number = _number(part.get("epsilon"))
                if number is not None:
                    return number
    return None


def _find(part: Any, names: tuple[str, ...], depth: int = 0) -> Any:
    if not isinstance(part, Mapping) or depth > _DEEPEST:
        return None
    for name in names:
        if part.get(name) is not None:
            return part[name]
    found = (_find(value, names, depth + 1) for value in part.values())
    return next((value for value in found if value is not None), None)


def _number(value: Any) -> float | None:
    if isinstance(value, Mapping):
        value = value.get("epsilon")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if isinstance(value, bool) or math.isnan(number) else number
