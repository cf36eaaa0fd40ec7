"""TPE by Optuna behind Tune's interface, with a memory on storage.

Every proposal is a valid plan on budget before Tune gets it. Proposal number k is a function of
k and of what was known when it was made, so a sweep that is continued goes on as if never stopped.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState
from ray.tune.search import Searcher

from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.search_space import SearchSpace
from dpfp_ray.sweeps.state import SweepState
from dpfp_ray.sweeps.trial import SETTLED, Trial
from dpfp_ray.sweeps.trial_process import trial_metrics
from dpfp_ray.system.errors import UserError

# A small space has few distinct trials; after so many repeats in a row there are no new ones.
REPEATS = 50
DIRECTIONS = {"max": StudyDirection.MAXIMIZE, "min": StudyDirection.MINIMIZE}
STATES = {"running": TrialState.RUNNING, "complete": TrialState.COMPLETE}
Proposal = dict[str, Any]  # params (Optuna's), id (the trial's), state, values (the metrics)

logging.getLogger("optuna").setLevel(logging.ERROR)


class Tpe(Searcher):
    """`bind` makes a trial of chosen values, or raises a UserError that `refuse` records."""

    def __init__(
        self,
        space: SearchSpace,
        storage: str,
        bind: Callable[[dict[str, Any]], Trial],
        refuse: Callable[[dict[str, Any], UserError], None],
    ) -> None:
        names, modes = zip(*space.metrics, strict=True)
        super().__init__(metric=names[0], mode=modes[0])
        self.space = space
        self.bind = bind
        self.refuse = refuse
        self.files = SweepState(storage)
        self.directions = [DIRECTIONS[mode] for mode in modes]
        self.distributions = dict(p.for_optuna() for p in space.parameters)
        # Charges for a trial before it starts; a UserError ends the search.
        self.admit: Callable[[Trial], Trial] = lambda trial: trial
        self.refused: UserError | None = None
        self.exhausted = False  # the space has no trial that was not proposed
        self.running: dict[str, Proposal] = {}  # by Tune's id
        self.store = Store(storage)
        self.read()

    def read(self) -> None:
        """What is on storage by now."""
        self.proposals = self.files.load_search(self.space.key)
        for proposal in self.proposals:
            if proposal["id"] is None or proposal["state"] == "complete":
                continue
            record = self.store.get(proposal["id"])
            if record and record["trial"]["status"] in SETTLED:
                # The trial has ended after the sweep was killed.
                self._settle(proposal, trial_metrics(record))
            else:
                proposal["state"] = "running"  # also one that a full disk has ended
        self.waiting = self._open()

    @property
    def left(self) -> int:
        """Trials still to run, proposed or not."""
        new = 0 if self.exhausted else max(0, self.space.samples - len(self.proposals))
        return new + len(self.waiting)

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        if self.waiting:
            proposal = self.waiting.pop(0)
            trial = self.bind(self._chosen(proposal))
        else:
            found = self._propose()
            if found is None:
                return Searcher.FINISHED  # type: ignore[return-value]
            proposal, trial = found
        try:
            trial = self.admit(trial)
        except UserError as error:  # the proposal stays open, for a call with a larger total
            self.refused = error
            return Searcher.FINISHED  # type: ignore[return-value]
        self.running[trial_id] = proposal
        return {"trial": trial.to_config()}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        self._settle(self.running.pop(trial_id), {} if error else result or {})
        self._save()

    def save(self, checkpoint_path: str) -> None:
        """Nothing for Tune to keep: the memory is on storage already."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles a searcher to restore it; this one restores itself

    def _propose(self) -> tuple[Proposal, Trial] | None:
        for repeat in range(REPEATS):
            number = len(self.proposals)
            if number >= self.space.samples:
                return None
            params = self._ask(number * REPEATS + repeat)
            proposal: Proposal = {"params": params, "id": None, "state": "failed", "values": None}
            try:
                trial = self.bind(self._chosen(proposal))
            except UserError as error:
                self.refuse(self._chosen(proposal), error)
                self._add(proposal)
                continue
            if all(known["id"] != trial.id for known in self.proposals):
                self._add({**proposal, "id": trial.id, "state": "running"})
                return self.proposals[-1], trial
        self.exhausted = True
        return None

    def _ask(self, seed: int) -> dict[str, Any]:
        """What TPE would try next. Trials that are still running count as poor ones, so that those
        side by side differ."""
        study = optuna.create_study(directions=self.directions)
        for proposal in self.proposals:
            if proposal["state"] != "failed":
                study.add_trial(
                    optuna.trial.create_trial(
                        params=proposal["params"],
                        distributions=self.distributions,
                        values=proposal["values"],
                        state=STATES[proposal["state"]],
                    )
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = optuna.samplers.TPESampler(
                seed=seed,
                n_startup_trials=min(10, max(3, self.space.samples // 3)),
                constant_liar=True,
            )
        return dict(study.ask(self.distributions).params)

    def _open(self) -> list[Proposal]:
        return [proposal for proposal in self.proposals if proposal["state"] == "running"]

    def _chosen(self, proposal: Proposal) -> dict[str, Any]:
        return {p.name: p.from_optuna(proposal["params"]) for p in self.space.parameters}

    def _settle(self, proposal: Proposal, metrics: dict[str, Any]) -> None:
        """What the study learns of a trial; one without a score teaches nothing."""
        values = [metrics.get(name) for name, _ in self.space.metrics]
        scored = metrics.get("status") != "failed" and None not in values
        proposal |= {
            "state": "complete" if scored else "failed",
            "values": values if scored else None,
        }

    def _add(self, proposal: Proposal) -> None:
        self.proposals.append(proposal)
        self._save()

    def _save(self) -> None:
        self.files.save_search(self.space.key, self.proposals)
