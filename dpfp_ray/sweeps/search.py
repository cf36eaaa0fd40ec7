"""Optuna's samplers behind Tune's interface: a trial is proposed when another one ends.

Every proposal is a valid plan on budget before Tune gets it. The proposals are on storage; what
came of them is in the trials' records, and nowhere else. Proposal number k is a function of k and
of the records that were there when it was made, so a continued sweep goes on as if never stopped.
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
from dpfp_ray.sweeps.experiment import trial_metrics
from dpfp_ray.sweeps.space import SearchSpace
from dpfp_ray.sweeps.trial import SETTLED, SweepState, Trial
from dpfp_ray.system.errors import UserError

# A small space has few distinct trials; after so many repeats in a row there are no new ones.
REPEATS = 50
DIRECTIONS = {"max": StudyDirection.MAXIMIZE, "min": StudyDirection.MINIMIZE}
Proposal = dict[str, Any]  # params (Optuna's), id (the trial's; None if it was refused)

logging.getLogger("optuna").setLevel(logging.ERROR)


class OptunaSearch(Searcher):
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
        self.files, self.store = SweepState(storage), Store(storage)
        self.directions = [DIRECTIONS[mode] for mode in modes]
        self.distributions = dict(p.for_optuna() for p in space.parameters)
        # Charges for a trial before it starts; a UserError ends the search.
        self.admit: Callable[[Trial], Trial] = lambda trial: trial
        self.refused: UserError | None = None
        self.exhausted = False  # the space has no trial that was not proposed
        self._settled: dict[str, list[float]] = {}  # the scores of trials with a final record
        self.read()

    def read(self) -> None:
        """Take up the proposals on storage; those without a final record wait to be run."""
        self.proposals = self.files.load_search(self.space.key)
        self.waiting = [proposal for proposal in self.proposals if self.scores(proposal) is None]

    @property
    def left(self) -> int:
        """Trials still to run, proposed or not."""
        new = 0 if self.exhausted else max(0, self.space.samples - self.possible)
        return new + len(self.waiting)

    @property
    def possible(self) -> int:
        """Proposals that could be run. The others cost no sample."""
        return sum(proposal["id"] is not None for proposal in self.proposals)

    def scores(self, proposal: Proposal) -> list[float] | None:
        """A trial's metrics by its final record: none if it has no score; None while it is open."""
        identity = proposal["id"]
        if identity is None:
            return []
        if identity not in self._settled:
            record = self.store.get(identity)
            if not record or record["trial"]["status"] not in SETTLED:
                return None
            metrics = trial_metrics(record)
            values: list[Any] = [metrics.get(name) for name, _ in self.space.metrics]
            if metrics["status"] == "failed" or None in values:
                values = []
            self._settled[identity] = values
        return self._settled[identity]

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        trial = self.bind(self._chosen(self.waiting.pop(0))) if self.waiting else self._propose()
        try:
            if trial is not None:
                return {"trial": self.admit(trial).to_config()}
        except UserError as error:  # the proposal stays open, for a call with a larger total
            self.refused = error
        return Searcher.FINISHED  # type: ignore[return-value]

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Nothing to note: the trial's record says how it ended."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing for Tune to keep: the memory is on storage already."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles a searcher to restore it; this one restores itself

    def _propose(self) -> Trial | None:
        for repeat in range(REPEATS):
            if self.possible >= self.space.samples:
                return None
            seed = len(self.proposals) * REPEATS + repeat
            proposal: Proposal = {"params": self._ask(seed), "id": None}
            try:
                trial = self.bind(self._chosen(proposal))
            except UserError as error:
                self.refuse(self._chosen(proposal), error)
                self._add(proposal)
                continue
            if all(earlier["id"] != trial.id for earlier in self.proposals):
                self._add({**proposal, "id": trial.id})
                return trial
        self.exhausted = True
        return None

    def _ask(self, seed: int) -> dict[str, Any]:
        """What the sampler would try next. Trials that are still running count as poor ones, so
        that those side by side differ. What cannot run counts as the worst that was seen; trials
        that failed teach nothing."""
        study = optuna.create_study(directions=self.directions)
        settled_scores = [scores for p in self.proposals if (scores := self.scores(p))]
        worst = [
            (min if mode == "max" else max)(values)
            for (_, mode), values in zip(
                self.space.metrics, zip(*settled_scores, strict=True), strict=False
            )
        ]
        for proposal in self.proposals:
            scores = worst if proposal["id"] is None else self.scores(proposal)
            if scores != []:
                study.add_trial(
                    optuna.trial.create_trial(
                        params=proposal["params"],
                        distributions=self.distributions,
                        values=scores,
                        state=TrialState.RUNNING if scores is None else TrialState.COMPLETE,
                    )
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = self._sampler(seed)
        return dict(study.ask(self.distributions).params)

    def _sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        first = min(10, max(3, self.space.samples // 3))  # random ones, to learn from
        if self.space.search == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=first)
        if self.space.search == "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed, n_startup_trials=first)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=first, constant_liar=True)

    def _chosen(self, proposal: Proposal) -> dict[str, Any]:
        return {p.name: p.from_optuna(proposal["params"]) for p in self.space.parameters}

    def _add(self, proposal: Proposal) -> None:
        self.proposals.append(proposal)
        self.files.save_search(self.space.key, self.proposals)
