"""The driver's side of the ledger: every trial and audit of a sweep or a comparison.

A list that is known beforehand (grid, random search, comparison with its audits) is entered as a
whole before its first trial starts; what a searcher proposes is entered when it is proposed. What a
trial really did is on record in the store, and from there its entry is ended: here, or by the next
call if this one is killed. A scheduler that stops trials early does not undo a list: its
mechanisms were fixed, and its sum counts all that was planned.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from dpfp_ray.plan.plan import DATA_FIELDS, Plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_entries import Spent, Use
from dpfp_ray.privacy.sampling import derived_seed
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.trial import SETTLED, Trial
from dpfp_ray.training.charged import (
    enter_past,
    register,
    steps_done,
    use_for,
)
from dpfp_ray.training.prepare import Inputs, Prepared
from dpfp_ray.training.record import entry_of, plan_of, status_of
from dpfp_ray.training.run_folder import data_mark

AUDIT = "audit"  # the group of trials that are audits


class Charges:
    """What the trials of one store cost, in one ledger."""

    def __init__(
        self,
        ledger: Ledger,
        storage: str,
        inputs_of: Callable[[Plan], Inputs],
        loss_shown: bool = False,
    ) -> None:
        self.ledger = ledger
        self.loss_shown = loss_shown
        self.storage = storage
        self.inputs_of = inputs_of
        self.begun: dict[str, str] = {}  # trial or audit → its entry
        self.shown: Spent | None = None  # of the people who have paid most, for the gauge
        self._people: dict[tuple[object, ...], str] = {}
        self._marks: dict[int, str] = {}

    def people(self, plan: Plan) -> str:
        """The data set of a plan, registered when it is first met."""
        key = _data_key(plan)
        if key not in self._people:
            self._people[key] = register(self.ledger, self.inputs_of(plan))
        return self._people[key]

    def begin(
        self, trials: Sequence[Trial], seed: int, fixed_list: str | None = None
    ) -> list[Trial]:
        """Enter `trials`, or none if they would pass the total; each with the name of its entry.

        `seed` is the sweep's. A trial in the group `audit` is an audit of its plan.
        """
        uses = [self._use(trial, seed, fixed_list) for trial in trials]
        # A new driver resumes the entries that an earlier driver left open.
        entries = self.ledger.begin_all(uses, resumed=True)
        self.begun |= {trial.id: entry.id for trial, entry in zip(trials, entries, strict=True)}
        self._look()
        return [replace(trial, entry=self.begun[trial.id]) for trial in trials]

    def name_list(self, trials: Iterable[Trial], seed: int) -> str:
        """The same for the same list of the same sweep, so that a killed one stays one list."""
        text = " ".join([self.ledger.mark(seed), *(trial.id for trial in trials)])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def settle(self) -> None:
        """End the entries of all trials whose last record is in the store.

        Those on our people's records that this ledger does not know are entered, too: without them
        its sum would say less than was done.
        """
        known = {entry.id: entry for entry in self.ledger.entries()}
        for record in Store(self.storage).records():
            trial = record["trial"]
            if trial.get("status") not in SETTLED or trial["status"] == "refused":
                continue
            # A record speaks for the run that made it, which may be another driver's.
            name = entry_of(record) or self.begun.get(trial["id"])
            entry = known.get(name or "")
            if entry is not None:
                done = steps_done(record, entry.use.steps)
                # Another driver may have closed this entry while we continued the trial.
                if entry.done is None or done > entry.done:
                    self.ledger.end(entry.id, done, status_of(record))
            else:
                people = self._people.get(_data_key(plan_of(record)))
                if people is not None:
                    enter_past(self.ledger, record, people, set(known))
        self._look()

    def spent(self) -> list[Spent]:
        """What each group of people whose records were met here has paid for everything."""
        found: list[Spent] = []
        for people in self._people.values():
            if all(people not in one.data_sets for one in found):
                found.append(self.ledger.spent(people))
        return found

    def _look(self) -> None:
        if self.ledger.total() is not None:  # without one a sum may take seconds; the end has it
            self.shown = max(self.spent(), key=lambda one: one.private_epsilon, default=None)

    def _use(self, trial: Trial, seed: int, fixed_list: str | None) -> Use:
        audit = trial.group == AUDIT
        inputs = self.inputs_of(trial.plan)
        if id(inputs) not in self._marks:
            self._marks[id(inputs)] = data_mark(inputs.data, None, seed)
        own_seed = audit_seeds(trial.id, seed)["seed"] if audit else trial.seed(seed)
        return use_for(
            Prepared(trial.plan, inputs, trial.noise_multiplier),
            people=self.people(trial.plan),
            run=f"{self.storage} {trial.id} {self.ledger.mark(seed)} {self._marks[id(inputs)]}",
            seed=own_seed,
            purpose="audit" if audit else "trial",
            fixed_list=fixed_list,
            loss_shown=self.loss_shown and not audit,
        )


def audit_seeds(name: str, sweep_seed: int) -> Mapping[str, int]:
    """Seeds for an audit's noise and for its canaries' coin flips."""
    return {
        "seed": derived_seed(sweep_seed, f"audit {name}"),
        "membership_seed": derived_seed(sweep_seed, f"coins of audit {name}"),
    }


def _data_key(plan: Plan) -> tuple[object, ...]:
    values = (getattr(plan, name) for name in DATA_FIELDS)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)
