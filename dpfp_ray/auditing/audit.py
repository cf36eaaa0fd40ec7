"""The one-run audit: train once with canaries by the ordinary loop, guess who was in, and hold what
the guesses prove against what the plan states (see docs/auditing.md).

DIR/result.json   the ordinary result, and under `audit` the bound and the outcome
DIR/audit.json    the same `audit` and the two seeds, which repeat it to the bit; owner-only
DIR/unfinished/   resume.pt while it runs; not in DIR, where `dpfp train` would take it for its own

No weights are kept: a model that was trained on canaries, with seeds on record, is no release.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from dpfp_ray.auditing import scores as scoring
from dpfp_ray.auditing.canaries import (
    FAMILIES,
    Bools,
    Canaries,
    flip_coins,
    hide_empty,
    insert,
    make_canaries,
)
from dpfp_ray.auditing.outcome import AUDIT, SEEDS, audit_outcome, keep, read_begun, warning_of
from dpfp_ray.data import Table, Task
from dpfp_ray.data.tasks import in_memory, load_task
from dpfp_ray.data.tokens import PairTable, TokenTable
from dpfp_ray.models.pretrained import load_tokenizer
from dpfp_ray.models.representations import RepresentationTable, represent
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.ledger import Ledger, open_ledger
from dpfp_ray.privacy.sampling import fresh_seed, keyed_generator
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.signals import Interrupted
from dpfp_ray.system.terminal import waiting
from dpfp_ray.training import run_folder
from dpfp_ray.training.charged import charged, enter_past, register
from dpfp_ray.training.console import Keeper, choose_display
from dpfp_ray.training.loop import Event, Finished, Released
from dpfp_ray.training.machine import use_threads
from dpfp_ray.training.prepare import (
    Data,
    Prepared,
    Run,
    build_model,
    load_inputs,
    prepare,
    with_precision,
)
from dpfp_ray.training.record import Record
from dpfp_ray.training.run_folder import ask_for_room, load_state, save_seconds
from dpfp_ray.training.train import TrainedRun, follow, refuse_other_data, run_events

UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Settings:
    """What is asked of an audit. `family` None: the one that the plan's method shows most of."""

    canaries: int = 1000
    family: str | None = None
    access: str = "white_box"
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if self.access not in scoring.ACCESS:
            raise UserError(unknown("access", self.access, scoring.ACCESS))
        if self.family not in (None, *FAMILIES):
            raise UserError(unknown("family", str(self.family), FAMILIES))
        if not 0.5 <= self.confidence < 1:
            raise UserError(f"confidence is {self.confidence}; give 0.5 or more, below 1")

    def for_plan(self, plan: Plan) -> "Settings":
        return replace(self, family=self.family or scoring.strongest_family(plan, self.access))


@dataclass
class Audit:
    """A plan bound to data in which each canary is in or out; ready to be trained."""

    settings: Settings
    prepared: Prepared
    real: Table
    canaries: Canaries
    members: Bools
    membership_seed: int

    @property
    def score_name(self) -> str:
        return scoring.score_name(self.prepared.plan, self.canaries.family, self.settings.access)


def set_up(plan: Plan, settings: Settings, membership_seed: int, task: Task | None = None) -> Audit:
    """Load the plan's data, put the canaries in, calibrate. D is the plan's own."""
    plan = with_precision(plan)
    settings = settings.for_plan(plan)
    task = task or load_task(plan)
    inputs = load_inputs(plan, task)
    prepared, real = prepare(plan, inputs), inputs.data.train
    family, count, rows = str(settings.family), settings.canaries, inputs.representation
    tokenizer = load_tokenizer(plan.model)
    canaries = make_canaries(family, count, task, tokenizer, plan.max_length, rows == "pair")
    if isinstance(real, RepresentationTable):
        tokens = cast(TokenTable | PairTable, canaries.table)
        h = represent(tokens, plan.model, rows, plan.precision, "canaries", real.centre)
        canaries = replace(canaries, table=replace(h, persons=tokens.persons))
    members = flip_coins(len(canaries), membership_seed)
    train = insert(real, canaries, members, absence(prepared.plan))
    prepared.inputs = replace(inputs, data=Data(train, inputs.data.dev))
    return Audit(settings, prepared, real, canaries, members, membership_seed)


def teaching_part(plan: Plan, say: Callable[[str], None]) -> Plan:
    """What an audit of `plan` looks at: of a student the release that all of it follows from."""
    if not plan.private_part.spec.reads_records:
        raise UserError(f"{plan.method} reads no private record; there is nothing to audit")
    if plan.teacher is not None:
        say("the teacher's release is audited: the student is computed from it and public text")
    return plan.private_part


def power_warning(plan: Plan, settings: Settings) -> str | None:
    settings = settings.for_plan(plan)
    name = scoring.score_name(plan, str(settings.family), settings.access)
    return warning_of(plan, settings.canaries, settings.confidence, in_only=name in scoring.IN_ONLY)


def absence(plan: Plan) -> str:
    if (plan.one_release or plan.spec.by_library) and plan.adjacency == "add_remove":
        return "left_out"
    return str(plan.adjacency)


@dataclass(frozen=True)
class Audited(Finished):
    """The last event of an audit: the record with its `audit`, and the canaries' scores."""

    scores: scoring.Floats


