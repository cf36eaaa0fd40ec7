"""Entries of the ledger as data: one use of private records, written before its first step.

`Use` is what is about to be done, `Entry` is a use as the ledger holds it: when, by whom, and what
is known of its end. Files hold plain JSON; an unknown kind of mechanism raises, because a part that
is skipped would make the sum too small.

What the entries of one group of people add up to, by which theorem, and what fits a total.
"""

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfp_ray.plan.method_spec import MARKS
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting, ledger_cost
from dpfp_ray.privacy.ledger_cost import (
    WIDE_ORDERS,
    Allocated,
    Gaussian,
    Part,
    Pure,
    RdpCurve,
    Total,
    count_parts,
    for_group,
    part_from_json,
)

SCHEMA = 2
# Rényi orders stored for custom mechanisms; dense, because a total chooses its order later.
CURVE_ORDERS = tuple(sorted({*WIDE_ORDERS, *(1 + 2.0 ** (k / 8) for k in range(-32, 73))}))
GUARANTEES = ("proved", "claimed", "nominal", "none")  # from best to worst
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
        if self.steps and (self.guarantee == "none") != (not self.parts):
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
    return sum(ledger_cost.count_parts([part], steps).values())


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
    head = {name: opening[name] for name in ("id", "opened_at", "who", "before")}
    entry = Entry(**head, use=use, resumes=tuple(opening["resumes"]))
    order = [(int(end["done"]), str(end["ended_at"]), end) for end in ends]
    if not order:
        return entry
    last = max(order, key=lambda item: item[:2])[2]
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


def rdp_curve(values: Sequence[float]) -> RdpCurve:
    """At those of `CURVE_ORDERS` where it is finite."""
    pairs = zip(CURVE_ORDERS, values, strict=True)
    known = {order: value for order, value in pairs if math.isfinite(value)}
    return RdpCurve(tuple(known), tuple(known.values()))


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
    title, plan_hash, plan = plan.spec.title, plan.hash, plan.private_part
    parts: list[Part] = []
    if plan.private:
        whole = accounting.mechanism(plan, noise_multiplier)
        if whole.own is not None:
            parts.append(rdp_curve([whole.own.rdp(order) for order in CURVE_ORDERS]))
        elif whole.batches:
            parts.append(Allocated(whole.batches, whole.noise_multiplier))
        elif whole.n != plan.steps * plan.M:  # of a library, whose releases are not its steps
            releases: dict[Part, int] = {Gaussian(whole.p, whole.noise_multiplier): whole.n}
            parts.append(rdp_curve(ledger_cost.renyi_curve(releases, CURVE_ORDERS)))
        else:
            parts.append(Gaussian(whole.p, whole.noise_multiplier, plan.M))
        if whole.label_epsilon:
            parts.append(Pure(whole.label_epsilon))
    return Use(
        purpose=purpose,
        plan_hash=plan_hash,
        method=title,
        people=people,
        records=plan.D,
        steps=plan.steps if plan.spec.reads_records else 0,
        parts=tuple(parts),
        adjacency=str(plan.adjacency),
        labels_protected=not plan.spec.reads_records
        or (plan.private and (plan.adjacency == "add_remove" or bool(plan.label_epsilon))),
        guarantee=plan.spec.guarantee,  # of the method: the sum is the ledger's own, not a budget's
        delta=plan.delta if plan.private else None,
        run=run,
        release=release,
        fixed_list=fixed_list,
        loss_shown=loss_shown and plan.private and not plan.one_release,
        unit=plan.unit,
    )


# Above this ε the odds rise more than 20,000-fold.
MEANINGLESS = 10.0
PROTECTS_NOBODY = "so large that it protects nobody"


def odds_text(epsilon: float, unit: str, labels_protected: bool) -> str:
    """What a proved ε means for a `unit` (record or person) in the data, in one sentence."""
    whose = unit if labels_protected else f"{unit}'s text"
    odds = rounded_up(math.exp(epsilon))
    return f"the odds that a {whose} was in the data rise at most {odds}-fold, but for δ"


