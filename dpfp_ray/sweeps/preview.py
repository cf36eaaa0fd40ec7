"""Before a comparison runs: what is run, and the smallest difference that it can show."""

from collections.abc import Iterable, Sequence
from typing import Any

from dpfp_ray.data import Task
from dpfp_ray.data.tasks import load_task
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.method_spec import METHODS
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.results.power import MAX_SEEDS, seeds_needed, smallest_difference
from dpfp_ray.results.runs import label
from dpfp_ray.results.statistics import LEVEL
from dpfp_ray.sweeps.compare_cells import Settings, cells_of


def preview(
    *,
    methods: str | Iterable[str] = METHODS,
    epsilon: float | Iterable[float] = 3.0,
    seeds: int = 1,
    match: str | None = None,
    settings: Settings | None = None,
    tune: int | None = None,
    audit: int | None = None,
    difference: float | None = None,
    **fields: Any,
) -> list[str]:
    """What `compare` with these keywords would run, and the smallest difference that it can show,
    in lines. The data are read, but nothing is encoded or trained.

    difference   also say how many seeds a difference of so many points of accuracy needs
    """
    plans = [make_plan(one) for one in cells_of(methods, epsilon, fields, match, settings)]
    task = load_task(plans[0])
    bound = [plan.bind(records=task.train.units, representation="mean") for plan in plans]
    lines = [
        f"{task.name}: {len(task.train):,} records{of_persons(task)}, {dev_rows(task):,} dev rows",
        *(f"  {cell_line(plan)}" for plan in bound),
        runs_line(len(bound), seeds, tune, audit),
        sensitivity_line(bound, seeds, dev_rows(task)),
    ]
    if difference is not None:
        lines.append(seeds_line(bound, dev_rows(task), difference))
    return lines


def of_persons(task: Task) -> str:
    return "" if task.train.users is None else f" of {task.train.units:,} persons"


def dev_rows(task: Task) -> int:
    """Of the first dev set, which methods are compared on."""
    return len(next(iter(task.dev.values())))


def cell_line(plan: Plan) -> str:
    budget = "" if plan.epsilon is None or not plan.private else f" at ε = {plan.epsilon:g}"
    if plan.one_release:
        return f"{label(plan.to_dict())}{budget}: one release"
    return f"{label(plan.to_dict())}{budget}: B = {plan.B:,}, {plan.steps:,} steps"


def runs_line(cells: int, seeds: int, tune: int | None, audit: int | None) -> str:
    total = cells * seeds + cells * (tune or 0) + (cells if audit else 0)
    parts = [f"{_counted(cells, 'cell')} × {_counted(seeds, 'seed')}"]
    parts += [f"{cells} × {tune} for tuning"] if tune else []
    parts += [f"{_counted(cells, 'audit')}"] if audit else []
    return f"{_counted(total, 'run')}: {' + '.join(parts)}"


def sensitivity_line(plans: Sequence[Plan], seeds: int, rows: int) -> str:
    """What the planned seeds and dev rows can show; also printed when a comparison starts."""
    methods, level = _family(plans)
    if methods < 2:
        return "one method at each ε: nothing is compared"
    if rows < 2:
        return f"dev rows: {rows}; nothing can be compared on them"
    found = smallest_difference(rows=rows, seeds=seeds, methods=methods, level=level)
    smallest = found.smallest_difference
    shown = "none" if smallest is None else f"{100 * smallest:.1f} points"
    if seeds < 2:
        return (
            f"1 seed names no winner: the spread over seeds is unknown. These models alone are "
            f"told apart from {shown} on; use --seeds 5 to compare methods"
        )
    return (
        f"smallest difference that {seeds} seeds on {rows:,} dev rows show: {shown} "
        f"(in 80 of 100 repetitions, {methods} methods at each ε; assumed spread, "
        "docs/statistics.md)"
    )


def seeds_line(plans: Sequence[Plan], rows: int, difference: float) -> str:
    """How many seeds a difference of so many points needs."""
    if not 0 < difference <= 100:
        raise UserError(f"difference {difference:g} is not in points above 0; try 1.0")
    methods, level = _family(plans)
    if methods < 2 or rows < 2:
        return f"{difference:g} points: nothing is compared"
    needed = seeds_needed(difference / 100, rows=rows, methods=methods, level=level)
    if needed is not None:
        return f"{difference:g} points need {needed} seeds on these {rows:,} dev rows"
    return f"{difference:g} points: not even {MAX_SEEDS} seeds show them on {rows:,} dev rows"


def _family(plans: Sequence[Plan]) -> tuple[int, float]:
    """Methods at one ε, and the level that is left for one ε: Holm is over the whole table."""
    budgets = {plan.epsilon for plan in plans if plan.private}
    plain = sum(not plan.private for plan in plans)
    if not budgets:
        return plain, LEVEL
    most = max(sum(p.private and p.epsilon == budget for p in plans) for budget in budgets)
    return most + min(plain, 1), LEVEL / len(budgets)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
