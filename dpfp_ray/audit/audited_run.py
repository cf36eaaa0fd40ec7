"""The one-run audit: train once with canaries by the ordinary loop, guess who was in, and hold what
the guesses prove against what the plan states.

DIR/result.json   the ordinary result, and under `audit` the bound and the outcome
DIR/audit.json    the same `audit` and the two seeds, which repeat it to the bit; owner-only
DIR/unfinished/   resume.pt while it runs; not in DIR, where `dpfp train` would take it for its own

No weights are kept: a model that was trained on canaries, with seeds on record, is no release.
"""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from dpfp_ray.audit.canaries import (
    FAMILIES,
    Bools,
    Canaries,
    flip_coins,
    hide_empty,
    insert,
    make_canaries,
)
from dpfp_ray.audit.outcome import AUDIT, audit_outcome, keep, read_begun, warning_of
from dpfp_ray.audit.scores import (
    ACCESS,
    IN_ONLY,
    WATCHED,
    Floats,
    Trained,
    score,
    score_name,
    snapshot,
    strongest_family,
)
from dpfp_ray.audit.watch import Watcher
from dpfp_ray.data import Table, Task
from dpfp_ray.data.pair_tokens import PairTable
from dpfp_ray.data.split import count_units
from dpfp_ray.data.tasks import load_task
from dpfp_ray.data.terminal import waiting
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.models.pretrained import load_tokenizer
from dpfp_ray.models.representations import RepresentationTable, represent
from dpfp_ray.plan.errors import UserError, unknown
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.sampling import fresh_seed, keyed_generator
from dpfp_ray.training import run, run_folder
from dpfp_ray.training.charged import Charge, charged, enter_past, register
from dpfp_ray.training.checkpoints import ask_for_room, load_state
from dpfp_ray.training.loop import Data, Reporter, State
from dpfp_ray.training.prepare import Prepared, build_model, load_inputs

UNFINISHED = "unfinished"
Record = dict[str, Any]
# Who listens to the run of a plan with a seed, and saves its state in a folder.
Listen = Callable[[Prepared, int, Path], AbstractContextManager[Reporter]]


@dataclass(frozen=True)
class Settings:
    """What is asked of an audit. `family` None: the one that the plan's method shows most of."""

    canaries: int = 1000
    family: str | None = None
    access: str = "white_box"
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if self.access not in ACCESS:
            raise UserError(unknown("access", self.access, ACCESS))
        if self.family not in (None, *FAMILIES):
            raise UserError(unknown("family", str(self.family), FAMILIES))
        if not 0.5 <= self.confidence < 1:
            raise UserError(f"confidence is {self.confidence}; give 0.5 or more, below 1")

    def for_plan(self, plan: Plan) -> "Settings":
        return replace(self, family=self.family or strongest_family(plan, self.access))


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
        return score_name(self.prepared.plan, self.canaries.family, self.settings.access)


def set_up(plan: Plan, settings: Settings, membership_seed: int, task: Task | None = None) -> Audit:
    """Load the plan's data, put the canaries in, calibrate. D is the plan's own."""
    settings = settings.for_plan(plan)
    task = task or load_task(plan)
    inputs = load_inputs(plan, task)
    real = inputs.data.train
    bound = plan.bind(
        records=count_units(real),
        representation=inputs.representation,
        classes=len(inputs.label_names),
    )
    canaries = make_canaries(
        str(settings.family),
        settings.canaries,
        task,
        load_tokenizer(plan.model),
        plan.max_length,
        text_by_text=inputs.representation == "pair",
    )
    if isinstance(real, RepresentationTable):
        tokens = cast(TokenTable | PairTable, canaries.table)
        h = represent(
            tokens, plan.model, inputs.representation, plan.precision, "canaries", real.centre
        )
        canaries = replace(canaries, table=replace(h, persons=tokens.persons))
    members = flip_coins(len(canaries), membership_seed)
    train = insert(real, canaries, members, absence(bound))
    inputs = replace(inputs, data=Data(train, inputs.data.dev))
    prepared = Prepared(bound, inputs, noise_multiplier(bound))
    return Audit(settings, prepared, real, canaries, members, membership_seed)


def power_warning(plan: Plan, settings: Settings) -> str | None:
    """What to say before an audit that cannot refute anything is trained."""
    settings = settings.for_plan(plan)
    name = score_name(plan, str(settings.family), settings.access)
    return warning_of(plan, settings.canaries, settings.confidence, in_only=name in IN_ONLY)


def absence(plan: Plan) -> str:
    """What "out" means, see `canaries`."""
    if plan.one_release and plan.adjacency == "add_remove":
        return "left_out"
    return str(plan.adjacency)


