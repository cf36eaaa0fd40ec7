"""The report's figures of what is there now, drawn beside the requests and kept."""

import hashlib
import threading
import time
from collections import OrderedDict

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.report.figures import all_figures, curve_of
from dpfp_ray.report.plots import Drawing, canvas, clean, finish, method_label, styles
from dpfp_ray.results.runs import ACCOUNTANT_NAMES, Run
from dpfp_ray.serve.snapshot import Snapshot

# Drawing takes at most one part in so many of the time, however fast trials end.
SHARE = 10
KEPT = 32  # curves of single trials
FILTERS = 8  # sets of figures beside that of all runs


class Figures:
    """`now` never waits: it gives what is drawn, and draws anew if results came in since.

    Figures are of the runs that a page shows: those of the last few filters are kept. While a
    filter's figures are being drawn, nothing is shown; after new results, the old figures are.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.version = 0
        self.busy = False
        self._kept: OrderedDict[str, list[Drawing]] = OrderedDict()
        self._latest = ""  # of all runs, as last drawn
        self._rest_until = 0.0
        self._lock = threading.Lock()

    @property
    def drawings(self) -> list[Drawing]:
        return self._kept.get(self._latest, [])

    def key(self, snapshot: Snapshot) -> str:
        return snapshot.figure_key

    def now(self, snapshot: Snapshot, everything: bool = False) -> list[Drawing]:
        """`everything`: these are all runs, whose figures stay until new ones are drawn."""
        key = self.key(snapshot)
        with self._lock:
            due = not self.busy and key not in self._kept and time.monotonic() >= self._rest_until
            if due and any(run.scored for run in snapshot.runs):
                self.busy = True
                # No daemon: Python must not end in the middle of matplotlib.
                threading.Thread(target=self._draw, args=(snapshot, key, everything)).start()
            return self._kept.get(key, self.drawings if everything else [])

    def find(self, name: str, key: str | None = None) -> Drawing | None:
        drawings = self.drawings if key is None else self._kept.get(key, self.drawings)
        return next((drawing for drawing in drawings if drawing.name == name), None)

    def _draw(self, snapshot: Snapshot, key: str, everything: bool) -> None:
        began = time.monotonic()
        drawn = self.drawings if everything else []
        try:
            drawn = all_figures(snapshot.cells, snapshot.runs, self.command, snapshot.contests)
        finally:  # records that cannot be drawn must not be tried again and again
            with self._lock:
                ended = time.monotonic()
                self._rest_until = ended + SHARE * (ended - began)
                self._kept[key] = drawn
                if everything:
                    self._kept.pop(self._latest if self._latest != key else "", None)
                    self._latest = key
                for old in [k for k in self._kept if k not in (key, self._latest)][:-FILTERS]:
                    del self._kept[old]
                self.busy = False
                self.version += 1


class TrialCurves:
    """One trial's accuracy, loss and ε against epochs, as SVG; drawn when asked for."""

    def __init__(self, command: str) -> None:
        self.command = command
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, run: Run) -> str | None:
        """What the picture shows, in short; None if there is nothing to draw."""
        if not curve_of(run):
            return None
        facts = [run.row["id"], run.record.get("history")]
        return hashlib.blake2b(to_json(facts).encode("utf-8", "replace"), digest_size=8).hexdigest()

    def svg(self, run: Run) -> bytes | None:
        key = self.key(run)
        if key is None:
            return None
        with self._lock:
            if key not in self._kept:
                self._kept[key] = draw_trial(run, self.command).svg
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]


def draw_trial(run: Run, command: str) -> Drawing:
    points = curve_of(run)
    look = styles([run.method])[run.method]
    with canvas(height=3.6) as (figure, axes):
        axes.plot([p[0] for p in points], [100 * p[1] for p in points], **look)
        axes.set_xlim(left=0)
        axes.set_xlabel("passes over the training data (epochs)")
        axes.set_ylabel("dev accuracy (%)")
        spent = [(0.0, 0.0), *((p[0], p[2]) for p in points if p[2] is not None)]
        if run.private and len(spent) > 1:
            right = axes.twinx()
            right.spines["right"].set_visible(True)
            right.grid(visible=False)
            right.plot([x for x, _ in spent], [y for _, y in spent], color="#555555", linestyle=":")
            right.set_ylim(bottom=0)
            accountant = str(run.row["accountant"])
            name = ACCOUNTANT_NAMES.get(accountant, accountant)
            right.set_ylabel(clean(f"ε{run.mark} spent, by {name} (dotted)", 60))
        title = clean(f"{method_label(run.method)}{run.mark} on {run.task}", 90)
        return finish(figure, "curves", title, "", command)
