"""Several methods at equal ε, on the same data, by the same accountant, and one table. Stopped or
killed, the same call continues and repeats no finished run.

A cell is the plan values of one (method, ε), run with each seed, tuned beforehand if asked for.
Before anything runs, the smallest difference that the seeds and dev rows can show is said.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfp_ray.data import Task
from dpfp_ray.data.tasks import in_memory
from dpfp_ray.plan.method_spec import METHODS
from dpfp_ray.plan.plan import DATA_FIELDS, FIELDS
from dpfp_ray.plan.values import field_name, make_plan
from dpfp_ray.privacy.ledger import Ledger, open_ledger
from dpfp_ray.privacy.ledger_entries import Spent
from dpfp_ray.reports.comparison import Compared, compared
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.audits import (
    audit_trials,
    audits_left,
    say_powerless,
    write_outcomes,
)
from dpfp_ray.sweeps.cluster import RayChoices, ray_options
from dpfp_ray.sweeps.driver import Runner, close, refuse_encoder, stopped
from dpfp_ray.sweeps.shared import hands_of
from dpfp_ray.sweeps.trial import InputsOnce, resolve_storage
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.training.prepare import load_inputs
from dpfp_ray.training.record import Record, Select

if TYPE_CHECKING:
    import pandas
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dpfp_ray.data.tasks import load_task
from dpfp_ray.plan.method_spec import (
    LORA_FIELDS,
    find_spec,
    spec_file,
)
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import check_budgets, check_methods, variant
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.results.power import MAX_SEEDS, seeds_needed, smallest_difference
from dpfp_ray.results.runs import label
from dpfp_ray.results.statistics import LEVEL
from dpfp_ray.sweeps.space import DERIVED, PUBLIC_SEED, has_space, read_search_space, space_path
from dpfp_ray.sweeps.trial import Trial, bind_trial
from dpfp_ray.system.terminal import stderr
from dpfp_ray.training.prepare import Inputs

Settings = Mapping[str, Mapping[str, Any]]  # plan fields of one method or variant only


def cells_of(
    methods: str | Iterable[str],
    epsilon: float | Iterable[float],
    fields: Mapping[str, Any],
    match: str | None,
    settings: Settings | None,
) -> list[dict[str, Any]]:
    """The cells that the keywords of `compare` ask for, checked."""
    names = check_methods([methods] if isinstance(methods, str) else methods)
    budgets = check_budgets([epsilon] if isinstance(epsilon, int | float) else epsilon)
    own = {key: dict(values) for key, values in (settings or {}).items()}
    return plan_cells(names, budgets, dict(fields), match, own)


def plan_cells(
    methods: list[str],
    budgets: list[float],
    common: dict[str, Any],
    match: str | None,
    settings: dict[str, dict[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """Plan values for each (method, ε); non-private training has no ε and is run once.

    A flag applies to every method that knows it, one of `settings` to its method or, if it names a
    variant, to that variant.
    """
    cells = []
    for name in methods:
        fields, own = variant(name), settings or {}
        method = fields["method"]
        values = {**common, **own.get(method, {}), **own.get(name, {}), **fields}
        if match == "batch":
            values.setdefault("batch_size", 32)
        spec = find_spec(method, values.get("mode")) or find_spec(method)
        assert spec is not None
        unused = spec.unused + (() if values.get("scope") == "lora" else LORA_FIELDS)
        for key in unused:
            values.pop(key, None)
        cells += [{**values, "epsilon": budget} for budget in budgets] if spec.private else [values]
    return cells


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


Values = dict[str, Any]  # the plan's values for one (method, ε)
# A parameter of a search space that stands for another field.
MEANS = {DERIVED: "micro_batches"}


def bind_cells(cells: list[Values], seeds: int, inputs_of: Callable[[Plan], Inputs]) -> list[Trial]:
    """Every cell `seeds` times; repetition by repetition, so that a stopped comparison is fair."""
    return [
        bind_trial(values, inputs_of, seed_index) for seed_index in range(seeds) for values in cells
    ]


def differing(trials: list[Trial]) -> list[str]:
    """What tells these trials apart, for the live table."""
    configs = [{**trial.plan.to_dict(), "seed_index": trial.seed_index} for trial in trials]
    names = ("method", "mode", "scope", "epsilon", "seed_index")
    return [n for n in names if n == "method" or len({config[n] for config in configs}) > 1]


def tuned_cells(cells: list[Values], runner: Runner, samples: int) -> list[Values]:
    """Each cell with the best of `samples` settings: the same effort for every method.

    The method's paper's own settings are the first candidate, so tuning never loses to them by
    accident of the draw. What the user has fixed stays fixed.
    """
    candidates = [drawn(cell, samples, runner.inputs_of) for cell in cells]
    runner.run(
        [trial for tried in candidates for _, trial in tried],
        varied=["method", "epsilon", "batch_size", "learning_rate"],
    )
    store = Store(runner.storage)

    def score(trial: Trial) -> float:
        record = store.get(trial.id)
        return -1.0 if record is None else float(record["metrics"].get("accuracy", -1.0))

    return [max(tried, key=lambda one: score(one[1]))[0] for tried in candidates]


def drawn(
    cell: Values, samples: int, inputs_of: Callable[[Plan], Inputs]
) -> list[tuple[Values, Trial]]:
    """The cell itself and random variants of it from the search space of its method; valid ones
    only (a batch may be larger than the data), each once."""
    space = replace(read_search_space(space_path(space_name(cell)), {}), fixed=cell)
    free = [p for p in space.parameters if MEANS.get(p.name, p.name) not in cell]
    rng = keyed_generator(PUBLIC_SEED, f"tune {space.name}", 0)
    found: dict[str, tuple[Values, Trial]] = {}
    for attempt in range(20 * samples):
        values = space.plan_values({p.name: p.draw(rng) for p in free if attempt})
        try:
            trial = bind_trial(values, inputs_of, group="tune")
        except UserError:
            if not attempt:
                raise
            continue
        found.setdefault(trial.id, (values, trial))
        if len(found) == samples:
            break
    return list(found.values())


def space_name(cell: Values) -> str:
    """The space of the method's file; one of the scope's own where there is one (`dpsgd_top`)."""
    name = spec_file(str(cell["method"]), cell.get("mode"))
    own = f"{name}_{str(cell.get('scope')).partition(':')[0]}"
    return own if has_space(own) else name


def announce(trials: list[Trial], seeds: int, inputs_of: Callable[[Plan], Inputs]) -> None:
    """Before anything runs: what the planned seeds and dev rows can show."""
    plans = list({trial.plan.hash: trial.plan for trial in trials}.values())
    table = next(iter(inputs_of(plans[0]).data.dev.values()))
    stderr.print(sensitivity_line(plans, seeds, len(table)), markup=False)


@dataclass(frozen=True, repr=False)
class Comparison:
    """A finished comparison: one of `rows` for each (method, ε), and the records behind them."""

    storage: str
    compared: Compared
    records: list[Record]
    costs: list[Spent]  # what everything that was ever done to these records costs

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.compared.rows

    def to_pandas(self) -> "pandas.DataFrame":
        import pandas

        return pandas.DataFrame(self.rows)

    def report(self, folder: str | Path, *, title: str | None = None) -> Any:
        """Tables, figures and a page about it, see `dpfp_ray.report`."""
        from dpfp_ray.reports.page import report

        return report(self.storage, output=folder, title=title)

    def show(self, *, wide: bool = False) -> None:
        """Print what came out, the table, and each method's privacy in a line or two."""
        self.compared.show(wide=wide)

    def __repr__(self) -> str:
        return self.compared.to_markdown()