@dataclass(frozen=True)
class Spent:
    """What one group of people has paid, at `delta` under zero-out; `how` says by which theorem."""

    people: str
    data_sets: tuple[str, ...]
    epsilon: float  # ∞ if they were used without privacy
    private_epsilon: float  # of the private uses alone
    delta: float
    guarantee: str
    how: str
    total: float | None
    labels_protected: bool
    entries: tuple[Entry, ...]
    dev_rows: int = 0  # of their texts that were dev rows as well, counted as public
    records_per_person: int = 1  # in uses whose unit is the record

    @property
    def units(self) -> dict[str, int]:
        return dict(Counter(entry.use.unit for entry in self.used if entry.use.parts))

    @property
    def holds_for(self) -> str:
        """Whom the sum holds for; empty where that is one record, as it always was."""
        records, persons = self.units.get("record", 0), self.units.get("person", 0)
        if records and (persons or self.records_per_person > 1):
            several = self.records_per_person != 1
            own = f"{self.records_per_person} record{'s' * several}"
            text = f"one person with {own} in each of the {records} uses that protect records"
            return text if several else f"{text}; one with more there pays more"
        return "one person" if persons else ""

    @property
    def used(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.charged > 0]

    @property
    def shown(self) -> str:
        """ε of the private uses for people: rounded up, † or § if any is nominal or claimed."""
        guarantees = {entry.use.guarantee for entry in self.used}
        marks = "".join(mark for guarantee, mark in MARKS.items() if guarantee in guarantees)
        return rounded_up(self.private_epsilon) + marks

    @property
    def unprotected(self) -> list[str]:
        return sorted({e.use.method for e in self.used if not e.use.labels_protected})

    def headline(self) -> str:
        """The number, and what it means for one of the people in the data."""
        used = self.used
        audits = sum(entry.use.purpose == "audit" for entry in used)
        count = f"{len(used)} use{'s' * (len(used) != 1)}"
        count += f", {audits} of them audit{'s' * (audits != 1)}" if audits else ""
        limit = "" if self.total is None else f" of a total of {self.total:g}"
        text = f"everything done to these records ({count}) costs ε = {self.shown}{limit}"
        return f"{text}: {self._meaning()}" if used else text

    def _meaning(self) -> str:
        if self.guarantee == "none":
            return "some uses had no privacy at all, so nothing is promised"
        if self.guarantee == "nominal":
            return "a part of it is only nominal (†), so nothing is promised"
        if self.guarantee == "claimed":
            return "a part of it holds only if another library does what it says (§)"
        who = "person" if self.units.get("person") else "record"
        if self.private_epsilon > MEANINGLESS:
            return PROTECTS_NOBODY
        odds_rise = odds_text(self.private_epsilon, who, self.labels_protected)
        if self.total is not None or self.how.startswith("composition"):
            return odds_rise
        # A filter proves a total that was fixed beforehand; without one there is only this.
        return f"had this been a total set beforehand, {odds_rise}"

    def marks(self) -> str:
        """What the number does not cover; empty if it covers everything."""
        used = self.used
        notes = []
        kinds = {"nominal": "† nominal", "claimed": "§ claimed by another library"}
        for guarantee, words in (*kinds.items(), ("none", "without any privacy, ε = ∞")):
            methods = sorted({e.use.method for e in used if e.use.guarantee == guarantee})
            notes += [f"{words}: {', '.join(methods)}"] if methods else []
        private = {entry.use.method for entry in used if entry.use.guarantee != "none"}
        bare = [name for name in self.unprotected if name in private]
        notes += [f"labels not protected by {', '.join(bare)}"] if bare else []
        losses = sorted({entry.use.method for entry in used if entry.use.loss_shown})
        notes += [f"not covered: the training loss of {', '.join(losses)}"] if losses else []
        if self.dev_rows:
            notes.append(f"not covered: {self.dev_rows:,} of their texts, which were dev rows, too")
        return "; ".join(notes)

    def basis(self) -> str:
        """The theorem behind the number, and for whom it holds."""
        text = f"at δ = {self.delta:.3g}, by {self.how}, under zero-out"
        return f"{text}, for {self.holds_for}" if self.holds_for else text

    def lines(self, basis: bool = False) -> list[str]:
        texts = (self.headline(), self.marks(), self.basis() if basis else "")
        return [text for text in texts if text]

    def sentence(self) -> str:
        """All of it in one line, for files."""
        return "; ".join(self.lines(basis=True))

    def to_json(self) -> dict[str, Any]:
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return facts | {
            "holds_for": self.holds_for or "one record",
            "data_sets": list(self.data_sets),
            "adjacency": "zero_out",
            "labels_unprotected_by": self.unprotected,
            "headline": self.headline(),
            "text": self.sentence(),
            "entries": [entry.to_json() for entry in self.entries],
        }


def rounded_up(epsilon: float) -> str:
    """Three digits that are never less than `epsilon`; a millionth part is rounding error."""
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return f"{math.ceil(epsilon / unit * (1 - 1e-6)) * unit:.3g}"


