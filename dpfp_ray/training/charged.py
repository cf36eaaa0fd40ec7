"""A run in the ledger: entered before its first step, ended after its last.

A run that fails is charged for the steps that it drew, the one that failed included: for none if it
failed before its first draw. A run that is stopped costs what it planned, until it is continued.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dpfp_ray.data import AllTexts
from dpfp_ray.methods.parts.one_release import release_id
from dpfp_ray.models.download import encoder_identity
from dpfp_ray.models.representations import CUSTOM, RepresentationTable
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_cost import part_from_json
from dpfp_ray.privacy.ledger_entries import Use, use_of
from dpfp_ray.training.loop import Drawing, Event, Step
from dpfp_ray.training.prepare import Inputs, Prepared, Run
from dpfp_ray.training.record import Record, entry_of, fingerprint, plan_of, status_of
from dpfp_ray.training.run_folder import data_mark


@dataclass
class Charge:
    """An open entry of the ledger. It counts the steps of its run."""

    entry_id: str
    done: int
    drawing: int = 0  # so many further steps may have been drawn before a failure

    def count(self, event: Event) -> None:
        if isinstance(event, Drawing):
            self.drawing = event.ahead
        if isinstance(event, Step):  # workers that start again tell of some steps twice
            self.done = max(self.done, event.done)


@contextmanager
def charged(
    ledger: Ledger,
    run: Run,
    *,
    where: str,
    resumed: bool = False,
    purpose: str = "train",
    mark: str | None = None,
) -> Iterator[Charge]:
    """Enter `run`, in the folder `where`; UserError if it would pass the ledger's total.

    `resumed` says that a run with this seed was begun here before, saved or not. `mark` is that of
    data in memory, if the caller has it already. The caller passes every event to `count`.
    """
    prepared, seed = run.prepared, run.seed
    use = use_for(
        prepared,
        people=register(ledger, prepared.inputs),
        # Equal names must mean equal numbers: the same seed on the same rows, labels included.
        run=f"{where} {ledger.mark(seed)} {mark or data_mark(prepared.data, None, seed)}",
        seed=seed,
        purpose=purpose,
        loss_shown=run.show_training_loss,
    )
    entry = ledger.begin(use, resumed=resumed)
    charge = Charge(entry.id, 0 if run.state is None else int(run.state["progress"]["step"]))
    try:
        yield charge
    except Exception:
        # If an earlier part of the run was killed, nobody knows how many steps it drew.
        drawn = use.steps if entry.resumes else charge.done + charge.drawing
        ledger.end(entry.id, min(use.steps, drawn), "failed")
        raise
    ledger.end(entry.id, use.steps)


def register(ledger: Ledger, inputs: Inputs) -> str:
    assert inputs.records is not None, "these inputs do not hold the records as they were read"
    return ledger.register(inputs.records.all_texts(), AllTexts(inputs.dev_records.values())).id


def use_for(
    prepared: Prepared,
    *,
    run: str,
    seed: int,
    purpose: str,
    **facts: Any,  # `people`, `fixed_list` and `loss_shown`, as for `use_of`
) -> Use:
    plan, noise, table = prepared.plan, prepared.noise_multiplier, prepared.data.train
    release = None
    # An audit's release has canaries in it, so it is one of its own whatever the seed is.
    if (
        plan.private_part.one_release
        and purpose != "audit"
        and isinstance(table, RepresentationTable)
    ):
        release = release_id(plan.private_part, noise, table, seed)
    if not isinstance(table, RepresentationTable) and not plan.model.startswith(CUSTOM):
        run += f" {encoder_identity(plan.model)}"  # a folder's weights may have changed
    return use_of(plan, noise, run=run, purpose=purpose, release=release, **facts)


def enter_past(ledger: Ledger, record: Record, people: str, paid: set[str] | None = None) -> None:
    """Enter a result that another ledger paid for, or none: these people have paid for it."""
    paid = {entry.id for entry in ledger.entries()} if paid is None else paid
    if entry_of(record) in paid:
        return
    plan, privacy, mark = plan_of(record), record["privacy"], fingerprint(record)
    use = use_of(
        plan,
        privacy.get("noise_multiplier") or noise_multiplier(plan),
        people=people,
        run=f"found {mark}",
        purpose="audit" if record["audit"] else "trial" if record["trial"] else "train",
        release=None if record["audit"] else privacy.get("release_id"),
        loss_shown=any(epoch["train_loss"] is not None for epoch in record["history"]),
    )
    use = replace(use, found=mark)
    if chosen := record["selection"]:  # the winner of a selection stands for the whole of it
        use = replace(use, steps=1, parts=(part_from_json(chosen["part"]),), release=None)
        ledger.enter_past(use, 1)
        return
    ledger.enter_past(use, steps_done(record, use.steps), status_of(record))


def steps_done(record: Record, planned: int) -> int:
    """Steps that a settled record stands for; all that were planned where it does not say.

    The record of a failed trial ends with its last epoch; `steps_drawn` says how far it got.
    """
    reported = record["privacy"].get("steps")
    if status_of(record) == "failed":
        drawn = record["trial"].get("steps_drawn")
        return planned if drawn is None else min(planned, max(drawn, reported or 0))
    return planned if reported is None else reported
