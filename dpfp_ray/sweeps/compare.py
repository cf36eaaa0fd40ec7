"""Several methods at equal ε, on the same data, by the same accountant, and one table. Stopped or
killed, the same call continues and repeats no finished run.

A cell is the plan values of one (method, ε), run with each seed, tuned beforehand if asked for.
Before anything runs, the smallest difference that the seeds and dev rows can show is said.

An audited run has canaries in its data, so it is a run of its own, never a row's own result. Its
record goes into the same store under the id audit-PLAN, and its outcome stands beside the row.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfp_ray.auditing.audit import Audited, audit_events, open_audit, power_warning
from dpfp_ray.auditing.audit import Settings as AuditSettings
from dpfp_ray.data import Task
from dpfp_ray.data.tasks import in_memory, load_task
from dpfp_ray.plan.method_spec import LORA_FIELDS, find_spec, is_private, spec_file
from dpfp_ray.plan.plan import DATA_FIELDS, FIELDS, Plan
from dpfp_ray.plan.values import (
    check_budgets,
    check_methods,
    field_name,
    make_plan,
    usual_methods,
    variant,
)
from dpfp_ray.privacy.ledger import Ledger, open_ledger
from dpfp_ray.privacy.ledger_entries import Spent
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.reports.best_setting import SweepOutcome
from dpfp_ray.reports.comparison import Compared, compared
from dpfp_ray.results.power import MAX_SEEDS, seeds_needed, smallest_difference
from dpfp_ray.results.runs import label as label_of
from dpfp_ray.results.runs import read_runs
from dpfp_ray.results.statistics import LEVEL
from dpfp_ray.results.store import Store, load_records
from dpfp_ray.sweeps.cluster import RayOptions, connected, settings
from dpfp_ray.sweeps.driver import AUDIT, Runner, audit_seeds, refuse_encoder
from dpfp_ray.sweeps.price import local_resources, price
from dpfp_ray.sweeps.shared import hands_of
from dpfp_ray.sweeps.space import DERIVED, PUBLIC_SEED, SPACES, read_search_space
from dpfp_ray.sweeps.trial import InputsOnce, Trial, bind_trial, resolve_storage
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.terminal import stderr
from dpfp_ray.training.loop import Step
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.prepare import Inputs, load_inputs
from dpfp_ray.training.record import Record, Select
from dpfp_ray.training.run_folder import Saver, make_folder, save_state

if TYPE_CHECKING:
    import pandas

Values = dict[str, Any]  # the plan's values for one (method, ε)
# Fields that say which method, data and budget a setting is for.
NOT_SETTINGS = (
    "method",
    "mode",
    "scope",
    "model",
    "epsilon",
    "delta",
    "accountant",
    "adjacency",
    *DATA_FIELDS,
)
TOGETHER = ("batch_size", "micro_batches", "clip", "learning_rate", "epochs")
Settings = Mapping[str, Mapping[str, Any]]  # plan fields of one method or variant only


# --- cells and what they can show ---------------------------------------------------------------


def cells_of(
    methods: str | Iterable[str] | None,
    epsilon: float | Iterable[float],
    fields: Mapping[str, Any],
    match: str | None,
    own: Settings | None,
) -> list[Values]:
    """The cells that the keywords of `compare` ask for, checked.

    Where no methods are named, those of the usual ones that cannot run with these fields are left
    out, which is said.
    """
    budgets = check_budgets([epsilon] if isinstance(epsilon, int | float) else epsilon)
    if methods is not None:
        names = check_methods([methods] if isinstance(methods, str) else methods)
        return plan_cells(names, budgets, fields, match, own)
    cells: list[Values] = []
    refusals: dict[str, UserError] = {}
    for name in usual_methods():
        try:
            mine = plan_cells([name], budgets, fields, match, own)
            cells += mine if all(make_plan(cell) for cell in mine) else []
        except UserError as error:
            refusals[name] = error
    if not cells:
        raise next(iter(refusals.values()))
    for name, refusal in refusals.items():
        say(f"without {name}: {refusal}")
    return cells


def plan_cells(
    methods: list[str],
    budgets: list[float],
    common: Mapping[str, Any],
    match: str | None,
    settings: Settings | None = None,
) -> list[Values]:
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
        values = {key: value for key, value in values.items() if key not in unused}
        private = spec.private and is_private(method, values.get("teacher"))
        cells += [{**values, "epsilon": budget} for budget in budgets] if private else [values]
    return cells


def preview(
    *,
    methods: str | Iterable[str] | None = None,
    epsilon: float | Iterable[float] = 3.0,
    seeds: int = 1,
    match: str | None = None,
    settings: Settings | None = None,
    best_of: Sequence[str | Path] = (),
    tune: int | None = None,
    audit: int | None = None,
    difference: float | None = None,
    **fields: Any,
) -> list[str]:
    """What `compare` with these keywords would run, and the smallest difference that it can show,
    in lines. The data are read, but nothing is encoded or trained.

    difference   also say how many seeds a difference of so many points of accuracy needs
    """
    of_ray = RayOptions.__dataclass_fields__
    options = RayOptions(**{name: fields.pop(name) for name in of_ray if name in fields})
    book = open_ledger(fields.pop("ledger", None))
    settings = with_best(settings, best_of)
    plans = [make_plan(cell) for cell in cells_of(methods, epsilon, fields, match, settings)]
    task = load_task(plans[0])
    bound = [plan.bind(records=task.train.units, representation="mean") for plan in plans]
    persons = "" if task.train.users is None else f" of {task.train.units:,} persons"
    rows = len(next(iter(task.dev.values())))  # methods are compared on the first dev set
    lines = [f"{task.name}: {len(task.train):,} records{persons}, {rows:,} dev rows"]
    for plan in bound:
        steps = "one release" if plan.one_release else f"B = {plan.B:,}, {plan.steps:,} steps"
        lines.append(f"  {label_of(plan.to_dict())}{at_budget(plan)}: {steps}")
    lines.append(runs_line(len(bound), seeds, tune, audit))
    lines.append(sensitivity_line(bound, seeds, rows))
    if difference is not None:
        lines.append(seeds_line(bound, rows, difference))
    repeated = seeds + (tune or 0) + bool(audit)
    cost = price(plans, task, local_resources(options), book, seeds=repeated)
    return [*lines, *cost.lines]


def with_best(settings: Settings | None, stores: Sequence[str | Path]) -> Settings:
    """`settings`, and for the methods of these sweeps the settings of their best trials."""
    best: dict[str, Mapping[str, Any]] = {}
    for store in stores:
        outcome = SweepOutcome(read_runs(load_records(store)))
        plan, name = outcome.best_plan, label_of(outcome.best_plan).replace(" ", ":")
        # These belong together: M of the best trial fits its B, also where all trials had one B.
        tried = [field for field in outcome.varied if field not in NOT_SETTINGS]
        fields = dict.fromkeys((*TOGETHER, *tried))
        best[name] = {field: plan[field] for field in fields if plan[field] is not None}
    return {**best, **(settings or {})}


def at_budget(plan: Plan) -> str:
    return "" if plan.epsilon is None or not plan.private else f" at ε = {plan.epsilon:g}"


def runs_line(cells: int, seeds: int, tune: int | None, audit: int | None) -> str:
    def counted(count: int, noun: str) -> str:
        return f"{count:,} {noun}{'' if count == 1 else 's'}"

    total = cells * seeds + cells * (tune or 0) + (cells if audit else 0)
    parts = [f"{counted(cells, 'cell')} × {counted(seeds, 'seed')}"]
    parts += [f"{cells} × {tune} for tuning"] if tune else []
    parts += [counted(cells, "audit")] if audit else []
    return f"{counted(total, 'run')}: {' + '.join(parts)}"


def sensitivity_line(plans: Sequence[Plan], seeds: int, rows: int) -> str:
    """What the planned seeds and dev rows can show; also printed when a comparison starts."""
    methods, level = _family(plans)
    if methods < 2:
        return "one method at each ε: nothing is compared"
    if rows < 2:
        return f"dev rows: {rows}; nothing can be compared on them"
    sensitivity = smallest_difference(rows=rows, seeds=seeds, methods=methods, level=level)
    smallest = sensitivity.smallest_difference
    smallest_text = "none" if smallest is None else f"{100 * smallest:.1f} points"
    if seeds < 2:
        return (
            f"1 seed names no winner: the spread over seeds is unknown. These models alone are "
            f"told apart from {smallest_text} on; use --seeds 5 to compare methods"
        )
    return (
        f"smallest difference that {seeds} seeds on {rows:,} dev rows show: {smallest_text} "
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


# --- trials and tuning --------------------------------------------------------------------------


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

    def score(candidate: tuple[Values, Trial]) -> float:
        record = store.get(candidate[1].id)
        return -1.0 if record is None else float(record["metrics"].get("accuracy", -1.0))

    return [max(tried, key=score)[0] for tried in candidates]


def drawn(
    cell: Values, samples: int, inputs_of: Callable[[Plan], Inputs]
) -> list[tuple[Values, Trial]]:
    """The cell itself and random variants of it from the search space of its method; valid ones
    only (a batch may be larger than the data), each once."""
    space = replace(read_search_space(SPACES / f"{space_name(cell)}.yaml", {}), fixed=cell)
    means = {DERIVED: "micro_batches"}
    free = [p for p in space.parameters if means.get(p.name, p.name) not in cell]
    rng = keyed_generator(PUBLIC_SEED, f"tune {space.name}", 0)
    candidates: dict[str, tuple[Values, Trial]] = {}
    for attempt in range(20 * samples):
        values = space.plan_values({p.name: p.draw(rng) for p in free if attempt})
        try:
            trial = bind_trial(values, inputs_of, group="tune")
        except UserError:
            if not attempt:
                raise
            continue
        candidates.setdefault(trial.id, (values, trial))
        if len(candidates) == samples:
            break
    return list(candidates.values())


def space_name(cell: Values) -> str:
    """The space of the method's file; one of the scope's own where there is one (`dpsgd_top`)."""
    name = spec_file(str(cell["method"]), cell.get("mode"))
    own = f"{name}_{str(cell.get('scope')).partition(':')[0]}"
    return own if (SPACES / f"{own}.yaml").exists() else name


# --- audits -------------------------------------------------------------------------------------


def audits_of(trials: Iterable[Trial]) -> dict[str, Trial]:
    """An audit of each distinct plan among `trials`, by the id of its record."""
    # A student's audit is that of its teacher, a plan of its own.
    audited = (t for t in trials if t.plan.teacher is None and t.plan.spec.reads_records)
    return {f"audit-{t.plan.hash}": replace(t, seed_index=0, group=AUDIT) for t in audited}


def run_audits(
    audits: Mapping[str, Trial], runner: Runner, canaries: int, data: Task | None = None
) -> None:
    """Run `audits`, one Ray task each, and put their records into the store.

    The runner has entered them in its ledger. `data` are the records, if no worker can load them.
    """
    if not audits:
        return
    options, storage = runner.options, runner.storage
    with settings(), connected(options.address):
        import ray

        runner.check_storage()  # the trials may have been finished before
        threads = options.cpus_per_worker or 1
        task = ray.remote(max_retries=3)(audit_task).options(
            num_cpus=threads, num_gpus=options.gpus_per_worker or 0
        )
        running = {}
        for name, audit in audits.items():
            # Beside the store, where a killed audit is found again; a remote store has no folder.
            folder = None if "://" in storage else str(Path(storage) / "audits" / name)
            seeds = dict(audit_seeds(audit.id, runner.seed))
            plan, wanted = audit.plan, audit_settings(audit.plan, canaries)
            run = (plan, wanted, folder, threads, data, seeds, options.save_every)
            running[task.remote(*run)] = name
        while running:
            (done, *_), _ = ray.wait(list(running))
            name = running.pop(done)
            record: Record = ray.get(done)
            plan, entry = audits[name].plan, runner.charges.begun[audits[name].id]
            trial: Any = {"id": name, "group": AUDIT, "status": "finished", "ledger_entry": entry}
            record["trial"] = trial
            Store(storage).put(record)
            runner.charges.ledger.end(entry, plan.steps)
            facts = record["audit"]
            say(
                f"audit of {label_of(plan.to_dict())}{at_budget(plan)}: {facts['correct']} of "
                f"{facts['guesses']} guesses right, ε ≥ {facts['epsilon']:.2f}: {facts['verdict']}"
            )


def audit_settings(plan: Plan, canaries: int) -> AuditSettings:
    return AuditSettings(min(canaries, plan.D // 2))


def audit_task(
    plan: Plan,
    wanted: AuditSettings,
    folder: str | None,
    threads: int,
    data: Task | None,
    seeds: dict[str, int],
    save_every: float,
) -> Record:
    """One audit in this process; the driver has entered it in the ledger.

    Without a `folder` it works in a temporary one, which is its owner's only.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="dpfp-audit-") as private:
            return audit_task(plan, wanted, private, threads, data, seeds, save_every)
    use_threads(threads)
    opened = open_audit(make_folder(folder), plan, wanted, seeds, data)
    if opened.record is not None:
        return opened.record
    saver = Saver(lambda state: save_state(opened.scratch, state, opened.run.seed), save_every)
    for event in audit_events(opened.audit, opened.run, opened.scratch):
        if isinstance(event, Step) and saver.due:
            saver.save_now(event.checkpoint)
        if isinstance(event, Audited):
            audited = event
    return opened.finish(audited)


