"""What is on storage now, read again only where it changed."""

import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from uuid import uuid4

from dpfp_ray.data.storage import Found
from dpfp_ray.results import rows, store
from dpfp_ray.results.cells import Cell, cells_of
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import Key, Run, read_runs

# Object stores tell times in seconds: a file that is as young as this may change and look the same.
YOUNG = 3.0
# However many ask, storage is looked at so often at most.
EVERY = 1.0
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
    """Snapshots of one store for any number of threads."""

    def __init__(self, location: str) -> None:
        self.store = CachedStore(location)
        self.name = self.store.name
        self._nonce = uuid4().hex[:8]
        self._lock = threading.Lock()
        self._looked = -EVERY
        self._changes = -1
        self._now = Snapshot(f"{self._nonce}-none", ())

    def now(self) -> Snapshot:
        with self._lock:
            if time.monotonic() - self._looked >= EVERY:
                self._look()
                self._looked = time.monotonic()
            return self._now

    def _look(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            records = self.store.records()
        broken = tuple(str(warning.message) for warning in caught)
        if self.store.changes != self._changes or broken != self._now.broken:
            self._changes = self.store.changes
            version = f"{self._nonce}-{self._changes}-{len(broken)}"
            self._now = Snapshot(version, read_runs(records), broken)
