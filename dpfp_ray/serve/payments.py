"""What the people behind the shown records have paid in all, as their ledger says."""

import threading
import time

from dpfp_ray.plan.errors import UserError
from dpfp_ray.report.ledger import Paid, known_ledger, spent_on
from dpfp_ray.serve.snapshot import LARGE, Snapshot

EVERY = 30.0  # seconds; a sum may take some


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
            if version != shown.version or time.monotonic() - at > EVERY:
                try:
                    ledger = known_ledger(self.place)
                    records = [run.record for run in shown.runs]
                    self._known = Paid() if ledger is None else spent_on(ledger, records)
                except UserError:
                    self._known = Paid()
                self._looked = (time.monotonic(), shown.version)
            return self._known
