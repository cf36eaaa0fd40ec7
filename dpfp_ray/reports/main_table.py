"""The main table in the paper's layout: model × method by ε × task, with the paper's row below."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from dpfp_ray.reports import paper
from dpfp_ray.reports.cell_tables import guarantee_text, marks_legend
from dpfp_ray.reports.tables import MISSING, Column, Entry, Row, Table, number, percent, text
from dpfp_ray.results.cells import Cell, budgets_of
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import REFUTED, SPLIT_NAMES, TASK_NAMES, Budget, method_label, order
from dpfp_ray.training.dev_scores import majority_class

OURS, PAPERS, DIFFERENCE = "ours", "paper", "ours − paper"
AVERAGE = "average"
_KEYS = {name: key for key, name in TASK_NAMES.items()}


@dataclass(frozen=True)
class Place:
    """A column of scores: one dev set of one task at one budget, or the average at a budget."""

    budget: Budget | None
    task: str
    split: str

    @property
    def title(self) -> str:
        if self.split == AVERAGE:
            return "Avg."
        fallback = self.task if self.split == "dev" else f"{self.task} {self.split}"
        return SPLIT_NAMES.get((_KEYS.get(self.task, ""), self.split), fallback)

    @property
    def paper_column(self) -> str:
        key = _KEYS.get(self.task, self.task)
        return key if self.split == "dev" else f"{key} {self.split}"


@dataclass(frozen=True)
class Cited:
    """A number of the paper's beside one of ours; `alike`: calibrated by the same accountant."""

    value: float
    row: paper.Documented
    alike: bool


def main_table(cells: Sequence[Cell], contests: Sequence[Contest] | None = None) -> Table:
    """Ours, the paper's where it has the same model, task and ε, and the difference."""
    contests = contests_of(cells) if contests is None else contests
    won = {id(contest.winner) for contest in contests if contest.winner is not None}
    places = places_of(cells)
    rows: list[Row] = []
    cited: list[Cited] = []
    ordered = sorted(cells, key=lambda c: order(c.key._replace(task="")))
    for model, method in dict.fromkeys((c.key.model, c.key.method) for c in ordered):
        mine = [c for c in ordered if (c.key.model, c.key.method) == (model, method)]
        scores = {place: cell for place in places if (cell := cell_at(mine, place))}
        own_entries = [own_entry(place, scores, won) for place in places]
        worst = max(mine, key=lambda c: (c.guarantee == "refuted", len(c.mark)))
        tone = "refuted" if all(c.guarantee == "refuted" for c in mine) else ""
        label = [text(model), replace(text(worst.title), alarm=worst.guarantee == "refuted")]
        rows.append(Row([*label, text(OURS), *own_entries], tone))
        paper_numbers = [paper_number(place, scores) for place in places]
        if any(paper_numbers):
            cited += filter(None, paper_numbers)
            documented = [percent(hit.value / 100 if hit else None) for hit in paper_numbers]
            rows.append(Row([*label, text(PAPERS), *documented], "paper"))
            gaps = [gap_entry(e, d) for e, d in zip(own_entries, documented, strict=True)]
            rows.append(Row([*label, text(DIFFERENCE), *gaps], "difference"))
    columns = [Column(name, numeric=False) for name in ("Model", "Method", "Whose")]
    columns += [Column(p.title, str(p.budget or "without privacy")) for p in places]
    majority = [percent(majority_at(cells, place)) for place in places]
    foot = []
    if not all(entry.missing for entry in majority):
        foot = [
            Row([text("majority class"), text("constant answer"), text(OURS), *majority], "spent")
        ]
    title = "Accuracy (%) on development sets"
    return Table("main", title, columns, rows, foot, notes_of(cells, cited), blocks=True)


def places_of(cells: Sequence[Cell]) -> list[Place]:
    """For each budget the dev sets of the tasks that were run at it, in the paper's order; and the
    average where they are the five that the paper averages over."""
    splits: dict[str, list[str]] = {}
    for cell in sorted(cells, key=task_order):
        names = splits.setdefault(cell.key.task, [])
        names += [name for name in cell.first.splits or {"dev": 0} if name not in names]
    places: list[Place] = []
    budgets: list[Budget | None] = [*budgets_of(cells)]
    for budget in budgets or [None]:
        tasks = {cell.key.task for cell in cells if cell.budget == budget}
        here = [Place(budget, task, n) for task in splits if task in tasks for n in splits[task]]
        whole = {place.paper_column for place in here} == set(paper.COLUMNS)
        places += [*here, *([Place(budget, "", AVERAGE)] if whole else [])]
    return places


