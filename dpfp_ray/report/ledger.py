"""What a privacy ledger says, for people: spent against total, a table of uses, ε against time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_cost import Gaussian, Total
from dpfp_ray.privacy.ledger_entries import Entry
from dpfp_ray.privacy.ledger_sum import Spent, sum_up
from dpfp_ray.report.plots import Drawing, canvas, finish
from dpfp_ray.report.table import Column, Row, Table, number, text
from dpfp_ray.report.table import Entry as Cell
from dpfp_ray.training.charged import entry_of, found_mark, status_of

MOST_POINTS = 40  # of a curve; each is a sum of its own


@dataclass(frozen=True)
class Paid:
    """`sums`: what each group of people behind some records has paid for everything, shown or not.
    `unknown`: of how many records the ledger knows nothing, so that no sum has them in it."""

    sums: list[Spent] = field(default_factory=list)
    unknown: int = 0

    def warning(self) -> str:
        """Empty if all are in a sum."""
        if not self.unknown:
            return ""
        runs = "1 run that is" if self.unknown == 1 else f"{self.unknown} runs that are"
        return f"{runs} shown here cost more than this: they are not in this ledger (--ledger)"


def spent_on(ledger: Ledger, records: Iterable[Mapping[str, Any]]) -> Paid:
    """What the people behind `records` have paid."""
    entries = ledger.entries()
    whose = {entry.id: entry.use.people for entry in entries}
    whose |= {entry.use.found: entry.use.people for entry in entries if entry.use.found}
    used = [record for record in records if status_of(record) != "refused"]
    people = [whose.get(entry_of(one) or "") or whose.get(found_mark(one)) for one in used]
    found: list[Spent] = []
    for name in dict.fromkeys(people):
        if name is not None and all(name not in one.data_sets for one in found):
            found.append(ledger.spent(name))
    return Paid(found, people.count(None))


def known_ledger(place: str | None) -> Ledger | None:
    """The ledger at `place`; without one the default, if there is anything in it."""
    ledger = Ledger(place)
    return ledger if place is not None or ledger.exists() else None


def spent_of_total(spent: Spent) -> str:
    """Such as "ε = 6.61 of 8", with the mark of a nominal sum."""
    return f"ε = {spent.shown} {'no total set' if spent.total is None else f'of {spent.total:g}'}"


def uses_table(spent: Spent) -> Table:
    """Every entry, oldest first: who, what for, mechanism, steps charged of those planned."""
    titles = (
        *("Opened", "By", "For", "Method", "Records", "Rate p", "σ/C", "Steps", "Of"),
        *("Guarantee", "Status"),
    )
    numeric = ("Records", "Rate p", "σ/C", "Steps", "Of")
    rows = [
        Row(
            [
                text(entry.opened_at[:19].replace("T", " ")),
                text(entry.who),
                text(entry.use.purpose),
                text(entry.use.method + " (persons)" * (entry.use.unit == "person")),
                number(entry.use.records, ",.0f"),
                *_noise(entry),
                number(entry.charged, ",.0f"),
                number(entry.use.steps, ",.0f"),
                text(entry.use.guarantee),
                text(entry.status),
            ],
            tone="refuted" if entry.status == "refused" else "",
        )
        for entry in spent.entries
    ]
    columns = [Column(title, numeric=title in numeric) for title in titles]
    return Table("ledger", "Uses of these records", columns, rows, notes=[spent.sentence()])


def _noise(entry: Entry) -> list[Cell]:
    """Rate and σ/C of a use that is Gaussian; others are known by their theorem's curve."""
    found = [part for part in entry.use.parts if isinstance(part, Gaussian)]
    values = (found[0].p, found[0].noise_multiplier) if found else (None, None)
    return [number(value, ".3g") for value in values]


def curve(spent: Spent, total: Total | None) -> list[tuple[datetime, float]]:
    """ε of the private uses that were open or done at each moment when one was begun."""
    entries = [entry for entry in spent.entries if entry.status != "refused" and entry.use.parts]
    stride = max(1, math.ceil(len(entries) / MOST_POINTS))
    points = []
    for count in [*range(1, len(entries), stride), len(entries)] if entries else []:
        part = sum_up(entries[:count], spent.people, spent.data_sets, total, spent.delta)
        points.append((datetime.fromisoformat(entries[count - 1].opened_at), part.private_epsilon))
    return points


def ledger_figure(spent: Spent, total: Total | None, command: str) -> Drawing:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    points = curve(spent, total)
    with canvas() as (figure, axes):
        times: Sequence[Any] = [at for at, _ in points]
        if points:
            values = [epsilon for _, epsilon in points]
            label = "spent" + "†" * spent.shown.endswith("†")
            axes.step(times, values, where="post", marker="o", color="#0072B2", label=label)
            places = AutoDateLocator()
            axes.xaxis.set_major_locator(places)
            axes.xaxis.set_major_formatter(ConciseDateFormatter(places))
        if spent.total is not None:
            axes.axhline(spent.total, color="#D55E00", linestyle="--", label="total")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("time (UTC)")
        axes.set_ylabel(f"ε at δ = {spent.delta:.3g}, zero-out")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
        title = "What these people have paid"
        return finish(figure, "ledger", title, f"{title}: {spent.sentence()}.", command)
