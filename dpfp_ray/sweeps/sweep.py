"""Explore any plan fields under one privacy budget, on Ray. Stopped or killed, the same call
continues and repeats no finished trial.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dpfp_ray.data import Task
from dpfp_ray.data.tasks import load_task
from dpfp_ray.plan.plan import INPUT_FIELDS, Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.ledger import Ledger, open_ledger
from dpfp_ray.privacy.ledger_entries import Spent
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.privacy.selection import check_search, parse_selection
from dpfp_ray.privacy.statement import brief
from dpfp_ray.reports.best_setting import SweepOutcome, next_command
from dpfp_ray.results.query import sort_rows
from dpfp_ray.results.rows import Row, flatten
from dpfp_ray.results.runs import read_runs
from dpfp_ray.results.store import Store, as_frame, load_records
from dpfp_ray.results.study import study_of
from dpfp_ray.sweeps.cluster import RayOptions, ray_options
from dpfp_ray.sweeps.driver import Runner, data_key, refuse_encoder
from dpfp_ray.sweeps.price import Price, local_resources, price
from dpfp_ray.sweeps.selection import SelectionCost, run_selection
from dpfp_ray.sweeps.shared import hands_of
from dpfp_ray.sweeps.space import (
    MOST_TRIALS,
    PUBLIC_SEED,
    SEARCHERS,
    SearchSpace,
    read_search_space,
    space_of,
)
from dpfp_ray.sweeps.trial import SETTLED, InputsOnce, Trial, bind_trial, resolve_storage
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import stderr
from dpfp_ray.training.dev_scores import quote
from dpfp_ray.training.prepare import (
    Inputs,
    load_inputs,
    possible_representations,
    with_precision,
)
from dpfp_ray.training.record import Record, fitting_fields, make_record

if TYPE_CHECKING:
    import optuna
    import pandas
    from ray.tune.schedulers import TrialScheduler

# More epochs than any trial has: Tune's ASHA stops every trial at its limit, good ones too.
NO_EPOCH_LIMIT = 10_000


@dataclass(frozen=True, repr=False)
class FinishedSweep:
    """A finished sweep: its trials' records, and what they cost.

    `costs` are the ledger's sums of everything that was ever done to these records; after a
    selection, what it costs to release the best trial.
    """

    storage: str
    space: SearchSpace
    records: list[Record]
    costs: Sequence[SelectionCost | Spent]

    @property
    def rows(self) -> list[Row]:
        """One flat row for each trial, the best first."""
        return sort_rows([flatten(record) for record in self.records], "accuracy")

    @property
    def best(self) -> Record | None:
        """The record of the trial with the best accuracy."""
        by_id = {flatten(record)["id"]: record for record in self.records}
        return by_id[self.rows[0]["id"]] if by_id else None

    @cached_property
    def outcome(self) -> SweepOutcome:
        """The best setting, whether it is told apart from the next, and what was lost."""
        return SweepOutcome(read_runs(self.records))

    @property
    def best_plan(self) -> Plan:
        """The plan of the best setting: `train(sweep(…).best_plan, output=…)` keeps its model."""
        return make_plan(best_fields(self.records))

    @property
    def next_command(self) -> str:
        """What trains the best setting and keeps its model."""
        return next_command(self.storage)

    def to_optuna(self) -> "optuna.Study":
        """A study of the trials, for Optuna's own plots."""
        return study_of(self.rows, name=self.space.name)

    @property
    def statement(self) -> str:
        """What may be said about the best trial's privacy."""
        return brief(self.best["statement"]) if self.best and self.best["statement"] else ""

    def to_pandas(self) -> "pandas.DataFrame":
        return as_frame(self.rows)

    def __repr__(self) -> str:
        return f"<sweep {self.space.name}: {len(self.records)} trials in {self.storage}>"


def best_plan(*places: str | Path) -> Plan:
    """The plan of the best setting below these stores, to train it or to compare it."""
    return make_plan(best_fields(load_records(*places)))


def best_fields(records: Sequence[Record]) -> dict[str, Any]:
    """Its plan's fields, without those that are unset."""
    plan = SweepOutcome(read_runs(records)).best_plan
    return {name: value for name, value in plan.items() if value is not None}


