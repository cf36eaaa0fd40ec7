"""The first screen: who wins at which ε, by how much, at what cost, and what the ε is worth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpfp_ray.report.plots import cell_label
from dpfp_ray.report.table import Column, Entry, Row, Table, duration, number, percent, text
from dpfp_ray.report.tables import MARKS, guarantee_text
from dpfp_ray.results.summary import ACCOUNTANT_NAMES, Budget, Cell, Run, budgets_of

# A lead of fewer standard errors than this is called a tie.
_CLEAR = 2.0


@dataclass(frozen=True)
class Comparison:
    """The private methods at one ε on one task and model."""

    task: str
    model: str
    budget: Budget
    ranked: Sequence[Cell]  # best accuracy first
    plain: Cell | None  # training without privacy

    @property
    def winner(self) -> Cell:
        return self.ranked[0]

    @property
    def runner_up(self) -> Cell | None:
        return self.ranked[1] if len(self.ranked) > 1 else None

    @property
    def proved(self) -> Cell | None:
        """The best method whose guarantee is a theorem and that no audit refuted."""
        return next((cell for cell in self.ranked if cell.guarantee == "proved"), None)

    @property
    def lead(self) -> float | None:
        rival = self.runner_up
        return None if rival is None else self.winner.accuracy - rival.accuracy

    @property
    def tie(self) -> bool:
        """Is the lead within the noise of seeds, or of so many dev records?"""
        rival = self.runner_up
        if rival is None or self.lead is None:
            return False
        noise = math.hypot(self.winner.standard_error, rival.standard_error)
        return self.lead < _CLEAR * noise

    @property
    def price(self) -> float | None:
        """Accuracy against training without privacy."""
        return None if self.plain is None else self.winner.accuracy - self.plain.accuracy

    def relative(self, column: str) -> float | None:
        """The winner's measured `column` over that of training without privacy."""
        mine = self.winner.average(column)
        base = None if self.plain is None else self.plain.average(column)
        return mine / base if mine is not None and base else None

    @property
    def lead_text(self) -> str:
        if self.runner_up is None or self.lead is None:
            return "no other private method was run"
        points = _points(self.lead)
        if self.tie:
            return f"{points} ahead of {cell_label(self.runner_up)}: a tie within the noise"
        return f"{points} ahead of {cell_label(self.runner_up)}"

    @property
    def price_text(self) -> str:
        if self.price is None:
            return "no run without privacy to compare with"
        side = "below" if self.price < 0 else "above"
        return f"{_points(abs(self.price))} {side} Non-DP"

    @property
    def cost_text(self) -> str:
        seconds, memory = (
            self.winner.average("train_seconds"),
            self.winner.average("peak_memory_bytes"),
        )
        parts = [duration(seconds).text] if seconds is not None else []
        parts += [f"{memory / 2**20:,.0f} MiB"] if memory is not None else []
        times = self.relative("train_seconds"), self.relative("peak_memory_bytes")
        shown = [
            f"{ratio:.2f}× {what}"
            for ratio, what in zip(times, ("the time", "the memory"), strict=True)
            if ratio is not None
        ]
        tail = f" ({', '.join(shown)} of Non-DP)" if shown else ""
        return (", ".join(parts) or "cost not recorded") + tail

    @property
    def guarantee_text(self) -> str:
        words = {
            "proved": "a theorem covers this ε",
            "nominal": "what the accounting says; no guarantee",
            "unknown": "the record does not say",
        }
        return words.get(self.winner.guarantee, guarantee_text(self.winner))


def comparisons(cells: Sequence[Cell]) -> list[Comparison]:
    groups: dict[tuple[str, str, Budget], list[Cell]] = {}
    for cell in cells:
        if cell.private and cell.budget is not None:
            groups.setdefault((cell.key.task, cell.key.model, cell.budget), []).append(cell)
    found = []
    for (task, model, budget), members in groups.items():
        plain = [c for c in cells if not c.private and c.key[:2] == (model, task)]
        ranked = sorted(members, key=lambda cell: (-cell.accuracy, cell.key.method))
        best = max(plain, key=lambda cell: cell.accuracy, default=None)
        found.append(Comparison(task, model, budget, ranked, best))
    rank = {budget: at for at, budget in enumerate(budgets_of(cells))}
    # Real contests first: where only one private method was run, nobody was beaten.
    return sorted(found, key=lambda c: (len(c.ranked) < 2, c.model, c.task, rank[c.budget]))


