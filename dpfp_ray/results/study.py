"""A sweep's records as an Optuna study: its plots, its importances and optuna-dashboard read it.

The parameters are the plan fields that differ between the trials, whatever varied them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dpfp_ray.plan.plan import FIELDS
from dpfp_ray.results.store import find_results
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    import optuna

GOALS: dict[str, Literal["maximize", "minimize"]] = {
    "accuracy": "maximize",
    "train_seconds": "minimize",
    "epsilon": "minimize",
}
FACTS = ("id", "status", "sigma", "noise_multiplier", "noise_to_signal", "train_seconds", "error")
LOG_RATIO = 8  # a range of numbers this wide is searched, and drawn, on a log scale


def varied_fields(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The plan fields in which these trials differ, in the plan's order."""
    rows = list(rows)
    return [name for name in FIELDS if len({repr(row.get(name)) for row in rows}) > 1]


def to_optuna(
    *places: Any, storage: str | None = None, metrics: Sequence[str] = ("accuracy",)
) -> "optuna.Study":
    """The trials below the folders or URIs as a study, for Optuna's plots and dashboard.

    storage  keep it there, such as sqlite:///study.db; optuna-dashboard opens that
    metrics  what its values are: accuracy, train_seconds, epsilon

    >>> optuna.visualization.plot_contour(to_optuna("runs/sweep"))  # doctest: +SKIP
    """
    rows = find_results(*places).rows
    name = next((str(row["sweep"]) for row in rows if row["sweep"]), "dpfp-ray")
    return study_of(rows, metrics=metrics, storage=storage, name=name)


def study_of(
    rows: Sequence[Mapping[str, Any]],
    fields: Sequence[str] | None = None,
    metrics: Sequence[str] = ("accuracy",),
    storage: str | None = None,
    name: str = "sweep",
) -> "optuna.Study":
    """A study of these flat rows; trials without a score stay in it as failed."""
    import optuna

    fields = varied_fields(rows) if fields is None else fields
    distributions = {
        field: distribution
        for field in fields
        if (distribution := distribution_of([row.get(field) for row in rows])) is not None
    }
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(
            study_name=name, storage=storage, directions=[GOALS[metric] for metric in metrics]
        )
    except KeyError as error:
        raise UserError(f"metric {error} is none of {', '.join(GOALS)}") from None
    except optuna.exceptions.DuplicatedStudyError:
        raise UserError(f"{storage} has a study {name!r}; use another file") from None
    except Exception as error:  # SQLAlchemy's own types
        raise UserError(f"cannot write a study to {storage}: {error}") from None
    states = optuna.trial.TrialState
    for row in rows:
        params = {field: row[field] for field in distributions if row.get(field) is not None}
        values: list[Any] = [row.get(metric) for metric in metrics]
        scored = row["status"] == "finished" and None not in values
        study.add_trial(
            optuna.trial.create_trial(
                params={f: str(v) if is_word(distributions[f]) else v for f, v in params.items()},
                distributions={field: distributions[field] for field in params},
                values=values if scored else None,
                state=states.COMPLETE if scored else states.FAIL,
                user_attrs={fact: row[fact] for fact in FACTS if row.get(fact) is not None},
            )
        )
    return study


def distribution_of(values: Sequence[Any]) -> "optuna.distributions.BaseDistribution | None":
    """The range of what was tried; numbers on a log scale where they span much of one."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    tried = [value for value in values if value is not None]
    if not tried:
        return None
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in tried):
        return CategoricalDistribution(sorted({str(value) for value in tried}))
    low, high = min(tried), max(tried)
    log = low > 0 and high / low >= LOG_RATIO and math.isfinite(high)
    if all(isinstance(value, int) for value in tried):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(float(low), float(high), log=log)


def is_word(distribution: Any) -> bool:
    return hasattr(distribution, "choices")