def sweep(
    space: str | Path | Mapping[str, Any] | SearchSpace,
    *,
    plan: Plan | Mapping[str, Any] | None = None,
    storage: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
    search: str | None = None,
    samples: int | None = None,
    selection: str | None = None,
    encoder: None = None,
    ledger: str | Path | Ledger | None = None,
    total_epsilon: float | None = None,
    total_delta: float | None = None,
    **ray: Any,
) -> FinishedSweep:
    """Run all trials of a search space, each calibrated to the same budget before it starts.

    space      a YAML file, the name of a shipped one (`shipped_spaces()`), or parameters:
               {"learning_rate": log_uniform(1e-5, 1e-3), "batch_size": [64, 256]}
    plan       with parameters, what is fixed: a Plan or its fields
    storage    folder or URI of the results (default: runs/NAME of the space)
    changes    keys of the space to change, or plan fields to fix
    search     how trials are chosen: grid, random, qmc, tpe, gp or cmaes
    samples    how many trials; a larger number than last time goes on with a finished sweep
    selection  what releasing the best trial is charged as: composition (default) counts every
               trial; logarithmic:N, geometric:N, poisson:N draw their number at random, N
               expected, keep it and all trials but the best secret, and release that one
    ledger, total_epsilon, total_delta   as in `train`; a list of trials is entered as a whole
               before the first one starts, what a searcher proposes when it proposes it

    Any other keyword is one of `cluster.RayOptions`.
    """
    refuse_encoder(encoder)
    space = settle_space(space, plan, changes, search, samples)
    place = resolve_storage(str(storage or f"runs/{space.name}"))
    options = ray_options(ray)
    tasks = TaskOnce()
    inputs_of = InputsOnce(lambda one: load_inputs(one, tasks(one), hands=hands_of(options)))
    book = open_ledger(ledger, total_epsilon, total_delta)
    if selection:
        chosen = parse_selection(selection)
        check_search(chosen, space.search, space.scheduler)
        if chosen.repeats:
            return FinishedSweep(
                place, space, *run_selection(space, chosen, place, options, inputs_of, book)
            )
    if not Store(place).exists():
        for line in price_lines(space, options, book, tasks):
            stderr.print(line, markup=False)
    with Runner(space.name, place, options, inputs_of, book) as runner:
        run_sweep(space, runner)
    Store(place).export()
    return FinishedSweep(place, space, Store(place).records(), runner.charges.spent())


def settle_space(
    space: str | Path | Mapping[str, Any] | SearchSpace,
    plan: Plan | Mapping[str, Any] | None,
    changes: Mapping[str, Any] | None,
    search: str | None,
    samples: int | None,
) -> SearchSpace:
    asked = {"search": search, "samples": samples}
    given = {**(changes or {}), **{name: v for name, v in asked.items() if v is not None}}
    if isinstance(space, Mapping):
        return space_of(space, plan, **given)
    if plan is not None:
        raise UserError("plan= goes with parameters in Python; a file has its own (changes=)")
    if not isinstance(space, SearchSpace):
        # As they would stand after `--set KEY=`.
        texts = {
            k: ",".join(map(str, v)) if isinstance(v, list | tuple) else str(v)
            for k, v in given.items()
        }
        return read_search_space(space, texts)
    if changes:
        raise UserError("changes are for a space in a file; change this one itself")
    return replace(space, **given)


def preview_sweep(
    space: str | Path | Mapping[str, Any] | SearchSpace,
    *,
    plan: Plan | Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    search: str | None = None,
    samples: int | None = None,
    ledger: str | Path | Ledger | None = None,
    **ray: Any,
) -> list[str]:
    """What `sweep` with these keywords would take, in lines: nothing is run or entered."""
    settled = settle_space(space, plan, changes, search, samples)
    return price_lines(settled, ray_options(ray), open_ledger(ledger), TaskOnce())


def price_of(
    space: SearchSpace, options: RayOptions, ledger: Ledger, tasks: "TaskOnce"
) -> list[Price]:
    """The price of a sweep, one for each of its data sets."""
    resources = local_resources(options)
    by_data: dict[object, list[Plan]] = {}
    for plan in space.some_plans(MOST_TRIALS if space.search == "grid" else 200):
        by_data.setdefault(data_key(plan), []).append(plan)
    looked_at = sum(map(len, by_data.values()))
    prices = []
    for plans in by_data.values():
        drawn = None if space.search == "grid" else round(space.trials * len(plans) / looked_at)
        asked = (tasks(plans[0]), resources, ledger)
        prices.append(price(plans, *asked, trials=drawn, seeds=space.seeds))
    return prices


def price_lines(
    space: SearchSpace, options: RayOptions, ledger: Ledger, tasks: "TaskOnce"
) -> list[str]:
    prices = price_of(space, options, ledger, tasks)
    return [
        (f"{each.task}: " if len(prices) > 1 else "") + line
        for each in prices
        for line in each.lines
    ]


class TaskOnce:
    """Reads each data set once, for a price and for the trials."""

    def __init__(self) -> None:
        self._tasks: dict[object, Task] = {}

    def __call__(self, plan: Plan) -> Task:
        key = data_key(plan)
        if key not in self._tasks:
            self._tasks[key] = load_task(plan)
        return self._tasks[key]


