"""Audits of many plans on Ray, one task each: what `dpfp compare --audit` does.

An audited run has canaries in its data, so it is a run of its own, never a row's own result. Its
record goes into the same store under the id audit-PLAN, and its outcome stands beside the row.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpfp_ray.auditing.audit import Audited, Settings, audit_events, open_audit, power_warning
from dpfp_ray.data import Task
from dpfp_ray.plan.plan import Plan
from dpfp_ray.results.runs import label
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.charges import AUDIT, audit_seeds
from dpfp_ray.sweeps.cluster import connected, settings
from dpfp_ray.sweeps.driver import Runner
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.system.terminal import stderr
from dpfp_ray.training.loop import Step
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.record import Record
from dpfp_ray.training.run_folder import Saver, make_folder, save_state


def audits_of(trials: Iterable[Trial]) -> dict[str, Trial]:
    """An audit of each distinct plan among `trials`, by its id."""
    made = {trial.plan.hash: replace(trial, seed_index=0, group=AUDIT) for trial in trials}
    return {audit_id(audit): audit for audit in made.values()}


def audit_id(audit: Trial) -> str:
    return f"audit-{audit.plan.hash}"


def audits_left(trials: Iterable[Trial], storage: str) -> list[Trial]:
    """Those audits that have no record in the store."""
    store = Store(storage)
    audits = audits_of(trials).items()
    return [audit for name, audit in audits if store.get(name) is None]


def audit_trials(
    trials: Iterable[Trial], runner: Runner, canaries: int | None, data: Task | None = None
) -> list[Record]:
    """Audit each distinct plan among `trials` once; those with a record in the store are done.

    `canaries` None: no audit was asked for. `data` are the records, if no worker can load them.
    The runner has entered what is left in its ledger.
    """
    if canaries is None:
        return []
    storage, options, store = runner.storage, runner.options, Store(runner.storage)
    audits = audits_of(trials)
    left = {audit_id(audit): audit for audit in audits_left(audits.values(), storage)}
    done_before = {name: store.get(name) for name in audits if name not in left}
    found = {name: record for name, record in done_before.items() if record is not None}
    if left:
        with settings(), connected(options.address):
            import ray

            runner.check_storage()  # the trials may have been finished before
            task = ray.remote(max_retries=3)(audit_task).options(
                num_cpus=options.cpus_per_worker or 1, num_gpus=options.gpus_per_worker
            )
            running = {
                task.remote(
                    audit.plan,
                    settings_for(audit.plan, canaries),
                    audit_folder(storage, name),
                    options.cpus_per_worker or 1,
                    data,
                    dict(audit_seeds(audit.id, runner.seed)),
                    options.save_every_seconds,
                ): name
                for name, audit in left.items()
            }
            while running:
                (done, *_), _ = ray.wait(list(running))
                name = running.pop(done)
                record: Record = ray.get(done)
                entry = runner.charges.begun[left[name].id]
                record["trial"] = {
                    "id": name,
                    "group": AUDIT,
                    "status": "finished",
                    "ledger_entry": entry,
                }
                store.put(record)
                runner.charges.ledger.end(entry, left[name].plan.steps)
                found[name] = record
                say(record)
    return [found[name] for name in audits]


def settings_for(plan: Plan, canaries: int) -> Settings:
    return Settings(min(canaries, plan.D // 2))


def say_powerless(trials: Iterable[Trial], canaries: int | None) -> None:
    """Before anything is trained: which of the audits can refute nothing, and what would do."""
    for trial in audits_of(trials).values() if canaries is not None else ():
        warning = power_warning(trial.plan, settings_for(trial.plan, canaries or 0))
        if warning is not None:
            name = label(trial.plan.to_dict())
            stderr.print(f"warning: audit of {name}: {warning}", markup=False)


def say(record: Record) -> None:
    audit, budget = record["audit"], record["plan"]["epsilon"]
    name = label(record["plan"]) + ("" if budget is None else f" at ε = {budget:g}")
    stderr.print(
        f"audit of {name}: {audit['correct']} of {audit['guesses']} guesses right, "
        f"ε ≥ {audit['epsilon']:.2f}: {audit['verdict']}",
        markup=False,
    )


def with_outcomes(rows: list[dict[str, Any]], audits: Iterable[Record]) -> list[dict[str, Any]]:
    """The rows of a comparison, each with the bound and the outcome of its method's audit."""
    known = {(label(a["plan"]), a["plan"]["epsilon"]): a["audit"] for a in audits}
    for row in rows:
        audit = known.get((row["method"], row["epsilon"]))
        if audit is not None:
            row |= {
                "audit_epsilon": audit["epsilon"],
                "audit_ceiling": audit["ceiling"],
                "verdict": audit["verdict"],
            }
    return rows


def write_outcomes(store: Store, audits: Iterable[Record]) -> None:
    """Into the statement of every run of an audited plan."""
    known = {audit["plan_hash"]: audit["audit"] for audit in audits}
    for record in store.records():
        audit = known.get(record["plan_hash"])
        if audit is not None and record["statement"] and not record["audit"]:
            record["statement"]["audit"] = audit
            store.put(record)


def audit_folder(storage: str, name: str) -> str | None:
    """Beside the store, where a killed audit is found again; None if the store is remote."""
    return None if "://" in storage else str(Path(storage) / "audits" / name)


def audit_task(
    plan: Plan,
    wanted: Settings,
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