def task_order(cell: Cell) -> tuple[int, str]:
    names = list(TASK_NAMES.values())
    base = cell.key.task.split(" (")[0]
    return (names.index(base) if base in names else len(names), cell.key.task)


def cell_at(cells: Iterable[Cell], place: Place) -> Cell | None:
    """Training without privacy has no ε and stands under every one, as in the paper."""
    here = (c for c in cells if c.key.task == place.task and c.budget in (None, place.budget))
    return next((c for c in here if c.split(place.split) or place.split == "dev"), None)


def own_entry(place: Place, scores: dict[Place, Cell], won: set[int]) -> Entry:
    if place.split == AVERAGE:
        parts = {p: cell for p, cell in scores.items() if p.budget == place.budget}
        if len(parts) < len(paper.COLUMNS):
            return Entry(MISSING)
        return percent(mean((c.split(p.split) or (c.accuracy,))[0] for p, c in parts.items()))
    if place not in scores:
        return Entry(MISSING)
    cell = scores[place]
    score, spread = cell.split(place.split) or (cell.accuracy, cell.spread)
    # The test is on the task's first dev set; a second one's number is not called by it.
    first = next(iter(cell.first.splits), place.split) == place.split
    entry = percent(score, spread, bold=first and id(cell) in won)
    marks = (" (one class)" if cell.one_class else "") + (" (tuned)" if cell.tuning else "")
    refuted = cell.guarantee == "refuted"
    return replace(entry, text=entry.text + marks + REFUTED * refuted, alarm=refuted)


def paper_number(place: Place, scores: dict[Place, Cell]) -> Cited | None:
    """The paper's number for a column; only for whole tasks and the plain method."""
    if place.split == AVERAGE:
        parts = [p for p in scores if p.budget == place.budget]
        hits = [hit for p in parts if (hit := paper_number(p, scores))]
        if len(hits) < len(paper.COLUMNS) or hits[0].row.average is None:
            return None
        return replace(hits[0], value=hits[0].row.average)
    cell = scores.get(place)
    if cell is None or not cell.first.whole_task or cell.key.method not in paper.CLAIMS:
        return None
    family, key = paper.family(str(cell.first.row["model"])), _KEYS.get(place.task, "")
    budget: tuple[int, bool] | None = (paper.BUDGETS[0], True)  # one number without privacy
    if cell.budget is not None:
        asked = (cell.budget.epsilon, cell.budget.accountant)
        budget = paper.budget_of(cell.base_method, *asked, key)
    if family is None or budget is None:
        return None
    row = paper.DOCUMENTED[family, cell.base_method, budget[0]]
    value = row.scores.get(place.paper_column)
    return None if value is None else Cited(value, row, budget[1])


def gap_entry(ours: Entry, theirs: Entry) -> Entry:
    if ours.value is None or theirs.value is None:
        return Entry(MISSING)
    return number(round(ours.value - theirs.value, 6), "+.2f")


def majority_at(cells: Sequence[Cell], place: Place) -> float | None:
    """What always answering the most frequent class of the dev rows scores."""
    for cell in cells:
        answers = cell.first.predictions.get(place.split)
        if cell.key.task == place.task and answers is not None:
            truth = answers.truth()
            return float((truth == majority_class(truth)).mean())
    return None


def notes_of(cells: Sequence[Cell], cited: Sequence[Cited]) -> list[str]:
    notes = [
        "Bold: better than every other private method there, by a paired test (see Pairs); "
        "nothing is bold where they tie. ±: standard deviation over seeds."
    ]
    if any(cell.one_class for cell in cells):
        notes.append("One class: the model gives every row the same answer.")
    models = {cell.key.model: str(cell.first.row["model"]) for cell in cells}
    notes += [
        f"The paper did not run {shown}: there is no number of its to put beside ours."
        for shown, model in models.items()
        if paper.family(model) is None
    ]
    if cited:
        sources = dict.fromkeys(f"{method_label(c.row.method)}: {c.row.cited}" for c in cited)
        notes.append(f"Rows of the paper: {paper.SOURCE}. {'; '.join(sources)}.")
    if any(not hit.alike for hit in cited):
        notes.append(
            "The paper names its columns by RDP and calibrates DP-FP by GDP + CLT: the same ε by "
            "another accountant is not the same noise. The accounting table says what each spent."
        )
    for cell in cells:
        at = f" at {cell.budget}" if cell.budget else ""
        where = f"{cell.title} on {cell.key.task}{at}, {cell.key.model}"
        if cell.guarantee == "refuted":
            notes.append(f"{where}: {guarantee_text(cell)}.")
        if cell.settings > 1:
            notes.append(
                f"{where}: the best of {cell.settings} settings on dev (tuned), which flatters it: "
                "it is compared with no untuned row."
            )
    return notes + marks_legend(cells)
