"""What is on storage now: the records, and the reports made of them beside the requests."""

import logging
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import count
from typing import Any
from uuid import uuid4

from dpfp_ray.reports.ledger import Paid, known_ledger, spent_on
from dpfp_ray.reports.page import Report, draw_figures, report_of
from dpfp_ray.reports.plots import Drawing
from dpfp_ray.results import query, rows, store
from dpfp_ray.results.cells import Cell, cells_of
from dpfp_ray.results.runs import Run, read_runs
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import Found
from dpfp_ray.system.terminal import queue_seconds
from dpfp_ray.training.record import Record

# Object stores give times in whole seconds: a file this young may change and keep its time.
YOUNG, UNSETTLED = 3.0, -1.0
EVERY = 1.0  # seconds between two looks at storage, at least
PATIENCE = 3.0  # seconds that a request waits for a look, or for the first report
LEDGER_SECONDS = 60.0  # the ledger may change while no record does
TABLE_SLOTS, DRAWING_SLOTS, NUMBERS = threading.Semaphore(2), threading.Semaphore(1), count(1)
SCORES = ("accuracy", "f1", "matthews", "calibration_error")
# A reader who picks runs by their scores may see a winner among equals.
BY_SCORE = "the filter picks runs by their scores: nothing is tested"
IN_PART = "the filter leaves out some runs of a method: nothing is tested"


@dataclass(frozen=True)
class Snapshot:
    """All runs at one moment, in the report's order. `version` changes whenever a record does."""

    version: str
    runs: Sequence[Run]
    warnings: Sequence[str] = ()
    status: str = "ready"  # or "loading", until the first look has ended

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
    def running(self) -> int:
        return sum(run.row["status"] == "running" for run in self.runs)

    def seconds_left(self, now: float) -> float | None:
        """Until every sweep that runs has ended; None if that is not known."""
        batches: dict[str, list[Run]] = {}
        for run in self.runs:
            batches.setdefault(run.record["trial"].get("batch", ""), []).append(run)
        ends = []
        for runs in batches.values():
            running = [run for run in runs if run.row["status"] == "running"]
            if running:
                planned = max(run.record["trial"].get("planned", 0) for run in running)
                wholes = [run.whole_seconds for run in runs if run.row["status"] != "failed"]
                durations = [seconds for seconds in wholes if seconds]
                each = statistics.fmean(durations) if durations else None
                lefts = [run.seconds_left(now) for run in running]
                ends.append(queue_seconds(lefts, max(0, planned - len(runs)), each))
        known_ends = [seconds for seconds in ends if seconds is not None]
        return max(known_ends) if known_ends and len(known_ends) == len(ends) else None

    def choose(self, where: str | None, sort: str | None = None) -> list[Run]:
        """The runs that `where` matches, in the order of `sort`."""
        if self.status == "loading":  # its columns are not known yet
            return []
        matching = query.filter_rows(self.rows, where, self.columns)
        ordered = query.sort_rows(matching, sort, self.columns)
        return [self.by_id[str(row["id"])] for row in ordered]

    def cells(self, where: str | None) -> list[Cell]:
        """The cells of the matching runs; those that are no fair sample say why."""
        chosen = self.choose(where)
        if where is None:
            return cells_of(chosen)
        names = query.columns_in(where, self.columns)
        by_score = any(name in SCORES or name.startswith(rows.SPLIT) for name in names)
        kept = {id(run) for run in chosen}
        left_out = {
            (run.key, run.setting)
            for run in self.runs
            if id(run) not in kept and run.scored and not run.tuning and not run.record["audit"]
        }

        def doubt(cell: Cell) -> str:
            in_part = (cell.key, cell.first.setting) in left_out
            return BY_SCORE if by_score else IN_PART if in_part else ""

        return [replace(cell, untested=doubt(cell)) for cell in cells_of(chosen)]


