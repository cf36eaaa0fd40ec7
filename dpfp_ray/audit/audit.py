"""Measure what a trained model leaks, and hold it against the stated ε (see docs/auditing.md)."""

from pathlib import Path
from typing import Any

from dpfp_ray.audit import audited_run
from dpfp_ray.data import Task
from dpfp_ray.data.memory import in_memory
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.signals import Interrupted
from dpfp_ray.privacy.ledger import Ledger, open_ledger
from dpfp_ray.training import run_folder
from dpfp_ray.training.charged import charged, enter_past, register
from dpfp_ray.training.checkpoints import save_seconds
from dpfp_ray.training.console import Keeper, choose_display
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.train import TrainedRun, refuse_other_data


class AuditedRun(TrainedRun):
    """A run with canaries in its data. Its model is not kept: it is no release."""

    @property
    def audit(self) -> dict[str, Any]:
        """The bound, what it rests on, and what was stated."""
        return dict(self.record["audit"])

    @property
    def epsilon_at_least(self) -> float:
        """What the right guesses prove about ε, at the audit's confidence."""
        return float(self.audit["epsilon"])

    @property
    def outcome(self) -> str:
        """refuted: the stated ε is wrong; consistent: this audit found no contradiction."""
        return str(self.audit["verdict"])

    def __repr__(self) -> str:
        stated = self.audit["stated_epsilon"]
        against = "" if stated is None else f" against {stated:g} stated"
        return (
            f"<audit of {self.plan['method']} on {self.plan['task']}: "
            f"ε ≥ {self.epsilon_at_least:.3f}{against}, {self.outcome}, in {self.folder}>"
        )


def audit(
    plan: Plan,
    *,
    output: str | Path,
    canaries: int = 1000,
    family: str | None = None,
    access: str = "white_box",
    confidence: float = 0.95,
    data: Any = None,
    dev: Any = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    users: Any = None,
    seed: int | None = None,
    membership_seed: int | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    reporter: str = "auto",
    save_every: float | None = None,
    show_training_loss: bool = False,
    ledger: str | Path | Ledger | None = None,
    total_epsilon: float | None = None,
    total_delta: float | None = None,
) -> AuditedRun:
    """Train once with canaries by the ordinary loop, and guess which of them were in.

    canaries    how many records' places they take; each is in or out by a fair coin
    family      kind of canary: mislabelled or unused_token (default: the method's most telling)
    access      what the auditor sees: black_box, the model's outputs, or white_box, all that is
                released
    confidence  of the bound

    Everything else is as in `train`. Stopped, the same call continues.
    """
    display = choose_display(reporter)
    settings = audited_run.Settings(canaries, family, access, confidence)
    save_every = save_seconds(save_every)
    use_threads(threads)
    book = open_ledger(ledger, total_epsilon, total_delta)
    folder = run_folder.make_folder(output)
    task: Task | None = None
    if data is not None:
        plan, task = in_memory(plan, data, dev=dev, text=text, pair=pair, label=label, users=users)
    seeds = {"seed": seed, "membership_seed": membership_seed}

    try:
        with run_folder.held(folder, overwrite):
            if overwrite:
                audited_run.discard(folder)
            opened = audited_run.open_audit(
                folder, plan, settings, seeds, task, display.say, show_training_loss
            )
            run, inputs = opened.run, opened.run.prepared.inputs
            if opened.record is not None:
                enter_past(book, opened.record, register(book, inputs))
                return AuditedRun(opened.record, folder)
            mark = None if task is None else run_folder.data_mark(inputs.data, None, run.seed)
            if run.state is not None:
                refuse_other_data(run.state, mark, folder)
            where = str(folder.resolve())
            keeper = Keeper(run, display, opened.scratch, save_every, mark)
            with (
                charged(book, run, where=where, resumed=opened.begun, purpose="audit") as charge,
                display(run, f"audit {plan.method}") as shown,
                keeper.on_signals(),
            ):
                for event in opened.events():
                    charge.count(event)
                    shown.show(event)
                    keeper.follow(event)
                    if isinstance(event, audited_run.Audited):
                        audited = event
            return AuditedRun(opened.finish(audited, charge.entry_id), folder)
    except Interrupted as stop:
        text = f"stopped; saved in {folder}. The same command continues it."
        raise Interrupted(text, stop.number) from None
