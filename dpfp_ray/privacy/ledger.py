"""One ledger for the people in the data: what everything that was run on them costs together.

Every use of private records is an entry, written before its first step and ended after its last
(`ledger_entries`); data sets are recognised by content (`people`); costs are added in one adjacency
(`ledger_cost`). Nothing is ever rewritten: a killed run costs what it planned until somebody who
knows better writes its end.

**Two drivers cannot both take the last ε.** A driver first writes its entry, then reads all
entries, and goes on only if the sum with its own is within the total; else it ends its entry as
refused. Take all entries that were admitted, and of these the one that was written last. Its
driver read after it wrote, hence after all the others were written, and saw each of them: open,
at its planned cost, or ended, at what was done. So the sum that it found within the total was at
least what all of them spend, for a run does no more steps than it planned. Data sets and their
links are stored before the entries that name them, and read after these, so whoever sees an entry
knows whose it is. Two drivers at once may both be refused; on local folders a lock makes them take
turns. A total that is lowered later does not stop what was admitted under the old one.

**Non-private uses** have ε = ∞ and the guarantee "none". The sum then says so, and beside it what
the private uses alone would cost. A total bounds that private part: a non-private use is refused
once a total is set, and one from before leaves the guarantee at "none" for ever.
"""

import dataclasses
import hashlib
import math
import secrets
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpfp_ray.data.texts import ManyTexts
from dpfp_ray.privacy import ledger_cost
from dpfp_ray.privacy.ledger_cost import Total
from dpfp_ray.privacy.ledger_entries import (
    ENDS,
    Entry,
    Spent,
    Use,
    entry_from_json,
    opening_to_json,
    refusal,
    sum_up,
)
from dpfp_ray.privacy.people import ENTRIES, KnownPeople, OnceWritten, People, default_place
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.lease import user_name
from dpfp_ray.system.storage import Files

TOTALS = "totals"
TOTAL_DELTA = 1e-6  # of a total without a δ: 1/(2D) for half a million people