def audit_events(audit: Audit, run: Run, folder: Path | None = None) -> Iterator[Event]:
    """Train by the ordinary loop, and score the canaries. The last event is `Audited`.

    `run` is one of `audit.prepared`. `folder` is where the caller saves it; there must be room.
    """
    prepared, plan, canaries = run.prepared, run.plan, audit.canaries
    model = hide_empty(build_model(prepared, run.seed))
    if folder is not None:
        ask_for_room(folder, model, plan, weights=False)
    initial = scoring.snapshot(model)
    watcher = scoring.Watcher(run, model, canaries) if audit.score_name == scoring.WATCHED else None
    release: Any = None
    for event in run_events(run, model):
        if isinstance(event, Finished):
            record = event.record
            break
        if isinstance(event, Released):
            release = event.release
        yield watcher.see(event) if watcher else event
    watched = watcher.evidence if watcher else np.zeros(0)
    trained = scoring.Trained(prepared, audit.real, canaries, initial, model, watched, release)
    with waiting("scoring the canaries"):
        scores = scoring.score(audit.score_name, trained)
        outcome = audit_outcome(
            plan,
            scores,
            audit.members,
            confidence=audit.settings.confidence,
            rng=keyed_generator(audit.membership_seed, "ties", 0),
            in_only=audit.score_name in scoring.IN_ONLY,
        )
    facts: Any = {
        **outcome,
        "family": canaries.family,
        "access": audit.settings.access,
        "score": audit.score_name,
        "real_records": plan.D - len(canaries),
    }
    record["audit"] = record["statement"]["audit"] = facts
    yield Audited(record, scores)


@dataclass(frozen=True)
class AuditFolder:
    """An audit in a folder: finished, with its `record`, or ready to run.

    `facts` is what audit.json says from the start: the plan's hash, the settings, the seeds.
    `begun` says that an earlier call began this audit, saved or not.
    """

    folder: Path
    audit: Audit
    run: Run
    facts: dict[str, Any]
    begun: bool
    record: Record | None = None

    @property
    def scratch(self) -> Path:
        return self.folder / UNFINISHED

    def finish(self, audited: Audited) -> Record:
        """Write the result and the evidence; the unfinished run goes."""
        record = audited.record
        evidence = {  # enough to check the guesses by hand
            "places": self.audit.canaries.places.tolist(),
            "members": self.audit.members.tolist(),
            "scores": [float(f"{value:.9g}") for value in audited.scores],
        }
        keep(self.folder, {**record["audit"], **self.facts, **evidence})
        run_folder.write_result(self.folder, record, None, self.run.plan)
        shutil.rmtree(self.scratch)
        return record


def open_audit(
    folder: Path,
    plan: Plan,
    settings: Settings,
    seeds: Mapping[str, int | None],
    task: Task | None = None,
    say: Callable[[str], None] = lambda message: None,
    show_training_loss: bool = False,
) -> AuditFolder:
    """The audit in `folder`: finished, to be continued, or new.

    `seeds` are `seed` and `membership_seed`, None for those of the folder, or new ones.
    """
    begun = read_begun(folder)
    given = {name: seed for name, seed in seeds.items() if seed is not None}
    for name in given:
        if begun and given[name] != begun[name]:
            flag = f"--{name.replace('_', '-')}"
            text = f"{folder} holds an audit with another {name}; drop {flag}, or --overwrite"
            raise UserError(text)
    own_seeds = {name: begun.get(name, given.get(name, fresh_seed())) for name in SEEDS}
    audit = set_up(plan, settings, own_seeds["membership_seed"], task)
    prepared, plan = audit.prepared, audit.prepared.plan
    asked = {"plan_hash": plan.hash, "settings": asdict(audit.settings)}
    if begun and {key: begun.get(key) for key in asked} != asked:
        raise UserError(f"{folder} holds another audit; use another --output, or --overwrite")
    run = Run(prepared, own_seeds["seed"], seed_known=True, show_training_loss=show_training_loss)
    opened = AuditFolder(folder, audit, run, {**asked, **own_seeds}, bool(begun))
    record = run_folder.finished_result(folder, plan, with_audit=True)
    if record is not None and not begun:
        raise UserError(f"{folder} holds a run without canaries; use another --output")
    if record is not None:
        say(f"{folder} already holds this audit; --overwrite runs it again")
        return replace(opened, record=record)
    if warning := power_warning(plan, audit.settings):
        say(f"warning: {warning}")
    state = load_state(run_folder.make_folder(opened.scratch), plan)
    if state is not None:
        say(f"continuing after step {state['progress']['step']:,} of {plan.steps:,}")
    keep(folder, opened.facts)  # before it is paid: a second try must be the same run
    return replace(opened, run=replace(run, state=state))


def discard(folder: Path) -> None:
    run_folder.discard(folder)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    (folder / AUDIT).unlink(missing_ok=True)


class AuditedRun(TrainedRun):
    """A run with canaries in its data. Its model is not kept: it is no release."""

    @property
    def audit(self) -> dict[str, Any]:
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
    settings = Settings(canaries, family, access, confidence)
    save_every = save_seconds(save_every)
    use_threads(threads)
    book = open_ledger(ledger, total_epsilon, total_delta)
    folder = run_folder.make_folder(output)
    task: Task | None = None
    if data is not None:
        plan, task = in_memory(plan, data, dev=dev, text=text, pair=pair, label=label, users=users)
    seeds = {"seed": seed, "membership_seed": membership_seed}
    plan = teaching_part(plan, display.say)

    try:
        with run_folder.held(folder, overwrite):
            if overwrite:
                discard(folder)
            opened = open_audit(
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
            charge = charged(book, run, where=where, resumed=opened.begun, purpose="audit")
            shown = display(run, f"audit {plan.method}")
            keeper = Keeper(run, display, opened.scratch, save_every, mark)
            events = audit_events(opened.audit, run, opened.scratch)
            audited = cast(Audited, follow(events, charge, shown, keeper))
            return AuditedRun(opened.finish(audited), folder)
    except Interrupted as stop:
        text = f"stopped; saved in {folder}. The same command continues it."
        raise Interrupted(text, stop.number) from None
