"""What a sweep found: its best setting in words, how sure that is, and what failed.

The best was picked by the very scores that are shown, so they flatter it a little. Whether it is
told apart from the next is a paired test over dev rows and seeds, Holm over all other settings.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from dpfp_ray.plan.values import ALIASES
from dpfp_ray.reports.headline import accuracy_text
from dpfp_ray.reports.tables import Entry, Table, build, duration, number, text
from dpfp_ray.results.cells import Cell, once_each
from dpfp_ray.results.paired import holm
from dpfp_ray.results.runs import Run, correct_answers
from dpfp_ray.results.statistics import LEVEL, compare_predictions
from dpfp_ray.results.study import varied_fields
from dpfp_ray.system.errors import UserError

SYMBOLS = {name: symbol for symbol, name in ALIASES.items() if len(symbol) == 1}


@dataclass(frozen=True)
class SweepOutcome:
    """The trials of one sweep, by setting; repetitions with other seeds are one setting."""

    all_runs: Sequence[Run]

    @cached_property
    def runs(self) -> list[Run]:
        return [run for run in self.all_runs if not run.record["audit"]]

    @property
    def searched(self) -> bool:
        """Whether these are the trials of one method's search, and no comparison."""
        sweeps = {(run.row["sweep"], run.method, run.task, run.model) for run in self.runs}
        return len(sweeps) == 1 and len(self.settings) > 2 and self.runs[0].row["sweep"] is not None

    @cached_property
    def varied(self) -> list[str]:
        return varied_fields(run.row for run in self.runs)

    @cached_property
    def settings(self) -> list[Cell]:
        """The best mean first; of equal ones, the one that was asked for first."""
        by_setting: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.scored:
                by_setting.setdefault(run.setting, []).append(run)
        cells = [Cell(same[0].key, once_each(same)) for same in by_setting.values()]
        return sorted(cells, key=lambda cell: -cell.accuracy)

    @property
    def best(self) -> Cell | None:
        return next(iter(self.settings), None)

    @property
    def best_plan(self) -> dict[str, Any]:
        if self.best is None:
            raise UserError("no trial of this sweep has finished; there is no best setting")
        return dict(self.best.first.record["plan"])

    @cached_property
    def p_next(self) -> float | None:
        """The p-value of the best against the next, for all the settings that the best beat."""
        tested = [cell for cell in self.settings if correct_answers(cell.runs) is not None]
        if len(tested) < 2 or tested[0] is not self.best:
            return None
        best, *others = tested
        p_values = []
        for other in others:
            answers = {
                str(at): [run.answers for run in cell.runs if run.answers is not None]
                for at, cell in enumerate((best, other))
            }
            try:
                p_values.append(compare_predictions(answers).pairs[0].p)
            except UserError:  # answers to other dev rows
                return None
        return float(holm(np.array(p_values))[0])

    def setting_text(self, row: Mapping[str, Any]) -> str:
        """Such as B = 256, M = 16, learning rate = 0.001."""
        words = [
            f"{SYMBOLS.get(name, name.replace('_', ' '))} = {short(row[name])}"
            for name in self.varied
            if row.get(name) is not None
        ]
        return ", ".join(words) or "the one setting"

    @property
    def headline(self) -> str:
        """The best setting, and whether the next is as good."""
        if self.best is None:
            return "No trial of this sweep has finished yet."
        at = f"{self.best.title} at {self.best.budget}" if self.best.budget else self.best.title
        setting = self.setting_text(self.best.first.row)
        if self.p_next is None:
            standing = "not tested against the next"
        else:
            standing = f"{'told apart' if self.p_next <= LEVEL else 'not told apart'} from the next"
        return (
            f"{at}, best of {len(self.settings)} settings: {setting}: {accuracy_text(self.best)}; "
            f"{standing}."
        )

    @property
    def lines(self) -> list[str]:
        """For people, at the end of a sweep."""
        best = self.best
        if best is None:
            return ["No trial finished.", *self.lost_lines]
        first = f"Best of {len(self.settings)} settings: {self.setting_text(best.first.row)}"
        lines = [f"{first}: {accuracy_text(best)}{self.majority_text(best)}"]
        if len(self.settings) > 1:
            next_best = self.settings[1]
            lines.append(
                f"Next: {self.setting_text(next_best.first.row)}: {accuracy_text(next_best)}; "
                f"{self.verdict}"
            )
        seconds = sum(run.record["trial"].get("seconds") or 0.0 for run in self.runs)
        lines.append(
            f"{len(self.runs)} trials took {duration(seconds).text} between them. The best was "
            "picked by these scores, which flatters it."
        )
        return [*lines, *self.lost_lines]

    @property
    def verdict(self) -> str:
        if self.p_next is None:
            return "not tested against each other"
        call = "told apart" if self.p_next <= LEVEL else "not told apart"
        few = "" if len(self.settings[0].runs) > 1 else ", one seed each"
        return f"{call} (paired test, p = {self.p_next:.2g}{few})"

    def majority_text(self, cell: Cell) -> str:
        if cell.majority is None:
            return ""
        worse = " — no better than that" if cell.accuracy <= cell.majority else ""
        return f" (always the largest class: {100 * cell.majority:.1f}%{worse})"

    @property
    def lost_lines(self) -> list[str]:
        """How many trials have no result, by reason."""
        lost = [run for run in self.runs if not run.scored]
        reasons = Counter(
            f"{run.row['status']}: {run.row['error'] or 'no reason on record'}" for run in lost
        )
        return [
            f"{count} of {len(self.runs)} trials {why}" for why, count in reasons.most_common(5)
        ]


def settings_table(outcome: SweepOutcome) -> Table:
    """The settings of a sweep, the best first: what was varied, the score, and why."""
    columns: dict[str, Callable[[Cell], Entry]] = {
        SYMBOLS.get(name, name.replace("_", " ")): partial(field, name=name)
        for name in outcome.varied
    }
    columns |= {
        "Accuracy (%)": lambda cell: Entry(accuracy_text(cell), 100 * cell.accuracy),
        "Noise ÷ signal": lambda cell: number(cell.average("noise_to_signal"), ".3g"),
    }
    notes = [*outcome.lines[2:], "Noise ÷ signal: what the noise adds beside what the records say."]
    title = f"Settings of {outcome.runs[0].row['sweep']}"
    return build("settings", title, outcome.settings, columns, notes=notes)


def field(cell: Cell, name: str) -> Entry:
    value = cell.first.row[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return text(value)
    return number(value, ",d" if isinstance(value, int) else ".3g")


def next_command(storage: str) -> str:
    """What trains the best setting and keeps its model."""
    return f"dpfp train --best {shlex.quote(storage)} --output {shlex.quote(storage + '-best')}"


def short(value: Any) -> str:
    if isinstance(value, float):
        return format(value, ".3g").replace("e-0", "e-")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