class Ledger:
    """The ledger at a folder or URI.

    >>> ledger = Ledger("/data/ledger")
    >>> people = ledger.register(texts)
    >>> entry = ledger.begin(use_of(plan, sigma, people=people.id, run=folder))
    >>> ...  # train
    >>> ledger.end(entry.id, done=plan.steps)
    >>> ledger.spent(people.id).epsilon
    """

    def __init__(self, place: str | Path | Files | None = None, delta: float | None = None) -> None:
        self.files = OnceWritten(default_place() if place is None else place)
        self.people = People(self.files)
        self.delta = delta
        self._read: dict[str, Any] = {}  # objects never change, so they are read once

    # --- writing ---

    def register(self, texts: ManyTexts, dev: ManyTexts = ()) -> KnownPeople:
        """Whose records these are; call it before `begin`. `dev`: texts that are dev rows."""
        with self.files.locked():
            self.people.register_dev(dev)
            return self.people.register(texts)

    def mark(self, seed: int) -> str:
        """A secret seed as part of a `Use.run`: equal for equal seeds, useless to find them."""
        key = self.people.key()
        return hashlib.blake2b(str(seed).encode(), key=key, digest_size=8).hexdigest()

    def begin(self, use: Use, resumed: bool = False) -> Entry:
        """Enter `use` before it touches data; UserError if the total would be passed.

        `resumed` says that the caller goes on with an earlier run and that no other process does:
        its `end` then also ends what that run left open.
        """
        return self.begin_all([use], resumed)[0]

    def begin_all(self, uses: Sequence[Use], resumed: bool = False) -> list[Entry]:
        """Enter all of `uses` or, if they would together pass the total, none of them."""
        links = self.people.links()
        for use in uses:
            if use.people not in links:
                raise ValueError(f"data set {use.people!r} is not registered with this ledger")
        with self.files.locked():
            before = self.entries()
            new: list[Entry] = []
            for use in uses:
                left = [e.id for e in before if e.run_id == use.run_id and e.done is None]
                resumes = tuple(left) if resumed else ()
                new.append(self._open(use, len(before) + len(new), resumes))
            problem = self._refusal(new) if new else None
            if problem is not None:
                for entry in new:
                    self._write_end(entry.id, 0, "refused")
                raise UserError(problem)
            return new

    def end(self, entry_id: str, done: int, status: str = "finished") -> None:
        """Say how many steps were done in all, those of earlier parts of a resumed run included."""
        if status not in ENDS or status == "refused":
            raise ValueError(unknown("status", status, ENDS[:-1]))
        if done < 0:
            raise ValueError(f"done is {done}; steps are 0 or more")
        # Its own opening and no other: a sweep ends a thousand entries, one by one.
        opening = f"{ENTRIES}/{entry_id}.json"
        if opening not in self._read and f"{entry_id}.json" not in self.files.names(ENTRIES):
            raise UserError(f"the ledger {self.files.name} has no entry {entry_id!r}")
        with self.files.intact(opening):
            resumes = entry_from_json(self._load(opening), []).resumes
        for name in (*resumes, entry_id):
            self._write_end(name, done, status)

    def enter_past(self, use: Use, done: int, status: str = "finished") -> None:
        """Enter what was done already, once: it is paid, so that no total can refuse it."""
        with self.files.locked():
            run_id, before = use.run_id, self.entries()
            if any(entry.run_id == run_id for entry in before):
                return
            self._write_end(self._open(use, len(before)).id, done, status)

    def set_total(self, epsilon: float, delta: float | None = None, force: bool = False) -> Total:
        """Bound what each group of people may ever pay. Best before the first use: a filter's
        theorem is about a total that no result has influenced. δ is by default that of the total
        that is set, else 1e-6."""
        if delta is None:
            current = self.total()
            delta = current.delta if current else TOTAL_DELTA
        if not (0 < epsilon < math.inf and 0 < delta < 1):
            raise UserError(f"total epsilon {epsilon:g}, delta {delta:g}: give ε > 0 and 0 < δ < 1")
        wanted = ledger_cost.total_of(epsilon, delta)
        with self.files.locked():
            current = self.total()
            if current == wanted:
                return wanted
            if current is not None and not force:
                raise UserError(
                    f"the ledger {self.files.name} has a total of ε = {current.epsilon:g} at "
                    f"δ = {current.delta:.3g}; changing it to {epsilon:g} at {delta:.3g} "
                    f"needs force (dpfp ledger set --force)"
                )
            event = {"set_at": _now(), "who": _who(), "total": dataclasses.asdict(wanted)}
            # Of two that are set at once, one has the number; the other one is refused.
            self.files.write_json(f"{TOTALS}/{len(self.files.names(TOTALS)):06d}.json", event)
        return wanted

    # --- reading ---

    def total(self) -> Total | None:
        """The last that was set."""
        names = self.files.names(TOTALS)
        if not names:
            return None
        with self.files.intact(f"{TOTALS}/{names[-1]}"):
            facts = self._load(f"{TOTALS}/{names[-1]}")["total"]
            return Total(facts["epsilon"], facts["delta"], tuple(facts["orders"]))

    def entries(self) -> list[Entry]:
        """All, oldest first. A damaged file is an error: left out, it would cost nothing."""
        ends: dict[str, list[str]] = {}
        openings = []
        for name in self.files.names(ENTRIES):
            entry_id, _, rest = name.partition(".")
            if rest == "json":
                openings.append(name)
            else:
                ends.setdefault(entry_id, []).append(f"{ENTRIES}/{name}")
        lost = sorted(ends.keys() - {name.removesuffix(".json") for name in openings})
        if lost:
            raise UserError(
                f"entry {lost[0]} of the ledger {self.files.name} has an end but no beginning; "
                f"restore {ENTRIES}/{lost[0]}.json from a backup"
            )
        parsed = []
        for name in openings:
            with self.files.intact(f"{ENTRIES}/{name}"):
                own_ends = [self._load(end) for end in ends.get(name.removesuffix(".json"), [])]
                parsed.append(entry_from_json(self._load(f"{ENTRIES}/{name}"), own_ends))
        missing = max((entry.before + 1 for entry in parsed), default=0) - len(parsed)
        if missing > 0:
            raise UserError(
                f"{missing} or more entries are gone from the ledger {self.files.name}; restore "
                f"its folder {ENTRIES!r} from a backup: without them the sum would be too small"
            )
        return sorted(parsed, key=lambda entry: (entry.opened_at, entry.id))

    def groups(self, records_per_person: int = 1) -> list[Spent]:
        entries = self.entries()  # before the links: see the proof
        group_of = self.people.groups(entry.use.people for entry in entries)
        return [
            self._sum_up(entries, group, group_of, records_per_person)
            for group in dict.fromkeys(group_of[entry.use.people] for entry in entries)
        ]

    def spent(self, people: str) -> Spent:
        """What the group that data set `people` belongs to has paid."""
        entries = self.entries()
        group_of = self.people.groups([people, *(entry.use.people for entry in entries)])
        return self._sum_up(entries, group_of[people], group_of)

    def preview(self, uses: Sequence[Use]) -> Spent:
        """What the people of `uses` would have paid after them; nothing is written."""
        entries = self.entries()
        people = uses[0].people
        new = [
            Entry(f"{use.run_id}-{number}", _now(), _who(), use, before=len(entries) + number)
            for number, use in enumerate(uses)
        ]
        names = [people, *(entry.use.people for entry in entries)]
        group_of = {people: people, **self.people.groups(names)}
        return self._sum_up([*entries, *new], group_of[people], group_of)

    def find(self, texts: ManyTexts) -> str | None:
        """A known data set that has one of these texts; unlike `register`, writes nothing."""
        return next(iter(self.people.shared(texts)), None)

    def show_without_privacy(self, texts: ManyTexts, method: str, plan_hash: str) -> int:
        """Enter that these texts' records are about to be scored exactly, hence without privacy.

        Returns how many of the texts are private records of this ledger. A total refuses them.
        """
        shared = self.people.shared(texts)
        if not shared:
            return 0
        group_of = self.people.groups()
        one_set_a_group = {group_of[name]: name for name in shared}.values()
        most, total = max(shared.values()), self.total()
        if total is not None:
            raise UserError(
                f"{most:,} of these {len(texts):,} texts are private records of the ledger "
                f"{self.files.name}, whose total is ε = {total.epsilon:g}; exact scores of them "
                f"have no privacy (ε = ∞): take their rows out of the file"
            )
        for name in one_set_a_group:
            use = Use(
                purpose="evaluation",
                plan_hash=plan_hash,
                method=f"evaluation of {method}",
                people=name,
                records=shared[name],
                steps=1,
                parts=(),
                adjacency="zero_out",
                labels_protected=False,
                guarantee="none",
                delta=None,
                run="evaluation",
            )
            self.end(self.begin(use).id, 1)
        return most

    def exists(self) -> bool:
        return bool(self.files.names(ENTRIES) or self.files.names(TOTALS))

    def to_json(self) -> list[dict[str, Any]]:
        return [group.to_json() for group in self.groups()]

    # --- inside ---

    def _sum_up(
        self,
        entries: Sequence[Entry],
        group: str,
        group_of: dict[str, str],
        records_per_person: int = 1,
    ) -> Spent:
        own = [entry for entry in entries if group_of[entry.use.people] == group]
        data_sets = sorted(name for name, its in group_of.items() if its == group)
        spent = sum_up(own, group, data_sets, self.total(), self.delta, records_per_person)
        return dataclasses.replace(spent, dev_rows=self.people.dev_rows(data_sets))

    def _refusal(self, new: Sequence[Entry]) -> str | None:
        """Why `new`, which are written already, must not go on; None if they may."""
        entries = self.entries()
        ids = {entry.id for entry in new}
        if ids - {entry.id for entry in entries}:
            return f"the ledger {self.files.name} does not show what was just written to it"
        total = self.total()
        if total is None:
            return None
        group_of = self.people.groups(entry.use.people for entry in entries)
        for one in dict.fromkeys(group_of[entry.use.people] for entry in new):
            group = [entry for entry in entries if group_of[entry.use.people] == one]
            if reason := refusal(group, ids, total, self.files.name):
                return reason
        return None

    def _open(self, use: Use, before: int, resumes: tuple[str, ...] = ()) -> Entry:
        name = f"{use.run_id}-{secrets.token_hex(6)}"
        entry = Entry(name, _now(), _who(), use, resumes, before)
        self.files.write_json(f"{ENTRIES}/{name}.json", opening_to_json(entry))
        return entry

    def _write_end(self, entry_id: str, done: int, status: str) -> None:
        event = {"done": done, "status": status, "ended_at": _now(), "who": _who()}
        self.files.write_json(f"{ENTRIES}/{entry_id}.end.{secrets.token_hex(4)}.json", event)

    def _load(self, name: str) -> Any:
        if name not in self._read:
            self._read[name] = self.files.read_json(name)
        return self._read[name]


def open_ledger(
    place: "str | Path | Ledger | None" = None,
    total_epsilon: float | None = None,
    total_delta: float | None = None,
) -> Ledger:
    """The ledger that a command uses; a total that it names is set if none is."""
    ledger = place if isinstance(place, Ledger) else Ledger(place)
    if total_epsilon is not None:
        ledger.set_total(total_epsilon, total_delta)
    elif total_delta is not None:
        raise UserError(f"total delta {total_delta:g} is given without a total epsilon")
    return ledger


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _who() -> str:
    return f"{user_name()}@{socket.gethostname()}"