def run_sweep(space: SearchSpace, runner: Runner) -> None:
    """Run what is left of a sweep. Nothing is started for one that is finished, or wrong."""
    if space.search not in SEARCHERS:
        trials = plan_trials(space, runner)
        scheduler = make_scheduler(space, runner.storage)
        runner.run(trials, varied=space.varied, scheduler=scheduler)
        return
    from dpfp_ray.sweeps.search import OptunaSearch

    bind_trial(space.plan_values(first_choice(space)), runner.inputs_of)  # a wrong space fails now
    plans = input_variants(space, runner.inputs_of)
    searcher = OptunaSearch(
        space,
        runner.storage,
        bind=lambda chosen: bind_trial(space.plan_values(chosen), runner.inputs_of),
        refuse=lambda chosen, error: refuse(space, runner.storage, chosen, error),
    )
    scheduler = make_scheduler(space, runner.storage)
    runner.search(searcher, plans, varied=space.varied, scheduler=scheduler)


def plan_trials(space: SearchSpace, runner: Runner) -> list[Trial]:
    """All trials of a grid or a random search, calibrated; what cannot meet the budget is refused.

    Repetition by repetition, so that a sweep which is stopped has treated all points alike.
    """
    # Random search must draw the same trials when it is resumed; what it draws is public.
    points = list(space.choices(keyed_generator(PUBLIC_SEED, f"search {space.name}", 0)))
    trials: dict[str, Trial] = {}
    for index in range(space.seeds):
        for point in list(points):
            try:
                trial = bind_trial(space.plan_values(point), runner.inputs_of, index)
            except UserError as error:
                refuse(space, runner.storage, point, error)
                points.remove(point)
            else:
                trials[trial.id] = trial
    if not trials:
        raise UserError("every trial of this space was refused; see the reasons above")
    return list(trials.values())


def input_variants(space: SearchSpace, inputs_of: Callable[[Plan], Inputs]) -> list[Plan]:
    """Plans that between them need all data and models which the space's trials may need."""
    points = [first_choice(space)]
    for parameter in space.parameters:
        if parameter.grouped or parameter.name in ("method", "mode", *INPUT_FIELDS):
            if not parameter.values:
                raise UserError(
                    f"{parameter.name} is a distribution; with method: {space.search} give it "
                    "{values: …}, "
                    "because what trials load is prepared before the first of them"
                )
            points = [{**point, parameter.name: v} for point in points for v in parameter.values]
    plans = []
    for point in points:
        with suppress(UserError):  # no plan, or none for these data: such a trial is refused
            plan = with_precision(make_plan(space.plan_values(point)))
            names = possible_representations(plan, inputs_of(plan).paired)
            plans += [replace(plan, representation=name) for name in names]
    return plans


def first_choice(space: SearchSpace) -> dict[str, Any]:
    return space.draw(keyed_generator(PUBLIC_SEED, "first", 0))


def make_scheduler(space: SearchSpace, storage: str) -> "TrialScheduler | None":
    """A scheduler that was told what the trials of an interrupted sweep had reached; or None."""
    if space.scheduler == "none":
        return None
    from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

    from dpfp_ray.sweeps.experiment import trial_metrics

    metric, mode = space.metrics[0]
    options: dict[str, Any] = {"time_attr": "epoch", "metric": metric, "mode": mode}
    scheduler: TrialScheduler
    if space.scheduler == "median":
        scheduler = MedianStoppingRule(**options, grace_period=1, min_samples_required=3)
    else:  # Hyperband's brackets differ in how early a poor trial is stopped
        brackets = 3 if space.scheduler == "hyperband" else 1
        scheduler = ASHAScheduler(**options, max_t=NO_EPOCH_LIMIT, brackets=brackets)
    controller: Any = None
    for record in Store(storage).records():
        if record["trial"].get("status") not in SETTLED or not record.get("history"):
            continue
        trial: Any = SimpleNamespace(trial_id=record["trial"]["id"])
        scheduler.on_trial_add(controller, trial)
        for end in range(1, len(record["history"]) + 1):
            history = record["history"][:end]
            result = trial_metrics({**record, "history": history, "metrics": quote(history)})
            scheduler.on_trial_result(controller, trial, result)
    return scheduler


def refuse(space: SearchSpace, storage: str, chosen: dict[str, Any], error: Exception) -> None:
    """Say why a trial is not run, and keep it on record."""
    settings = ", ".join(f"{name} {value}" for name, value in chosen.items())
    stderr.print(f"refused: {settings}: {error}", markup=False)
    values = space.plan_values(chosen)
    mark = blake2b(repr([space.name, sorted(values.items())]).encode(), digest_size=6).hexdigest()
    trial = {"id": f"refused-{mark}", "sweep": space.name, "status": "refused", "error": str(error)}
    Store(storage).put(make_record(plan=fitting_fields(values), trial=trial))
