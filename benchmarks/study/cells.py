"""The cells of the study: what its plans ask for, each with a folder of its own for its record.

A plan is a YAML file of `plans/`:

    question: what it answers
    priority: 10                      smaller ones run first
    seeds: 5
    plan: {task: sst2, …}             fields that all of its cells have
    methods: [dpfp:moments, dpsgd:head]
    epsilon: [1, 3, 8]                of the private ones
    settings: {dpsgd:head: {lr: 0.05}}   fields of one method
    grid: {batch_size: [16, 32]}      every combination, for the paper's figures
    audit: {canaries: 1000}           audits them instead of training them
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfp_ray import Plan, UserError
from dpfp_ray.plan.plan import NOT_HASHED
from dpfp_ray.plan.values import check_budgets, check_methods, field_name, make_plan, read_plan_file
from dpfp_ray.results.runs import TASK_NAMES, label
from dpfp_ray.sweeps.compare import plan_cells
from dpfp_ray.system.errors import unknown
from dpfp_ray.system.whole_files import read_json, to_json
from dpfp_ray.training.run_folder import RESULT

HERE = Path(__file__).parent
PLANS = HERE / "plans"
KEYS = ("question", "priority", "seeds", "plan", "methods", "epsilon", "settings", "grid", "audit")


@dataclass(frozen=True)
class Cell:
    """One run of the study. `name` is its folder below the records."""

    name: str
    plan: Plan
    given: frozenset[str]  # the fields that its plan file says
    priority: float
    seed_index: int
    audit: dict[str, Any] | None = None

    def record(self, records: Path) -> dict[str, Any] | None:
        """Its finished record; a record of another plan in its folder is a mistake."""
        path = records / self.name / RESULT
        if not path.exists():
            return None
        found: dict[str, Any] = read_json(path)
        for field in sorted(self.given - NOT_HASHED):
            ran, asked = found["plan"].get(field), getattr(self.plan, field)
            if to_json(ran) != to_json(asked):  # JSON knows no tuples
                raise UserError(
                    f"{path.parent} was run with {field} {ran}, the plan says {asked}; "
                    "remove the folder to run it again"
                )
        return found


def all_cells(
    data: Path, plans: Path = PLANS, only: Iterable[str] = (), max_seeds: int | None = None
) -> list[Cell]:
    """The cells of all plans, or of `only` some, in the order in which they run.

    By priority, then repetition by repetition, so that a stopped study is fair to all methods.
    """
    files = {path.stem: path for path in sorted(plans.glob("*.yaml"))}
    for name in only:
        if name not in files:
            raise UserError(unknown("plan", name, tuple(files)))
    chosen = [path for name, path in files.items() if not only or name in only]
    found = [cell for path in chosen for cell in cells_of(path, data)]
    kept = [c for c in found if max_seeds is None or c.seed_index < max_seeds]
    names = [cell.name for cell in kept]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two cells are called {twice}; let each plan ask for a cell once")
    return sorted(kept, key=lambda cell: (cell.priority, cell.seed_index))


def cells_of(path: Path, data: Path) -> list[Cell]:
    """What one plan file asks for."""
    content = read_plan_file(path)
    for key in content:
        if key not in KEYS:
            raise UserError(f"{path}: {unknown('key', str(key), KEYS)}")
    grid, common = fields(content.get("grid")), fields(content.get("plan"))
    settings = {name: fields(own) for name, own in (content.get("settings") or {}).items()}
    cells = []
    for chosen in itertools.product(*grid.values()):
        point = dict(zip(grid, chosen, strict=True))
        for values in plan_cells(
            check_methods(content["methods"]),
            check_budgets(content.get("epsilon") or [3.0]),
            {"data_dir": data_dir(common.get("task"), data), **common, **point},
            None,
            settings,
        ):
            plan = make_plan(values)
            for seed_index in range(int(content.get("seeds", 1))):
                cells.append(
                    Cell(
                        name=f"{path.stem}/{cell_name(plan, point, seed_index)}",
                        plan=plan,
                        given=frozenset(values),
                        priority=float(content.get("priority", 50)),
                        seed_index=seed_index,
                        audit=content.get("audit"),
                    )
                )
    return cells


def fields(values: dict[str, Any] | None) -> dict[str, Any]:
    """`lr` and `learning_rate` are one."""
    return {field_name(name): value for name, value in (values or {}).items()}


def cell_name(plan: Plan, point: dict[str, Any], seed_index: int) -> str:
    """`dpfp-moments_eps3_0`; a name for a folder."""
    parts = [label(plan.to_dict())]
    parts += [f"eps{plan.epsilon:g}"] if plan.private else []
    parts += [f"{name}{value}" for name, value in point.items()]
    return re.sub(r"[^A-Za-z0-9._-]", "-", "_".join([*parts, str(seed_index)]))


def data_dir(task: Any, data: Path) -> str | None:
    """The folder of a GLUE task; the demo brings its own data."""
    return str(data / TASK_NAMES[task]) if task in TASK_NAMES else None


def check_data(cells: Iterable[Cell]) -> None:
    """Say at once, and not after hours, which data are missing."""
    for folder in sorted({cell.plan.data_dir for cell in cells if cell.plan.data_dir}):
        if not (Path(folder) / "train.tsv").exists():
            raise UserError(
                f"there is no {folder}/train.tsv; give --data the folder that holds GLUE's "
                f"{Path(folder).name} as TSV files"
            )
