"""What a privacy ledger says, for people: spent against total, a table of uses, ε against time.

paid = ledger()
paid.spent.epsilon, paid.spent.sentence()
paid.write("ledger-report")
ledger().set_total(8)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from dpfp_ray.data.tasks import load_task
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_cost import Gaussian, Total
from dpfp_ray.privacy.ledger_entries import Entry, Spent, sum_up
from dpfp_ray.reports.plots import Drawing, canvas, finish
from dpfp_ray.reports.tables import Entry as Cell
from dpfp_ray.reports.tables import Table, build, number, show, text, to_csv, to_markdown
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import stderr, stdout
from dpfp_ray.system.whole_files import to_json
from dpfp_ray.training.record import Record, entry_of, fingerprint, status_of
from dpfp_ray.training.run_folder import make_folder

MOST_POINTS = 40  # of a curve; each is a sum of its own
# Columns that may go on a narrow page, the last first.
IF_THEY_FIT = ("Records", "Status", "Guarantee", "Of", "σ/C", "Rate p", "By")
SUMMARY = ("people", "epsilon", "private_epsilon", "delta", "guarantee", "total")


@dataclass(frozen=True)
class LedgerView:
    """What a ledger says; sums are found when they are asked for.

    people  whose sum is asked for; by default those who have paid most
    """

    ledger: Ledger
    people: str | None = None
    records_per_person: int = 1

    @cached_property
    def groups(self) -> list[Spent]:
        """What each group of people has paid."""
        return self.ledger.groups(self.records_per_person)

    @cached_property
    def spent(self) -> Spent | None:
        """What the group that was asked for has paid; None if nothing was done to anybody yet."""
        if self.people is None:
            return max(
                self.groups, key=lambda one: (one.epsilon, one.private_epsilon), default=None
            )
        asked = [one for one in self.groups if self.people in (one.people, *one.data_sets)]
        if not asked:
            raise UserError(f"the ledger {self.ledger.files.name} has no people {self.people!r}")
        return asked[0]

    @property
    def total(self) -> Total | None:
        return self.ledger.total()

    def set_total(
        self, epsilon: float, delta: float | None = None, *, force: bool = False
    ) -> Total:
        """Bound what each group may ever pay: what would pass it is refused."""
        return self.ledger.set_total(epsilon, delta, force=force)

    @property
    def uses(self) -> Table | None:
        """Every entry of `spent`, oldest first."""
        return None if self.spent is None else uses_table(self.spent)

    def show(self, *, wide: bool = False) -> None:
        """Print all uses and their sum, in as many columns as fit; `wide`: in all of them."""
        if self.spent is None or self.uses is None:
            limit = "" if self.total is None else f" of a total of {self.total.epsilon:g}"
            stdout.print(f"nothing was done yet: ε = 0{limit}", markup=False)
            return
        show(replace(self.uses, notes=()), () if wide else IF_THEY_FIT)
        if not wide:
            stderr.print("--wide shows all columns", markup=False)
        for line in self.spent.lines(basis=wide):
            stdout.print(line, markup=False, soft_wrap=True)
        others = [group.people for group in self.groups if group.people != self.spent.people]
        if others:
            names = ", ".join(others)
            stderr.print(f"the ledger has other people, too (--people ID): {names}", markup=False)

    def to_json(self) -> dict[str, Any]:
        summaries = [
            {name: getattr(one, name) for name in SUMMARY} | {"uses": len(one.used)}
            for one in self.groups
        ]
        nothing = sum_up([], "", [], self.total, None)
        return (self.spent or nothing).to_json() | {
            "ledger": self.ledger.files.name,
            "groups": summaries,
        }

    def write(self, output: str | Path) -> list[Path]:
        """ledger.json, .csv, .md, .svg and .png into the folder `output`."""
        if self.spent is None:
            raise UserError(f"the ledger {self.ledger.files.name} has no entries")
        table = uses_table(self.spent)
        command = f"dpfp ledger export --output {output}"
        drawing = ledger_figure(self.spent, self.total, command)
        files = {
            "ledger.json": (to_json(self.to_json(), indent=2) + "\n").encode(),
            "ledger.csv": to_csv(table).encode(),
            "ledger.md": to_markdown(table).encode(),
            "ledger.svg": drawing.svg,
            "ledger.png": drawing.png,
        }
        folder = make_folder(output)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return [folder / name for name in files]


def ledger(
    place: str | Path | None = None,
    *,
    people: str | None = None,
    records_per_person: int = 1,
    **data: Any,
) -> LedgerView:
    """What the people in the data have paid for everything that was run on their records.

    place   folder or URI (default: $DPFP_LEDGER, else the user's data folder)
    people  a data set or group, as in `to_json()`
    data    in place of `people`, the plan fields that name their records: task, train_file, …
    records_per_person  what a person pays who has so many records in each use that protects records
    """
    book = Ledger(place)
    if people and data:
        raise UserError("--people and a data set are both given; drop one")
    if data:
        people = book.find(load_task(make_plan(data)).train.all_texts())
        if people is None:
            raise UserError(f"the ledger {book.files.name} knows none of these records")
    return LedgerView(book, people, records_per_person)


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


def spent_on(book: Ledger, records: Iterable[Record]) -> Paid:
    """What the people behind `records` have paid."""
    entries = book.entries()
    whose = {entry.id: entry.use.people for entry in entries}
    whose |= {entry.use.found: entry.use.people for entry in entries if entry.use.found}
    used = [record for record in records if status_of(record) != "refused"]
    people = [whose.get(entry_of(one)) or whose.get(fingerprint(one)) for one in used]
    sums: list[Spent] = []
    for name in dict.fromkeys(people):
        if name is not None and all(name not in one.data_sets for one in sums):
            sums.append(book.spent(name))
    return Paid(sums, people.count(None))


def known_ledger(place: str | None) -> Ledger | None:
    """The ledger at `place`; without one the default, if there is anything in it."""
    book = Ledger(place)
    return book if place is not None or book.exists() else None


def spent_of_total(spent: Spent) -> str:
    """Such as "ε = 6.61 of 8", with the mark of a nominal sum."""
    return f"ε = {spent.shown} {'no total set' if spent.total is None else f'of {spent.total:g}'}"


def uses_table(spent: Spent) -> Table:
    """Every entry, oldest first: who, what for, mechanism, steps charged of those planned."""

    def noise(entry: Entry) -> Gaussian | None:
        """Other mechanisms are known by their theorem's curve."""
        return next((part for part in entry.use.parts if isinstance(part, Gaussian)), None)

    columns: dict[str, Callable[[Entry], Cell]] = {
        "Opened": lambda e: text(e.opened_at[:19].replace("T", " ")),
        "By": lambda e: text(e.who),
        "For": lambda e: text(e.use.purpose),
        "Method": lambda e: text(e.use.method + " (persons)" * (e.use.unit == "person")),
        "Records": lambda e: number(e.use.records, ",.0f"),
        "Rate p": lambda e: number(part.p if (part := noise(e)) else None, ".3g"),
        "σ/C": lambda e: number(part.noise_multiplier if (part := noise(e)) else None, ".3g"),
        "Steps": lambda e: number(e.charged, ",.0f"),
        "Of": lambda e: number(e.use.steps, ",.0f"),
        "Guarantee": lambda e: text(e.use.guarantee),
        "Status": lambda e: text(e.status),
    }
    refused = {"refused": "refuted"}
    return build(
        "ledger",
        "Uses of these records",
        spent.entries,
        columns,
        tone=lambda entry: refused.get(entry.status, ""),
        notes=[spent.sentence()],
    )


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