# --- the verb -----------------------------------------------------------------------------------


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
    methods: str | Iterable[str] | None = None,
    epsilon: float | Iterable[float] = 3.0,
    seeds: int = 1,
    match: str | None = None,
    settings: Settings | None = None,
    best_of: Sequence[str | Path] = (),
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
    methods   such as ["non_private", "dpfp:moments", "dpsgd:head"] (default: all in all modes)
    epsilon   one budget or several
    match     "batch": every method gets the same batch size (default 32)
    settings  plan fields for one method only, such as {"dpfp": {"learning_rate": 1e-4}}
    best_of   stores of sweeps: each one's method gets what its best trial varied
    tune      first try so many random settings of each method at each ε, then compare the best
    audit     also audit every row, with so many canaries (True: 1000)
    select    the epoch that every run quotes: last, or best on dev
    data      in place of files, see `train`
    ledger, total_epsilon, total_delta   as in `train`; all runs and audits are entered as one list

    Any other keyword is a plan field that all methods share (task, model, epochs, …), or one of
    `cluster.RayOptions`.
    """
    refuse_encoder(encoder)
    of_ray = RayOptions.__dataclass_fields__
    options = RayOptions(**{name: fields.pop(name) for name in of_ray if name in fields})
    for name in fields:
        if field_name(name) not in FIELDS:
            raise UserError(unknown("keyword", name, (*FIELDS, *of_ray)))
    task: Task | None = None
    if data is not None:
        fields = {field_name(name): value for name, value in fields.items()}
        given = make_plan({name: fields[name] for name in DATA_FIELDS if name in fields})
        columns = {"text": text, "pair": pair, "label": label, "users": users}
        plan, task = in_memory(given, data, dev=dev, **columns)
        names = [name for name in DATA_FIELDS if getattr(plan, name) is not None]
        fields |= {name: getattr(plan, name) for name in names}
    cells = cells_of(methods, epsilon, fields, match, with_best(settings, best_of))
    canaries = 1000 if audit is True else audit or 0

    storage = resolve_storage(str(output))
    inputs_of = InputsOnce(partial(load_inputs, task=task, hands=hands_of(options)))
    trials = bind_cells(cells, seeds, inputs_of)
    book = open_ledger(ledger, total_epsilon, total_delta)
    # Before anything is trained: what the planned seeds, dev rows and canaries can show.
    plans = list({trial.plan.hash: trial.plan for trial in trials}.values())
    say(sensitivity_line(plans, seeds, len(next(iter(inputs_of(plans[0]).data.dev.values())))))
    for plan in plans if canaries else ():
        if (warning := power_warning(plan, audit_settings(plan, canaries))) is not None:
            say(f"warning: audit of {label_of(plan.to_dict())}: {warning}")
    store = Store(storage)
    if not store.exists():
        task = task or load_task(plans[0])
        repeated = seeds + (tune or 0) + bool(canaries)
        for line in price(
            [make_plan(cell) for cell in cells],
            task,
            local_resources(options),
            book,
            seeds=repeated,
        ).lines:
            say(line)
    with Runner(Path(storage).name, storage, options, inputs_of, book) as runner:
        if tune:
            cells = tuned_cells(cells, runner, tune)
            trials = bind_cells(cells, seeds, inputs_of)
        audits = audits_of(trials) if canaries else {}
        open_audits = {name: audits[name] for name in audits if store.get(name) is None}
        runner.run(trials, varied=differing(trials), audits=list(open_audits.values()))
        run_audits(open_audits, runner, canaries, task)
    outcomes = [record for name in audits if (record := store.get(name)) is not None]
    of_plan = {record["plan_hash"]: record["audit"] for record in outcomes}
    for record in store.records():
        if record["plan_hash"] in of_plan and record["statement"] and not record["audit"]:
            record["statement"]["audit"] = of_plan[record["plan_hash"]]
            store.put(record)
    store.export()
    records, chosen = store.records(), {trial.id for trial in trials}
    own_records = [record for record in records if record["trial"]["id"] in chosen]
    made = compared(records, [*chosen, *audits], select)
    store.files.write("table.md", made.to_markdown().encode())
    return Comparison(storage, made, own_records, runner.charges.spent())


def say(line: str) -> None:
    stderr.print(line, markup=False)
