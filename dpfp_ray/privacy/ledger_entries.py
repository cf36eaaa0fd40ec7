"""Entries of the ledger as data: one use of private records, written before its first step.

`Use` is what is about to be done, `Entry` is a use as the ledger holds it: when, by whom, and what
is known of its end. Files hold plain JSON; an unknown kind of mechanism raises, because a part that
is skipped would make the sum too small.
"""

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.ledger_cost import (
    WIDE_ORDERS,
    Gaussian,
    Part,
    Pure,
    RdpCurve,
    count_parts,
    for_group,
    part_from_json,
)

SCHEMA = 2
# Rényi orders stored for custom mechanisms; dense, because a total chooses its order later.
CURVE_ORDERS = tuple(sorted({*WIDE_ORDERS, *(1 + 2.0 ** (k / 8) for k in range(-32, 73))}))
GUARANTEES = ("proved", "nominal", "none")  # from best to worst
PURPOSES = ("train", "trial", "audit", "evaluation")
UNITS = ("record", "person")
ENDS = ("finished", "failed", "stopped", "refused")


@dataclass(frozen=True, kw_only=True)
class Use:
    """A use of private records, planned; `parts` are its mechanism under zero-out.

    `run` tells runs apart. Equal `run` (with equal plan, data and mechanism) means equal
    randomness: a run that is resumed, or made again from the same secret seed into the same folder.
    `release` is the id of a release that is the same numbers whenever it is made again; equal ids
    on the same data count once. `fixed_list` names a list of uses whose mechanisms (rates, noises,
    counts; not what is done with the results) are all fixed beforehand. Begin all of them before
    the first one ends: stopping such a list early is a choice, too, and only then is it seen.
    """

    purpose: str
    plan_hash: str
    method: str
    people: str
    records: int
    steps: int
    parts: tuple[Part, ...]
    adjacency: str
    labels_protected: bool
    guarantee: str
    delta: float | None
    run: str
    release: str | None = None
    fixed_list: str | None = None
    loss_shown: bool = False  # the training loss, which no ε covers
    found: str | None = None  # of a result that was entered after it was made
    unit: str = "record"  # or "person": what `parts` is the cost of

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit {self.unit!r} is none of {', '.join(UNITS)}")
        if self.purpose not in PURPOSES or self.guarantee not in GUARANTEES or self.steps < 0:
            raise ValueError(f"no use of private records has these values: {self}")
        if (self.guarantee == "none") != (not self.parts):
            raise ValueError("a use without a guarantee has no parts, and every other has some")

    @property
    def run_id(self) -> str:
        """Equal for equal runs; whatever changes the cost changes it."""
        facts = [self.purpose, self.plan_hash, self.people, self.steps, self.run, self.release]
        parts = [dataclasses.asdict(part) for part in self.parts]
        text = json.dumps([facts, parts], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A use with what is known of its end; `done` is None while there is none."""

    id: str
    opened_at: str
    who: str
    use: Use
    resumes: tuple[str, ...] = ()
    before: int = 0  # entries that the ledger had when this one was written
    done: int | None = None
    status: str = "open"
    ended_at: str | None = None

    @property
    def run_id(self) -> str:
        return self.id.rpartition("-")[0]

    @property
    def charged(self) -> int:
        """Steps that count: all that were planned, until an end says what was done."""
        return self.use.steps if self.done is None else self.done

    @property
    def same(self) -> tuple[Any, ...]:
        """Entries that agree on this repeat the same random numbers, and count once."""
        use = self.use
        return (use.release, use.people, use.parts) if use.release else (self.run_id,)

    def to_json(self) -> dict[str, Any]:
        """For people and programs: planned and done counts beside each mechanism."""
        use = self.use
        return {
            "id": self.id,
            "opened_at": self.opened_at,
            "ended_at": self.ended_at,
            "who": self.who,
            "status": self.status,
            "steps": use.steps,
            "done": self.done,
            **{name: getattr(use, name) for name in SHOWN},
            "mechanism": [
                dataclasses.asdict(part)
                | {"planned": _number(part, use.steps)}
                | {"done": None if self.done is None else _number(part, self.done)}
                for part in use.parts
            ],
        }


SHOWN = (
    "purpose", "plan_hash", "method", "people", "records", "adjacency",
    "labels_protected", "guarantee", "delta", "release", "fixed_list", "loss_shown", "unit",
)  # fmt: skip


def _number(part: Part, steps: int) -> int:
    return steps * part.per_step if isinstance(part, Gaussian) else int(steps > 0)


def opening_to_json(entry: Entry) -> dict[str, Any]:
    """What is stored before the first step. Not `run`: it may name folders, and `id` has it."""
    facts = dataclasses.asdict(entry.use)
    del facts["run"]
    head = {"schema": SCHEMA, "id": entry.id, "opened_at": entry.opened_at, "who": entry.who}
    return head | {"resumes": list(entry.resumes), "before": entry.before, "use": facts}


def entry_from_json(opening: Mapping[str, Any], ends: Iterable[Mapping[str, Any]]) -> Entry:
    """ValueError, KeyError or TypeError if it is not what `opening_to_json` writes.

    Of several ends (a run that was taken for dead ended after all) the largest number counts.
    """
    if opening["schema"] != SCHEMA:
        raise ValueError(f"schema {opening['schema']!r} is not known to this version")
    facts = dict(opening["use"])
    parts = tuple(part_from_json(part) for part in facts.pop("parts"))
    use = Use(**facts, parts=parts, run="")
    entry = Entry(
        opening["id"],
        opening["opened_at"],
        opening["who"],
        use,
        tuple(opening["resumes"]),
        opening["before"],
    )
    known = sorted(ends, key=lambda end: (int(end["done"]), str(end["ended_at"])))
    if not known:
        return entry
    last = known[-1]
    if last["status"] not in ENDS:
        raise ValueError(f"unknown status {last['status']!r}")
    return dataclasses.replace(
        entry, done=int(last["done"]), status=last["status"], ended_at=last["ended_at"]
    )


def counted(
    entries: Iterable[Entry], planned: bool = False, records_per_person: int = 1
) -> Counter[Part]:
    """What these entries have released together; what repeats the same numbers counts once.

    It is what they cost a person who has `records_per_person` records in each of those uses whose
    unit is the record, and any number in the others (docs/user_level.md).

    `planned` counts stopped runs in full: whether and where one stopped may depend on what was
    seen. Refusals depend on mechanisms only, and count nothing.
    """
    steps: dict[tuple[Any, ...], tuple[int, Use]] = {}
    for entry in entries:
        full = entry.use.steps if planned and entry.status != "refused" else 0
        number = max(entry.charged, full)
        before, _ = steps.get(entry.same, (0, entry.use))
        steps[entry.same] = (max(before, number), entry.use)
    total: Counter[Part] = Counter()
    for number, use in steps.values():
        parts: Sequence[Part] = use.parts
        if use.unit == "record" and records_per_person > 1:
            parts = [for_group(part, records_per_person) for part in parts]
        total.update(count_parts(parts, number))
    return total


def use_of(
    plan: Plan,
    noise_multiplier: float,
    *,
    people: str,
    run: str,
    purpose: str = "train",
    release: str | None = None,
    fixed_list: str | None = None,
    loss_shown: bool = False,
) -> Use:
    """The use that a bound plan is about to make.

    Under zero-out (of a person, where that is the unit) the sensitivity is C for gradients and rows
    and 1 for releases of bounded rows and moments, whatever adjacency the plan itself states: σ
    stays, the sensitivity is one unit.
    """
    parts: list[Part] = []
    if plan.private:
        whole = accounting.mechanism(plan, noise_multiplier)
        if whole.own is not None:
            curve = {order: whole.own.rdp(order) for order in CURVE_ORDERS}
            bounded = {order: value for order, value in curve.items() if math.isfinite(value)}
            parts.append(RdpCurve(tuple(bounded), tuple(bounded.values())))
        else:
            parts.append(Gaussian(whole.p, whole.noise_multiplier, plan.M))
        if whole.label_epsilon:
            parts.append(Pure(whole.label_epsilon))
    return Use(
        purpose=purpose,
        plan_hash=plan.hash,
        method=plan.spec.title,
        people=people,
        records=plan.D,
        steps=plan.steps,
        parts=tuple(parts),
        adjacency=str(plan.adjacency),
        labels_protected=plan.private
        and (plan.adjacency == "add_remove" or bool(plan.label_epsilon)),
        guarantee=plan.spec.guarantee,  # of the method: the sum is the ledger's own, not a budget's
        delta=plan.delta if plan.private else None,
        run=run,
        release=release,
        fixed_list=fixed_list,
        loss_shown=loss_shown and plan.private and not plan.one_release,
        unit=plan.unit,
    )
