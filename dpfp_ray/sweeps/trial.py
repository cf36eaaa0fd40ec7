"""One trial as data: its plan, repetition and seed; and the last record of one without a result."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import derived_seed
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.state import SweepState
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.record import Record, make_record

# States of a record that need not be run again.
SETTLED = ("finished", "stopped", "refused", "failed")
# How often a trial is restarted when its process or node dies; its own errors are not retried.
RETRIES = 5


@dataclass(frozen=True)
class Trial:
    """A bound, calibrated plan and the number of its repetition (`seed_index`).

    `name` is for draws of a selection, which have nothing else that tells equal ones apart. `entry`
    is that of the ledger, once the trial is charged for.
    """

    plan: Plan
    noise_multiplier: float
    seed_index: int = 0
    group: str = ""
    name: str = ""
    entry: str = ""

    @property
    def id(self) -> str:
        """The same for the same trial of the same sweep, whenever and wherever it runs."""
        if self.name:
            return self.name
        return f"{self.group + '-' if self.group else ''}{self.plan.hash}-{self.seed_index}"

    def seed(self, sweep_seed: int) -> int:
        """Secret like the sweep's; independent of the order in which trials happen to run.

        Trials on one release share a seed, so that it is the same release and is paid once; its
        key (`release_id`) keeps other releases apart. Trials with a name are always independent.
        """
        if self.plan.one_release and not self.name:
            return derived_seed(sweep_seed, f"release {self.seed_index}")
        return derived_seed(sweep_seed, f"trial {self.id}")

    def to_config(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "plan": self.plan.to_dict()}

    @staticmethod
    def from_config(config: dict[str, Any]) -> "Trial":
        values = dict(config["plan"])
        if values.get("labels") is not None:
            values["labels"] = tuple(values["labels"])  # JSON and YAML know no tuples
        return Trial(**{**config, "plan": Plan(**values)})


def settle(
    storage: str, trial: Trial, status: str, reason: str, facts: dict[str, Any] | None = None
) -> Record:
    """Give a trial that has no result its last record, unless it has one by now.

    The epochs that it did before, and what they spent, stay on record.
    """
    store = Store(storage)
    start = {"id": trial.id, "seed_index": trial.seed_index, "group": trial.group}
    entry = {"ledger_entry": trial.entry} if trial.entry else {}
    record = store.get(trial.id) or make_record(
        plan=trial.plan.to_dict(), plan_hash=trial.plan.hash, trial={**start, **entry}
    )
    if record["trial"].get("status") in SETTLED:
        return record
    settled: Any = {**record["trial"], **(facts or {}), "status": status, "error": reason}
    record["trial"] = settled
    store.put(record)
    SweepState(storage).drop_trial(trial.id)
    return record


def drawn_before_failure(storage: str, trial: Trial) -> dict[str, int]:
    """Facts for `settle` of a trial that failed without a count: no step if no process of it drew.

    Empty where one did: the trial is then charged for all that was planned.
    """
    if SweepState(storage).has_drawn(trial.id) or Store(storage).get(trial.id):
        return {}
    return {"steps_drawn": 0}


def unfinished(trials: list[Trial], storage: str) -> list[Trial]:
    """Those of `trials` that have no final record yet."""
    facts = [record["trial"] for record in Store(storage).records()]
    settled = {trial["id"] for trial in facts if trial.get("status") in SETTLED}
    return [trial for trial in trials if trial.id not in settled]


def mark_interrupted(storage: str) -> None:
    """Nothing runs any more: trials that ran are "interrupted" until the same command continues."""
    store = Store(storage)
    for record in store.records():
        if record["trial"].get("status") == "running":
            record["trial"]["status"] = "interrupted"
            store.put(record)


def has_restarts_left(trial: Any) -> bool:
    """Whether Tune ended a trial before its restarts were used; the runner then runs it again.

    Tune does so if the process dies while the trial before hands it over.
    """
    return bool(trial.num_failures <= RETRIES)


def given_up(trial: Any) -> str:
    """The last reason of a trial that was restarted as often as is allowed."""
    return f"given up after restarts: {last_error(trial)}"


def last_error(trial: Any) -> str:
    """What ended the process of one of Tune's trials, on one line."""
    text = str(trial.get_error() or "").strip()
    if not text or "actor died" in text:
        return "its process died (killed, or out of memory)"
    return text.splitlines()[-1][-300:]


def error_reason(error: Exception) -> str:
    """An error on one line; of one that is not meant for users, also its type."""
    text, kind = " ".join(str(error).split())[:500], type(error).__name__
    if isinstance(error, UserError):
        return text
    return f"{kind}: {text}" if text else kind