def run_audit(
    audit: Audit,
    reporter: Reporter,
    *,
    seed: int,
    state: State | None = None,
    show_training_loss: bool = False,
    folder: Path | None = None,
    before_draws: Callable[[], None] = lambda: None,
) -> tuple[Record, Floats]:
    """Train by the ordinary loop and score: the record with its `audit`, and the scores.

    `folder` is where the run is saved; there must be room.
    """
    prepared, plan = audit.prepared, audit.prepared.plan
    device = run.default_device()
    model = hide_empty(build_model(prepared, seed, device))
    if folder is not None:
        ask_for_room(folder, model, plan, weights=False)
    initial = snapshot(model)
    watched = np.zeros(0)
    if audit.score_name == WATCHED:
        reporter = Watcher(reporter, prepared, model, audit.canaries, state)
        watched = reporter.evidence
    released: list[Any] = []
    record, model = run.run(
        prepared,
        reporter,
        seed=seed,
        state=state,
        device=device,
        model=model,
        seed_known=True,
        show_training_loss=show_training_loss,
        on_release=released.append,
        before_draws=before_draws,
    )
    trained = Trained(prepared, audit.real, audit.canaries, initial, model, watched, *released)
    with waiting("scoring the canaries"):
        scores = score(audit.score_name, trained)
        outcome = audit_outcome(
            plan,
            scores,
            audit.members,
            confidence=audit.settings.confidence,
            rng=keyed_generator(audit.membership_seed, "ties", 0),
            in_only=audit.score_name in IN_ONLY,
        )
    record["audit"] = {
        **outcome,
        "family": audit.canaries.family,
        "access": audit.settings.access,
        "score": audit.score_name,
        "real_records": plan.D - len(audit.canaries),
    }
    record["statement"]["audit"] = record["audit"]
    return record, scores


def audit_in(
    folder: Path,
    plan: Plan,
    settings: Settings,
    listen: Listen,
    *,
    seed: int | None = None,
    membership_seed: int | None = None,
    task: Task | None = None,
    say: Callable[[str], None] = lambda message: None,
    show_training_loss: bool = False,
    ledger: Ledger | None = None,
) -> Record:
    """The audit in `folder`: found finished, continued, or run from the start; its record.

    Without a `ledger` the caller has entered it in one.
    """
    begun = read_begun(folder)
    for name, given in (("seed", seed), ("membership_seed", membership_seed)):
        if begun and given not in (None, begun[name]):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{folder} holds an audit with another {name}; drop {flag}, or --overwrite"
            )
    seeds = {
        "seed": begun.get("seed", fresh_seed() if seed is None else seed),
        "membership_seed": begun.get(
            "membership_seed", fresh_seed() if membership_seed is None else membership_seed
        ),
    }
    audit = set_up(plan, settings, seeds["membership_seed"], task)
    prepared = audit.prepared
    asked = {"plan_hash": prepared.plan.hash, "settings": asdict(audit.settings)}
    if begun and {key: begun.get(key) for key in asked} != asked:
        raise UserError(f"{folder} holds another audit; use another --output, or --overwrite")
    known = run_folder.finished_result(folder, prepared.plan, with_audit=True)
    if known is not None and not begun:
        raise UserError(f"{folder} holds a run without canaries; use another --output")
    if known is not None:
        say(f"{folder} already holds this audit; --overwrite runs it again")
        if ledger is not None:
            enter_past(ledger, known, register(ledger, prepared.inputs))
        return known
    if warning := power_warning(prepared.plan, audit.settings):
        say(f"warning: {warning}")
    scratch = run_folder.make_folder(str(folder / UNFINISHED))
    state = load_state(scratch, prepared.plan)
    if state is not None:
        say(f"continuing after step {state['progress']['step']:,} of {prepared.plan.steps:,}")
        # The noise that the first steps really had, should calibration come out otherwise by now.
        prepared.noise_multiplier = state["noise_multiplier"]
    charging: AbstractContextManager[Charge | None] = nullcontext()
    if ledger is not None:
        where, own_seed = str(folder.resolve()), seeds["seed"]
        charging = charged(
            ledger,
            prepared,
            where=where,
            seed=own_seed,
            state=state,
            resumed=bool(begun),
            purpose="audit",
            loss_shown=show_training_loss,
        )
    keep(folder, {**asked, **seeds})  # before it is paid: a second try must be the same run
    with charging as charge, listen(prepared, seeds["seed"], scratch) as reporter:
        record, scores = run_audit(
            audit,
            reporter if charge is None else charge.listen(reporter),
            seed=seeds["seed"],
            state=state,
            show_training_loss=show_training_loss,
            folder=scratch,
            before_draws=(lambda: None) if charge is None else charge.start_drawing,
        )
    if charge is not None:
        record["ledger_entry"] = charge.entry_id
    keep(folder, {**record["audit"], **asked, **seeds, **evidence(audit, scores)})
    run_folder.write_result(folder, record, None, prepared.plan)
    shutil.rmtree(scratch)
    return record


def evidence(audit: Audit, scores: Floats) -> Record:
    """Enough to check the guesses by hand."""
    return {
        "places": audit.canaries.places.tolist(),
        "members": audit.members.tolist(),
        "scores": [float(f"{value:.9g}") for value in scores],
    }


def discard(folder: Path) -> None:
    run_folder.discard(folder)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    (folder / AUDIT).unlink(missing_ok=True)
