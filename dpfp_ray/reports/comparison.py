"""A comparison for people and programs: its rows, the table in the terminal, and Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpfp_ray.privacy.statement import one_line
from dpfp_ray.reports.cell_tables import (
    accounting_table,
    cost_table,
    interval_text,
    noise_table,
    overview,
    pairs_table,
    scores_table,
    standing_of,
)
from dpfp_ray.reports.headline import headline, idle
from dpfp_ray.reports.tables import Table, show, to_markdown
from dpfp_ray.results.cells import Cell, by_key, cells_of, relative
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import Key, Run, read_runs
from dpfp_ray.system.terminal import print_prose, stdout
from dpfp_ray.training.dev_scores import RULES
from dpfp_ray.training.record import Record, Select

Row = dict[str, Any]
# Columns of flat rows that are the same for all seeds, and those that are averaged.
SHARED = ("guarantee", "epsilon_gdp", "epsilon_rdp", "epsilon_pld")
AVERAGED = (
    *("sigma", "noise_coordinates", "batch_size", "epochs", "learning_rate"),
    *("f1", "matthews", "calibration_error", "peak_memory_bytes", "prepare_seconds"),
    "train_seconds",
)
RETRAINED = "settings were tuned: each row is new runs of the best of as many settings."
BEST_EPOCH = "every run quotes its best epoch on dev (--select best), which flatters all of them."
MOST_PAIRS = 6  # more pairs are not read in a terminal; --wide shows them


@dataclass(frozen=True)
class Compared:
    """The records of a comparison, those that its settings were chosen by, and its audits'."""

    records: Sequence[Record]
    select: Select = "last"

    @cached_property
    def runs(self) -> list[Run]:
        return read_runs(self.records, self.select)

    @cached_property
    def cells(self) -> list[Cell]:
        return cells_of(self.runs)

    @cached_property
    def contests(self) -> list[Contest]:
        return contests_of(self.cells)

    @property
    def headline(self) -> str:
        return headline(self.contests, [run for run in self.runs if run.refuted])

    @property
    def overview(self) -> Table:
        return overview(self.cells, self.contests)

    @property
    def remarks(self) -> list[str]:
        remarks = [RETRAINED] if any(cell.tuning == "retrained" for cell in self.cells) else []
        best = any(cell.first.metrics.get("rule") == RULES["best"] for cell in self.cells)
        lost = sum(row["failed"] for row in self.rows)
        remarks += [BEST_EPOCH] if best else []
        remarks += idle(self.contests)
        return remarks + ([f"{lost} runs have no result; the rows leave them out."] if lost else [])

    @cached_property
    def rows(self) -> list[Row]:
        """One row for each (method, ε): means over seeds, also relative to non-private."""
        cells = {cell.key: cell for cell in self.cells}
        plain = next((c for c in self.cells if c.plain), None)
        rows = []
        for key, members in sorted(by_key(self.runs).items(), key=lambda item: order(item[0])):
            compared = [run for run in members if not run.tuning and not run.record["audit"]]
            if not compared:
                continue
            row: Row = {
                "task": members[0].row["task"],
                "method": key.method,
                "epsilon": key.epsilon,
                "runs": 0,
                "failed": sum(not run.scored for run in compared),
            }
            if key in cells:
                row |= self._facts(cells[key], plain)
            rows.append(row)
        return rows

    def _facts(self, cell: Cell, plain: Cell | None) -> Row:
        contests = [contest for contest in self.contests if cell in contest.ranked]
        audits = [run for run in (*cell.runs, *cell.others) if run.record["audit"]]
        seconds = [run.record["trial"].get("seconds") for run in cell.runs]
        rates = cell.rates
        facts: Row = {
            "runs": len(cell.runs),
            "accuracy": cell.accuracy,
            "accuracy_sd": cell.spread,
            "accuracy_interval": list(cell.interval) if cell.interval else None,
            "standing": standing_of(cell, contests) or None,
            "one_class": cell.one_class,
            "majority_accuracy": cell.majority,
            "settings_tried": cell.settings,
            "tuned": cell.tuning or None,
            "epoch": cell.first.metrics.get("rule"),
            "recall": cell.first.metrics.get("recall"),
            "dev_rows": cell.first.answers.rows if cell.first.answers else None,
            "not_tested": next((c.why_not for c in contests if c.why_not), None),
            **{name: v for name in SHARED if (v := cell.first.row[name]) is not None},
            **{name: cell.average(name) for name in AVERAGED},
            "examples_per_second": sum(rates) / len(rates) if rates else None,
            "seconds": sum(filter(None, seconds)) / len(seconds) if any(seconds) else None,
            "pairs": [
                {
                    "against": pair.second,
                    "difference": pair.difference,
                    "interval": list(pair.simultaneous),
                    "p": pair.p,
                    "p_holm": pair.p_holm,
                    "call": pair.call,
                    "reason": pair.reason,
                }
                for contest in contests
                for pair in contest.pairs_of(cell)
            ],
        }
        if plain is not None:
            facts["gap"] = cell.accuracy - plain.accuracy
            facts["relative_memory"] = relative(cell, plain, "peak_memory_bytes")
            base = sum(plain.rates) / len(plain.rates) if plain.rates else None
            speed = facts["examples_per_second"]
            facts["relative_speed"] = speed / base if speed and base else None
        for run in audits:
            facts["audit_epsilon"] = run.row["audit_epsilon"]
            facts["audit_ceiling"] = run.record["audit"].get("ceiling")
            facts["verdict"] = run.outcome
        return facts

    @property
    def pair_lines(self) -> list[str]:
        """Every tested pair of private methods once, in points, with what the test calls it."""
        return [
            f"ε = {contest.budget.epsilon:g}: {pair.first} − {pair.second} "
            f"{100 * pair.difference:+.2f} points [{interval_text(pair.simultaneous, True)}], "
            f"p {pair.p_holm:.3g}: {pair.call}{f' ({pair.reason})' if pair.reason else ''}"
            for contest in self.contests
            if contest.budget and contest.statistics
            for pair in contest.statistics.pairs
        ]

    @property
    def privacy_lines(self) -> list[str]:
        """One line for each method: its statement in short, at its smallest ε."""
        lines: dict[str, str] = {}
        for run in sorted(self.runs, key=lambda run: order(run.key)):
            facts = run.record["statement"]
            if facts and not run.record["audit"]:
                budget = "" if run.key.epsilon is None else f" at ε = {run.key.epsilon:g}"
                lines.setdefault(run.title, f"{run.title}{budget}: {one_line(facts)}")
        return list(lines.values())

    def show(self, *, wide: bool = False) -> None:
        """The headline, the overview, and each method's privacy in a line; `wide` adds the rest."""
        print_prose(self.headline + "\n")
        show(self.overview, () if wide else ("Audit", "Standing", "Against non-private"))
        pairs = self.pair_lines
        for line in [*self.remarks, *(pairs if wide or len(pairs) <= MOST_PAIRS else [])]:
            print_prose(line)
        if wide:
            for table in self.details:
                stdout.print(f"\n{table.title}", markup=False)
                show(table)
        else:
            print_prose("--wide: scores, pairs, cost, noise and accounting; --json: all numbers.")
        stdout.print("\nprivacy")
        for line in self.privacy_lines:
            print_prose(f"  {line}")

    @property
    def details(self) -> list[Table]:
        cells = self.cells
        tables = [scores_table(cells, self.contests), pairs_table(self.contests)]
        tables += [cost_table(cells), noise_table(cells), accounting_table(cells)]
        return [table for table in tables if table.rows]

    def to_markdown(self) -> str:
        lines = [self.headline, "", to_markdown(self.overview), *self.remarks]
        return "\n".join([*lines, *(f"- {line}" for line in self.pair_lines)]) + "\n"


def order(key: Key) -> tuple[bool, float, str]:
    """What has no ε comes first, then by budget, then by name."""
    return (key.epsilon is not None, key.epsilon or 0.0, key.method)


def compared(records: Iterable[Record], shown: Iterable[str], select: Select) -> Compared:
    """Those of `records` with these trial ids, and the candidates that a tuning has tried."""
    chosen = set(shown)
    trials = [(record, record["trial"]) for record in records]
    kept = [r for r, trial in trials if trial.get("id") in chosen or trial.get("group") == "tune"]
    return Compared(kept, select)