class CachedStore(store.Store):
    """A store that reads a file again only if it changed: 50,000 records take 37 s to read."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.saved: dict[str, tuple[float, Record]] = {}  # by path, with its time
        self.changes = 0

    def records(self) -> list[Record]:
        self._present: set[str] = set()
        records = super().records()
        for path in set(self.saved) - self._present:
            del self.saved[path]
            self.changes += 1
        return records

    def _read(self, file: Found) -> Record | None:
        self._present.add(file.path)
        time_read, saved = self.saved.get(file.path, (UNSETTLED, None))
        if saved is None or time_read != file.modified:
            record = super()._read(file)
            if record is None:
                # A record that is half written does not replace a whole one.
                return None if saved is None else copy(saved)
            if record != saved:
                self.changes += 1
            running = record["trial"].get("status") == "running"
            young = time.time() - file.modified < YOUNG or running  # a clock may be wrong
            self.saved[file.path] = (UNSETTLED if young else file.modified), record
            saved = record
        return copy(saved)  # the store renames records that share an id


class Background:
    """Does one thing at a time in a thread, and then rests `rest` times as long as that took.
    All that share `slots` start no more threads than these, however much is asked."""

    def __init__(self, rest: int, slots: threading.Semaphore | None = None) -> None:
        self.rest, self._slots = rest, slots or threading.Semaphore()
        self.took = self._next = 0.0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, work: Callable[..., None], *arguments: Any) -> threading.Thread | None:
        """Begin, unless it rests or no slot is free; the thread that is at work, if any."""
        with self._lock:
            idle = self._thread is None and time.monotonic() >= self._next
            if idle and self._slots.acquire(blocking=False):
                # No daemon: Python must not end in the middle of matplotlib.
                self._thread = threading.Thread(target=self._run, args=(work, *arguments))
                self._thread.start()
            return self._thread

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        began = time.monotonic()
        try:
            work(*arguments)
        except Exception:  # a record that cannot be shown must not end the service
            logging.getLogger(__name__).exception("%s failed", work)
        finally:
            with self._lock:
                self.took = time.monotonic() - began
                self._next = time.monotonic() + max(EVERY, self.rest * self.took)
                self._thread = None
            self._slots.release()


class LiveRecords:
    """Snapshots of one store, for any number of threads.

    Storage is looked at only while requests come. A request waits for a short look, so that it sees
    what was written before it came; during a long one it gets the last snapshot.
    """

    def __init__(self, location: str) -> None:
        self.store = CachedStore(location)
        self.looked_at: str | None = None  # in ISO form, UTC
        self.background = Background(rest=10)
        self._error: UserError | None = None
        self._prefix = uuid4().hex[:8]  # versions of another process are other versions
        self._snapshot = Snapshot(f"{self._prefix}-loading", (), status="loading")

    def now(self) -> Snapshot:
        look = self.background.start(self._look)
        if look is not None and self.background.took < PATIENCE:
            look.join(PATIENCE)
        if self._error is not None:
            raise self._error
        return self._snapshot

    def _look(self) -> None:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                records = self.store.records()
            # Other threads may warn of other things meanwhile.
            messages = tuple(m for w in caught if "no whole record" in (m := str(w.message)))
            version = f"{self._prefix}-{self.store.changes}-{len(messages)}"
            if version != self._snapshot.version:
                self._snapshot = Snapshot(version, read_runs(records), messages)
            self._error, self.looked_at = None, datetime.now(UTC).isoformat(timespec="seconds")
        except UserError as error:
            self._error = error


class LiveReport:
    """The report of the runs that `where` matches. The last one is shown while the next one is
    made beside the requests: first its tables, then its figures."""

    def __init__(self, title: str, command: str, ledger: str | None, where: str | None) -> None:
        self.title, self.command, self.ledger, self.where = title, command, ledger, where
        self.tables = Background(rest=4, slots=TABLE_SLOTS)
        self.drawings = Background(rest=10, slots=DRAWING_SLOTS)
        self._report: Report | None = None
        self._version, self._made_at, self._first = "", 0.0, threading.Event()
        self._figures: Sequence[Drawing] = ()
        self._sources: tuple[list[Run], list[Cell]] = [], []
        self._scores: tuple[object, ...] = ()  # what figures would show, and what they show
        self._drawn_scores: tuple[object, ...] = ()
        self.number = 0  # another one for each report

    @property
    def report(self) -> Report | None:
        return None if self._report is None else replace(self._report, figures=self._figures)

    @property
    def drawing(self) -> bool:
        return self._scores != self._drawn_scores

    def renew(self, snapshot: Snapshot) -> None:
        """Start a newer report if there may be one; only the first tables are waited for."""
        old = time.monotonic() - self._made_at > LEDGER_SECONDS
        due = snapshot.status == "ready" and (old or snapshot.version != self._version)
        if due and self.tables.start(self._make, snapshot) is not None:
            self._first.wait(PATIENCE)
        if self.drawing:
            self.drawings.start(self._draw)

    def _make(self, snapshot: Snapshot) -> None:
        runs, cells = self._sources = snapshot.choose(self.where), snapshot.cells(self.where)
        report = report_of(runs, cells, self.command, self.title, paid=self._paid(runs))
        last = None if self._report is None else (self._version, self._report.paid)
        self._scores = tuple((run.row["id"], run.row["accuracy"]) for run in runs if run.scored)
        self._report, self._version, self._made_at = report, snapshot.version, time.monotonic()
        if last != (snapshot.version, report.paid):
            self.number = next(NUMBERS)
        self._first.set()

    def _draw(self) -> None:
        scores, report = self._scores, self._report
        try:
            if report is not None:
                self._figures = draw_figures(report, *self._sources)
        finally:
            self._drawn_scores, self.number = scores, next(NUMBERS)

    def _paid(self, runs: Sequence[Run]) -> Paid:
        """A ledger that cannot be read costs the page its sum, and nothing else."""
        try:
            book = known_ledger(self.ledger)
            return Paid() if book is None else spent_on(book, [run.record for run in runs])
        except UserError:
            return Paid()