def sum_up(
    entries: Sequence[Entry],
    people: str,
    data_sets: Sequence[str],
    total: Total | None,
    delta: float | None,
    records_per_person: int = 1,
) -> Spent:
    """All `entries` are of these people, oldest first; a total brings its own δ.

    The sum is what they cost a person who has so many records in uses that protect records.
    """
    at = total.delta if total else delta or _smallest_delta(entries)
    used = [entry for entry in entries if entry.charged > 0]
    private = [e for e in entries if e.use.parts and e.status != "refused"]
    epsilon, how = _sum(private, at, total, records_per_person)
    worst = max((GUARANTEES.index(entry.use.guarantee) for entry in used), default=0)
    return Spent(
        people,
        tuple(data_sets),
        math.inf if GUARANTEES[worst] == "none" else epsilon,
        epsilon,
        at,
        GUARANTEES[worst],
        how,
        total.epsilon if total else None,
        all(entry.use.labels_protected for entry in used),
        tuple(entries),
        records_per_person=records_per_person,
    )


def _sum(
    private: Sequence[Entry], delta: float, total: Total | None, records_per_person: int
) -> tuple[float, str]:
    """(ε, how) of private entries, by the filter unless their list was fixed beforehand."""
    done = counted(private, records_per_person=records_per_person)
    if total is not None:
        return ledger_cost.filter_epsilon(done, delta, ledger_cost.filters_of(total))
    if not private:
        return 0.0, "nothing was released"
    # What was chosen before any result: the first use, with the rest of its list.
    first_list = private[0].use.fixed_list
    first = [
        e for e in private if e is private[0] or (first_list and e.use.fixed_list == first_list)
    ]
    filters = ledger_cost.filters_from([part for entry in first for part in entry.use.parts])
    sums = [ledger_cost.filter_epsilon(done, delta, filters)]
    if _fixed_beforehand(private):
        planned = counted(private, planned=True, records_per_person=records_per_person)
        kind = "one use" if len({entry.same for entry in private}) == 1 else "a fixed list"
        sums.append((ledger_cost.composed_epsilon(planned, delta), f"composition of {kind}"))
    return min(sums)


def _fixed_beforehand(entries: Sequence[Entry]) -> bool:
    """Whether all are one use, or one list that was begun as a whole before any of it ended."""
    first_opened: dict[Any, str] = {}
    for entry in entries:  # oldest first, so that a resume does not count as a new beginning
        first_opened.setdefault(entry.same, entry.opened_at)
    if len(first_opened) == 1:
        return True
    lists = {entry.use.fixed_list for entry in entries}
    first_end = min((entry.ended_at for entry in entries if entry.ended_at), default=None)
    begun_as_one = first_end is None or max(first_opened.values()) <= first_end
    return len(lists) == 1 and None not in lists and begun_as_one


def refusal(group: Sequence[Entry], new: Collection[str], total: Total, name: str) -> str | None:
    """Why the entries with ids `new`, of this group of people, do not fit the total of the ledger
    `name`; None if they do."""
    own = [entry for entry in group if entry.id in new]
    bare = next((entry.use.method for entry in own if entry.use.guarantee == "none"), None)
    if bare is not None:
        return (
            f"{bare} gives no privacy, and the ledger {name} has a total of ε = "
            f"{total.epsilon:g}; use a private method, or another ledger for public data"
        )
    together, rest = counted(group), counted(e for e in group if e.id not in new)
    if ledger_cost.would_fit(together, {}, total):
        return None
    before, after = (
        rounded_up(ledger_cost.filter_epsilon(sum_, total.delta, ledger_cost.filters_of(total))[0])
        for sum_ in (rest, together)
    )
    delta = _smallest_delta(own)  # the run's own δ: the user has stated its ε there
    most = ledger_cost.what_fits(rest, counted(own), total, delta)
    at_most = f"ε ≤ {math.floor(most * 100) / 100:g}"
    asked = rounded_up(ledger_cost.composed_epsilon(counted(own), delta))
    one = len(own) == 1
    fits = f"at its own δ = {delta:.3g} it has ε = {asked}, and one of {at_most} fits"
    if not one:
        fits = f"at δ = {delta:.3g} together they have ε = {asked}, and runs of {at_most} fit"
    return (
        f"{f'this {own[0].use.purpose}' if one else f'these {len(own)} runs'} would bring what "
        f"these people pay from ε = {before} to {after}, above the total of {total.epsilon:g} "
        f"(δ = {total.delta:.3g}) of the ledger {name}; "
        f"{fits if most > 0.005 else 'nothing more fits'}"
    )


def _smallest_delta(entries: Iterable[Entry]) -> float:
    stated = [entry.use.delta or 1 / (2 * entry.use.records) for entry in entries]
    return min(stated, default=1e-6)
