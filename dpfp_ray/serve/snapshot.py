"""What is on storage now, read again only where it changed, and what the people behind the shown
records have paid in all, as their ledger says.
"""

import hashlib
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from uuid import uuid4

from dpfp_ray.data.storage import Found
from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError
from dpfp_ray.report.ledger import Paid, known_ledger, spent_on
from dpfp_ray.results import rows, store
from dpfp_ray.results.cells import Cell, cells_of
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import Key, Run, read_runs

# Object stores tell times in seconds: a file that is as young as this may change and look the same.
YOUNG = 3.0
# However many ask, storage is looked at so often at most; large stores less often, so that looking
# takes at most one part in so many of the time.
EVERY = 1.0
SHARE = 10
LARGE = 2_000  # records; no request waits until more of them are read
FIRST = 1.0  # seconds that requests wait for the first reading of a large store
FILTERS = 8  # snapshots that are kept
READING = "the records are still being read; this page renews itself"
# Whoever picks runs by what came out may find a winner among equals.
BY_SCORE = "the filter picks runs by their scores: nothing is tested"
IN_PART = "the filter leaves out some runs of a method: nothing is tested"


@dataclass(frozen=True)
class Snapshot:
    """All records at one moment; `version` changes whenever one of them does.

    Of a filtered one, `whole` is what it was filtered from, and `by_score` whether by results.
    """

    version: str
    runs: Sequence[Run]  # in the report's order
    broken: Sequence[str] = ()
    whole: "Snapshot | None" = None
    by_score: bool = False
    # The runs that match a question, in its order; as true as the snapshot, which never changes.
    answers: dict[Hashable, list[Run]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def loading(self) -> bool:
        """Whether nothing has been read yet: no run is known, and there may be many."""
        return self.broken == (READING,)

    @cached_property
    def rows(self) -> list[rows.Row]:
        return [dict(run.row) for run in self.runs]

    @cached_property
    def columns(self) -> list[str]:
        return rows.columns(self.rows)

    @cached_property
    def by_id(self) -> Mapping[str, Run]:
        return {str(run.row["id"]): run for run in self.runs}

    @cached_property
    def cells(self) -> list[Cell]:
        return [replace(cell, untested=self._doubt(cell)) for cell in cells_of(self.runs)]

    @cached_property
    def contests(self) -> list[Contest]:
        return contests_of(self.cells)

    @cached_property
    def running(self) -> int:
        return sum(run.row["status"] == "running" for run in self.runs)

    @cached_property
    def refuted(self) -> list[Run]:
        return [run for run in self.runs if run.refuted]

    @cached_property
    def figure_key(self) -> str:
        """What figures of these runs show, in short."""
        scored = [(run.row["id"], run.row["accuracy"]) for run in self.runs if run.scored]
        facts = to_json([scored, self.by_score]).encode("utf-8", "replace")
        return hashlib.blake2b(facts, digest_size=8).hexdigest()

    def work_out(self) -> None:
        """All that a page asks for, before a request has to wait for it."""
        for part in (self.columns, self.by_id, self.contests, self.running, self.refuted):
            del part
        self.figure_key  # noqa: B018

    def only(self, runs: Sequence[Run], by_score: bool = False) -> "Snapshot":
        """The same moment, of some of the runs, in the report's order."""
        chosen = {id(run) for run in runs}
        kept = [run for run in self.runs if id(run) in chosen]
        return Snapshot(self.version, kept, self.broken, self, by_score)

    def _doubt(self, cell: Cell) -> str:
        """Why the runs of a filtered cell are no fair sample; empty: they are."""
        if self.whole is None:
            return ""
        if self.by_score:
            return BY_SCORE
        kept = {id(run) for run in self.runs}
        missing = any(
            run.scored and not run.tuning and not run.part("audit")
            for run in self.whole.by_setting.get((cell.key, cell.first.setting), ())
            if id(run) not in kept
        )
        return IN_PART if missing else ""

    @cached_property
    def by_setting(self) -> Mapping[tuple[Key, str], Sequence[Run]]:
        found: dict[tuple[Key, str], list[Run]] = {}
        for run in self.runs:
            found.setdefault((run.key, run.setting), []).append(run)
        return found


@dataclass(frozen=True)
class _Known:
    modified: float
    firm: bool  # a change would show in `modified`
    record: store.Record


class CachedStore(store.Store):
    """A store that keeps what it has read, for as long as the file is the same."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.known: dict[str, _Known] = {}
        self.read_count = self.changes = 0

    def records(self) -> list[store.Record]:
        self._seen: set[str] = set()
        found = super().records()
        for path in set(self.known) - self._seen:
            del self.known[path]
            self.changes += 1
        return found

    def look(self) -> tuple[list[store.Record], tuple[str, ...]]:
        """The records, and what is wrong with others."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            records = self.records()
        return records, tuple(str(warning.message) for warning in caught)

    def _read(self, file: Found) -> store.Record | None:
        self._seen.add(file.path)
        known = self.known.get(file.path)
        if known is None or not known.firm or known.modified != file.modified:
            self.read_count += 1
            record = super()._read(file)
            if record is None:
                # Half a record never replaces a whole one: it is there again in a moment.
                return None if known is None else dict(known.record)
            if known is None or record != known.record:
                self.changes += 1
            trial = record.get("trial")
            status = trial.get("status") if isinstance(trial, Mapping) else None
            firm = time.time() - file.modified > YOUNG and status != "running"
            known = self.known[file.path] = _Known(file.modified, firm, record)
        return dict(known.record)  # `distinct` renames records that share an id


class LiveRecords:
    """Snapshots of one store for any number of threads.

    Storage is looked at by a thread beside the requests. They wait for it where there is little to
    read, so that they see what was written before they came; of a large store they get what is
    known.
    """

    def __init__(self, location: str) -> None:
        self.store = CachedStore(location)
        self.name = self.store.name
        self._nonce = uuid4().hex[:8]
        self._lock = threading.Lock()
        self._looking: threading.Thread | None = None
        self._next_look = 0.0
        self._listed = threading.Event()
        self._large = False
        self._failed: UserError | None = None
        self._changes = -1
        self._now = Snapshot(f"{self._nonce}-none", (), (READING,))

    def now(self) -> Snapshot:
        with self._lock:
            if self._looking is None and time.monotonic() >= self._next_look:
                self._looking = threading.Thread(target=self._look)  # no daemon: see `figures`
                self._looking.start()
            looking = self._looking
        if looking is not None:
            if not self._listed.wait(FIRST):
                return self._now
            if not self._large:
                looking.join()
            elif not self._now.runs:
                looking.join(FIRST)
        if self._failed is not None:
            raise self._failed
        return self._now

    def at_hand(self) -> Snapshot | None:
        """What `now` would give without any waiting; None if it would wait, look or fail."""
        with self._lock:
            due = self._looking is None and time.monotonic() >= self._next_look
            waits = self._looking is not None and not (self._large and self._now.runs)
            return None if due or waits or self._failed is not None else self._now

    def _look(self) -> None:
        began = time.monotonic()
        failed = None
        try:
            self._large = len(self.store.files.find()) > LARGE
            self._listed.set()
            self._read()
        except UserError as error:
            failed = error
        finally:
            self._listed.set()
            with self._lock:
                took = time.monotonic() - began if self._large else 0.0
                self._next_look = time.monotonic() + max(EVERY, SHARE * took)
                self._failed = failed
                self._looking = None

    def _read(self) -> None:
        records, broken = self.store.look()
        if self.store.changes != self._changes or broken != self._now.broken:
            self._changes = self.store.changes
            version = f"{self._nonce}-{self._changes}-{len(broken)}"
            new = Snapshot(version, read_runs(records), broken)
            with suppress(Exception):  # the request that asks for it will say what is wrong
                new.work_out()
            self._now = new


class Filtered:
    """The last few filtered snapshots: what they worked out is not worked out again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bool, bytes], Snapshot] = OrderedDict()

    def of(self, now: Snapshot, runs: Sequence[Run], by_score: bool) -> Snapshot:
        names = "\n".join(sorted(str(run.row["id"]) for run in runs)).encode("utf-8", "replace")
        key = now.version, by_score, hashlib.blake2b(names).digest()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = now.only(runs, by_score)
                while len(self._kept) > FILTERS:
                    self._kept.popitem(last=False)
            return self._kept[key]


SUM_EVERY = 30.0  # seconds; a sum may take some


class Payments:
    """Sums for any number of threads; a ledger that cannot be read costs only the panel."""

    def __init__(self, place: str | None) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._looked = (float("-inf"), "")
        self._known = Paid()

    def now(self, shown: Snapshot) -> Paid:
        """Of a large store, what is known; it is summed up beside the requests."""
        if len(shown.runs) <= LARGE:
            return self._sum(shown)
        if not self._lock.locked():
            threading.Thread(target=self._sum, args=[shown]).start()
        return self._known

    def _sum(self, shown: Snapshot) -> Paid:
        with self._lock:
            at, version = self._looked
            if version != shown.version or time.monotonic() - at > SUM_EVERY:
                try:
                    ledger = known_ledger(self.place)
                    records = [run.record for run in shown.runs]
                    self._known = Paid() if ledger is None else spent_on(ledger, records)
                except UserError:
                    self._known = Paid()
                self._looked = (time.monotonic(), shown.version)
            return self._known