def compare(
    *,
    output: str | Path,
    methods: str | Iterable[str] = METHODS,
    epsilon: float | Iterable[float] = 3.0,
    seeds: int = 1,
    match: str | None = None,
    settings: Settings | None = None,
    tune: int | None = None,
    audit: int | bool | None = None,
    select: Select = "last",
    data: Any = None,
    dev: Any = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    users: Any = None,
    encoder: None = None,
    ledger: str | Path | Ledger | None = None,
    total_epsilon: float | None = None,
    total_delta: float | None = None,
    **fields: Any,
) -> Comparison:
    """Run every method at every budget, `seeds` times, and sum up.

    output    folder or URI of the results
    methods   such as ["non_private", "dpfp:moments", "dpsgd:head"] (default: all)
    epsilon   one budget or several
    match     "batch": every method gets the same batch size (default 32)
    settings  plan fields for one method only, such as {"dpfp": {"learning_rate": 1e-4}}
    tune      first try so many random settings of each method at each ε, then compare the best
    audit     also audit every row, with so many canaries (True: 1000)
    select    the epoch that every run quotes: last, or best on dev
    data      in place of files, see `train`
    ledger, total_epsilon, total_delta   as in `train`; all runs and audits are entered as one list

    Any other keyword is a plan field that all methods share (task, model, epochs, …), or one of
    `cluster.RayChoices`.
    """
    refuse_encoder(encoder)
    ray: Any = {name: fields.pop(name) for name in RayChoices.__annotations__ if name in fields}
    for name in fields:
        if field_name(name) not in FIELDS:
            raise UserError(unknown("keyword", name, (*FIELDS, *RayChoices.__annotations__)))
    task: Task | None = None
    if data is not None:
        columns = {"text": text, "pair": pair, "label": label, "users": users}
        fields, task = _with_data(fields, data, dev=dev, **columns)
    cells = cells_of(methods, epsilon, fields, match, settings)
    canaries = 1000 if audit is True else audit or None

    storage, options = resolve_storage(str(output)), ray_options(ray)
    inputs_of = InputsOnce(partial(load_inputs, task=task, hands=hands_of(options)))
    trials = bind_cells(cells, seeds, inputs_of)
    book = open_ledger(ledger, total_epsilon, total_delta)
    announce(trials, seeds, inputs_of)
    say_powerless(trials, canaries)
    try:
        with Runner(Path(storage).name, storage, options, inputs_of, book) as runner:
            if tune:
                cells = tuned_cells(cells, runner, tune)
                trials = bind_cells(cells, seeds, inputs_of)
            open_audits = audits_left(trials, storage) if canaries else []
            runner.run(trials, varied=differing(trials), audits=open_audits)
            audits = audit_trials(trials, runner, canaries, task)
    except KeyboardInterrupt as stop:
        raise stopped(storage, stop) from None
    store = Store(storage)
    write_outcomes(store, audits)
    records = close(storage)
    chosen = {trial.id for trial in trials}
    shown = [record for record in records if record["trial"]["id"] in chosen]
    asked = [*chosen, *(str(record["trial"]["id"]) for record in audits)]
    made = compared(records, asked, select)
    store.files.write("table.md", made.to_markdown().encode())
    return Comparison(storage, made, shown, runner.charges.spent())


def _with_data(fields: dict[str, Any], data: Any, **columns: Any) -> tuple[dict[str, Any], Task]:
    """The shared plan fields with those that name the data, and the data."""
    given = {field_name(name): value for name, value in fields.items()}
    plan, task = in_memory(
        make_plan({k: v for k, v in given.items() if k in DATA_FIELDS}), data, **columns
    )
    known = {name: getattr(plan, name) for name in DATA_FIELDS if getattr(plan, name) is not None}
    return {**given, **known}, task