def headline(found: Sequence[Comparison], refuted: Sequence[Run]) -> str:
    """One sentence or two; all else on the page is detail."""
    if not found:
        return "No private run has finished yet."
    found = [comparison for comparison in found if comparison.runner_up] or found
    wins: dict[str, list[Comparison]] = {}
    for comparison in found:
        wins.setdefault(comparison.winner.key.method, []).append(comparison)
    won = max(wins.values(), key=len)
    name = max((cell_label(comparison.winner) for comparison in won), key=len)
    ties = sum(comparison.tie for comparison in won)
    if len(found) == 1:
        rival = won[0].runner_up
        said = f"{name} is best at {won[0].budget} on {won[0].task}"
        if rival is not None and ties:
            points = _points(won[0].lead or 0.0)
            said = f"{name} and {cell_label(rival)} tie at {won[0].budget} on {won[0].task}"
            return f"{said}: {points} apart, within the noise."
    elif len(wins) == 1:
        said = f"{name} is best in all {len(found)} comparisons"
    else:
        said = f"{name} is best in {len(won)} of {len(found)} comparisons"
    said += f" ({ties} within the noise)" if ties else ""
    guarantees = {comparison.winner.guarantee for comparison in won}
    if "refuted" in guarantees or any(run.method == won[0].winner.key.method for run in refuted):
        worth = "but an audit refuted its ε"
    elif guarantees == {"nominal"}:
        worth = "but its ε is only nominal"
    elif guarantees == {"proved"}:
        worth = "and its guarantee is proved"
    else:
        return said + "."
    return f"{said}, {worth}."


def summary_table(found: Sequence[Comparison]) -> Table:
    names = [
        *("Task", "Model", "ε", "Accountant", "Best method", "Accuracy (%)", "Lead (points)"),
        "Next best",
        *("Against Non-DP", "Training time", "Time ÷ Non-DP", "Peak memory (MiB)", "Guarantee"),
        *("Best proved method", "Its accuracy (%)"),
    ]
    words = {"Task", "Model", "Accountant", "Best method", "Next best", "Guarantee"}
    words |= {"Best proved method"}
    columns = [Column(name, numeric=name not in words) for name in names]
    rows = []
    for one in found:
        memory = one.winner.average("peak_memory_bytes")
        proved, rival = one.proved, one.runner_up
        lead = percent(one.lead, signed=True)
        entries = [
            text(one.task),
            text(one.model),
            number(one.budget.epsilon, "g", one.winner.mark),
            text(ACCOUNTANT_NAMES.get(one.budget.accountant, one.budget.accountant)),
            text(cell_label(one.winner)),
            percent(one.winner.accuracy, one.winner.spread),
            Entry(f"{lead.text} (tie)", lead.value) if one.tie else lead,
            text(cell_label(rival) if rival else None),
            percent(one.price, signed=True),
            duration(one.winner.average("train_seconds")),
            number(one.relative("train_seconds"), ".2f"),
            number(None if memory is None else memory / 2**20, ",.0f"),
            text(guarantee_text(one.winner)),
            text(cell_label(proved) if proved else None),
            percent(proved.accuracy if proved else None, proved.spread if proved else None),
        ]
        rows.append(Row(entries, "refuted" if one.winner.guarantee == "refuted" else ""))
    marks = "".join(cell.mark for one in found for cell in one.ranked)
    notes = ["Tie: the lead is within two standard errors (over seeds, or of the dev set’s size)."]
    notes += [legend for legend in MARKS if legend[0] in marks]
    return Table("summary", "Which method wins, at what price", columns, rows, notes=notes)


def _points(share: float) -> str:
    return f"{100 * share:.2f} points"
