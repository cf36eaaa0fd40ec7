"""Several methods at equal ε, on the same data, by the same accountant, and one table. Stopped or
killed, the same call continues and repeats no finished run.
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
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.audits import (
    audit_trials,
    audits_left,
    say_powerless,
    with_outcomes,
    write_outcomes,
)
from dpfp_ray.sweeps.cluster import RayChoices, ray_options
from dpfp_ray.sweeps.compare_rows import summarise, with_candidates
from dpfp_ray.sweeps.compare_runs import (
    Settings,
    announce,
    bind_cells,
    cells_of,
    differing,
    tuned_cells,
)
from dpfp_ray.sweeps.compare_table import markdown, print_comparison
from dpfp_ray.sweeps.driver import Runner, close, refuse_encoder, stopped
from dpfp_ray.sweeps.shared import hands_of
from dpfp_ray.sweeps.trial import InputsOnce, resolve_storage
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.training.prepare import load_inputs
from dpfp_ray.training.record import Record, Select

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Comparison:
    """A finished comparison: one of `rows` for each (method, ε), and the records behind them."""

    storage: str
    rows: list[dict[str, Any]]
    records: list[Record]
    costs: list[Spent]  # what everything that was ever done to these records costs

    def to_pandas(self) -> "pandas.DataFrame":
        import pandas

        return pandas.DataFrame(self.rows)

    def report(self, folder: str | Path, *, title: str | None = None) -> Any:
        """Tables, figures and a page about it, see `dpfp_ray.report`."""
        from dpfp_ray.reports.make import report  # upwards: the one exception of the contract

        return report(self.storage, output=folder, title=title)

    def show(self, *, wide: bool = False) -> None:
        """Print the table, what its marks mean, and each method's privacy in a line or two."""
        print_comparison(self.rows, self.records, wide=wide)

    def __repr__(self) -> str:
        return markdown(self.rows)


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
    # With what was tried for tuning: it tells how the settings of a row were chosen.
    rows = with_outcomes(summarise(with_candidates(shown, records), select), audits)
    store.files.write("table.md", markdown(rows).encode())
    return Comparison(storage, rows, shown, runner.charges.spent())


def _with_data(fields: dict[str, Any], data: Any, **columns: Any) -> tuple[dict[str, Any], Task]:
    """The shared plan fields with those that name the data, and the data."""
    given = {field_name(name): value for name, value in fields.items()}
    plan, task = in_memory(
        make_plan({k: v for k, v in given.items() if k in DATA_FIELDS}), data, **columns
    )
    known = {name: getattr(plan, name) for name in DATA_FIELDS if getattr(plan, name) is not None}
    return {**given, **known}, task
