"""Explore any plan fields under one privacy budget, on Ray. Stopped or killed, the same call
continues and repeats no finished trial.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from dpfp_ray.privacy.ledger import Ledger, open_ledger
from dpfp_ray.privacy.ledger_entries import Spent
from dpfp_ray.privacy.selection import check_search, parse_selection
from dpfp_ray.privacy.statement import brief
from dpfp_ray.results.query import sort_rows
from dpfp_ray.results.rows import Row, flatten
from dpfp_ray.results.store import Store, as_frame
from dpfp_ray.sweeps.resources import RayChoices, ray_options
from dpfp_ray.sweeps.row_work import hands_of
from dpfp_ray.sweeps.runner import Runner
from dpfp_ray.sweeps.search_space import SearchSpace
from dpfp_ray.sweeps.selection import run_selection
from dpfp_ray.sweeps.selection_cost import SelectionCost
from dpfp_ray.sweeps.space_files import read_search_space
from dpfp_ray.sweeps.state import resolve_storage
from dpfp_ray.sweeps.sweep_trials import InputsOnce, run_sweep
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import Interrupted, signal_of
from dpfp_ray.training.prepare import load_inputs
from dpfp_ray.training.record import Record

if TYPE_CHECKING:
    import pandas


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
        chosen = self.rows[0]["id"] if self.records else None
        return next((r for r in self.records if flatten(r)["id"] == chosen), None)

    @property
    def statement(self) -> str:
        """What may be said about the best trial's privacy."""
        best = self.best
        return brief(best["statement"]) if best and best["statement"] else ""

    def to_pandas(self) -> "pandas.DataFrame":
        return as_frame(self.rows)

    def __repr__(self) -> str:
        return f"<sweep {self.space.name}: {len(self.records)} trials in {self.storage}>"


def sweep(
    space: str | Path | SearchSpace,
    *,
    storage: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
    samples: int | None = None,
    selection: str | None = None,
    encoder: None = None,
    ledger: str | Path | Ledger | None = None,
    total_epsilon: float | None = None,
    total_delta: float | None = None,
    **ray: Unpack[RayChoices],
) -> FinishedSweep:
    """Run all trials of a search space, each calibrated to the same budget before it starts.

    space      a YAML file (see search_spaces/), or one that was read
    storage    folder or URI of the results (default: runs/NAME of the space)
    changes    keys of the space to change, or plan fields to fix
    samples    how many trials (random, tpe)
    selection  what releasing the best trial is charged as: composition (default) counts every
               trial; logarithmic:N, geometric:N, poisson:N draw their number at random, N
               expected, keep it and all trials but the best secret, and release that one
    ledger, total_epsilon, total_delta   as in `train`; a list of trials is entered as a whole
               before the first one starts, what a searcher proposes when it proposes it
    """
    refuse_encoder(encoder)
    if not isinstance(space, SearchSpace):
        given = {**(changes or {}), **({} if samples is None else {"samples": samples})}
        space = read_search_space(space, {key: as_text(value) for key, value in given.items()})
    elif changes:
        raise UserError("changes are for a space in a file; change this one itself")
    elif samples is not None:
        space = dataclasses.replace(space, samples=samples)
    place = resolve_storage(str(storage or f"runs/{space.name}"))
    options = ray_options(ray)
    inputs_of = InputsOnce(partial(load_inputs, hands=hands_of(options)))
    book = open_ledger(ledger, total_epsilon, total_delta)
    if selection:
        chosen = parse_selection(selection)
        check_search(chosen, space.search, space.scheduler)
        if chosen.repeats:
            return FinishedSweep(
                place, space, *run_selection(space, chosen, place, options, inputs_of, book)
            )
    try:
        with Runner(space.name, place, options, inputs_of, book) as runner:
            run_sweep(space, runner)
    except KeyboardInterrupt as stop:
        raise stopped(place, stop) from None
    return FinishedSweep(place, space, close(place), runner.charges.spent())


def close(storage: str) -> list[Record]:
    """Write the table beside the records."""
    store = Store(storage)
    store.export()
    return store.records()


def stopped(storage: str, stop: KeyboardInterrupt) -> Interrupted:
    text = f"stopped; what is finished is in {storage}. The same command continues."
    return Interrupted(text, signal_of(stop))


def refuse_encoder(encoder: Any) -> None:
    if encoder is not None:
        raise UserError(
            f"encoder is a {type(encoder).__name__} in memory, which other machines do not have; "
            f"save it to a folder with save_pretrained and give that as model"
        )


def as_text(value: Any) -> str:
    """As it would stand after `--set KEY=`."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
