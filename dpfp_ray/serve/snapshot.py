"""What is on storage now: the records, and the reports made of them beside the requests."""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any
from uuid import uuid4

from dpfp_ray.data.storage import Found
from dpfp_ray.plan.errors import UserError
from dpfp_ray.report.ledger import Paid, known_ledger, spent_on
from dpfp_ray.report.page import Report, draw_figures, report_of
from dpfp_ray.results import query, rows, store
from dpfp_ray.results.cells import Cell, cells_of
from dpfp_ray.results.runs import Run, read_runs

# Object stores give times in whole seconds: a file this young may change and keep its time.
YOUNG, UNSETTLED = 3.0, -1.0
EVERY = 1.0  # seconds between two looks at storage, at least
PATIENCE = 3.0  # seconds that a request waits for a look, or for the first report
LEDGER_SECONDS = 60.0  # the ledger may change while no record does
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
        if any(name in SCORES or name.startswith(rows.SPLIT) for name in names):
            return [replace(cell, untested=BY_SCORE) for cell in cells_of(chosen)]
        kept = {id(run) for run in chosen}
        left_out = {
            (run.key, run.setting)
            for run in self.runs
            if id(run) not in kept and run.scored and not run.tuning and not run.part("audit")
        }
        return [
            replace(cell, untested=IN_PART if (cell.key, cell.first.setting) in left_out else "")
            for cell in cells_of(chosen)
        ]


class CachedStore(store.Store):
    """A store that reads a file again only if it changed: 50,000 records take 37 s to read."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.saved: dict[str, tuple[float, store.Record]] = {}  # by path, with its time
        self.reads = self.changes = 0

    def records(self) -> list[store.Record]:
        self._present: set[str] = set()
        records = super().records()
        for path in set(self.saved) - self._present:
            del self.saved[path]
            self.changes += 1
        return records

    def _read(self, file: Found) -> store.Record | None:
        self._present.add(file.path)
        time_read, saved = self.saved.get(file.path, (UNSETTLED, None))
        if saved is None or time_read != file.modified:
            self.reads += 1
            record = super()._read(file)
            if record is None:
                # A record that is half written does not replace a whole one.
                return None if saved is None else dict(saved)
            if record != saved:
                self.changes += 1
            running = rows.section(record, "trial").get("status") == "running"
            young = time.time() - file.modified < YOUNG or running  # a clock may be wrong
            self.saved[file.path] = (UNSETTLED if young else file.modified), record
            saved = record
        return dict(saved)  # the store renames records that share an id


class Background:
    """Does one thing at a time in a thread, and then rests `rest` times as long as that took."""

    def __init__(self, rest: int) -> None:
        self.rest = rest
        self.took = self._next = 0.0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, work: Callable[..., None], *arguments: Any) -> threading.Thread | None:
        """Begin, unless it rests; the thread that is at work, if any."""
        with self._lock:
            if self._thread is None and time.monotonic() >= self._next:
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


class LiveRecords:
    """Snapshots of one store, for any number of threads.

    Storage is looked at only while requests come. A request waits for a short look, so that it sees
    what was written before it came; during a long one it gets the last snapshot.
    """

    def __init__(self, location: str) -> None:
        self.store = CachedStore(location)
        self.name = self.store.name
        self.looked_at: datetime | None = None
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
            self._error, self.looked_at = None, datetime.now(UTC)
        except UserError as error:
            self._error = error


class LiveReport:
    """The report of the runs that `where` matches, made beside the requests.

    The last one is shown while the next one is made. Its tables come first, its figures later.
    """

    def __init__(self, title: str, command: str, ledger: str | None, where: str | None) -> None:
        self.title, self.command, self.ledger, self.where = title, command, ledger, where
        self.report: Report | None = None
        self.number = 0  # of reports so far, to tell them apart
        self.drawing = False
        self._version = ""
        self._scores: list[tuple[Any, ...]] | None = None  # what the figures show
        self._made_at = 0.0
        self._first = threading.Event()
        self.background = Background(rest=4)

    def renew(self, snapshot: Snapshot) -> None:
        """Start a newer report if there may be one; only the first tables are waited for."""
        old = time.monotonic() - self._made_at > LEDGER_SECONDS
        due = snapshot.status == "ready" and (old or snapshot.version != self._version)
        if due and self.background.start(self._make, snapshot) is not None:
            self._first.wait(PATIENCE)

    def _make(self, snapshot: Snapshot) -> None:
        runs, cells = snapshot.choose(self.where), snapshot.cells(self.where)
        report = report_of(runs, cells, self.command, self.title, paid=self._paid(runs))
        scores = [(run.row["id"], run.row["accuracy"]) for run in runs if run.scored]
        last, changed = self.report, scores != self._scores
        self._made_at, self.drawing = time.monotonic(), changed
        if last is None or (last.paid, self._version) != (report.paid, snapshot.version):
            self._publish(replace(report, figures=last.figures if last else ()))
        self._version, self._scores = snapshot.version, scores
        if changed:
            try:
                figures = draw_figures(report, runs, cells)
            finally:
                self.drawing = False
            self._publish(replace(report, figures=figures))

    def _publish(self, report: Report) -> None:
        self.report = report
        self.number += 1
        self._first.set()

    def _paid(self, runs: Sequence[Run]) -> Paid:
        """A ledger that cannot be read costs the page its sum, and nothing else."""
        try:
            book = known_ledger(self.ledger)
            return Paid() if book is None else spent_on(book, [run.record for run in runs])
        except UserError:
            return Paid()
