"""The main table in the paper's layout: model × method by ε × task, with the paper's row below."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from dpfp_ray.reports import paper
from dpfp_ray.reports.cost_tables import guarantee_text, marks_legend
from dpfp_ray.reports.formats import MISSING, Column, Entry, Row, Table, number, percent, text
from dpfp_ray.reports.plots import cell_label, method_label
from dpfp_ray.results.cells import Cell, budgets_of
from dpfp_ray.results.contests import Contest, contests_of
from dpfp_ray.results.runs import ACCOUNTANT_NAMES, REFUTED, SPLIT_NAMES, TASK_NAMES, Budget, order
from dpfp_ray.training.dev_scores import majority_class

OURS, PAPERS, DIFFERENCE = "ours", "paper", "ours − paper"
_KEYS = {name: key for key, name in TASK_NAMES.items()}


@dataclass(frozen=True)
class Place:
    """A column of scores: one dev set of one task at one budget; `split` None is the average."""

    budget: Budget | None
    task: str
    split: str | None

    @property
    def title(self) -> str:
        if self.split is None:
            return "Avg."
        key = _KEYS.get(self.task, "")
        fallback = self.task if self.split == "dev" else f"{self.task} {self.split}"
        return SPLIT_NAMES.get((key, self.split), fallback)

    @property
    def paper_column(self) -> str:
        key = _KEYS.get(self.task, self.task)
        return key if self.split == "dev" else f"{key} {self.split}"


def main_table(cells: Sequence[Cell], contests: Sequence[Contest] | None = None) -> Table:
    """Ours, the paper's where it has the same model, task and ε, and the difference."""
    contests = contests_of(cells) if contests is None else contests
    won = {id(contest.winner) for contest in contests if contest.winner is not None}
    places = _places(cells)
    rows: list[Row] = []
    compared: list[tuple[Cell, int, bool]] = []
    cells = sorted(cells, key=lambda c: order(c.key._replace(task="")))
    for model, method in _distinct((c.key.model, c.key.method) for c in cells):
        mine = [c for c in cells if (c.key.model, c.key.method) == (model, method)]
        scores = {p: score for p in places if p.split and (score := _score(mine, p)) is not None}
        ours = [_ours(won, place, places, scores) for place in places]
        worst = max(mine, key=lambda c: (c.guarantee == "refuted", len(c.mark)))
        tone = "refuted" if all(c.guarantee == "refuted" for c in mine) else ""
        label = [text(model), replace(text(cell_label(worst)), alarm=worst.guarantee == "refuted")]
        rows.append(Row([*label, text(OURS), *ours], tone))
        theirs = _papers(mine, places)
        if theirs:
            compared += [hit[1:] for hit in theirs.values()]
            documented = [percent(_divided(theirs.get(p, (None,))[0])) for p in places]
            rows.append(Row([*label, text(PAPERS), *documented], "paper"))
            gaps = [_gap(e, d) for e, d in zip(ours, documented, strict=True)]
            rows.append(Row([*label, text(DIFFERENCE), *gaps], "difference"))
    columns = [Column(name, numeric=False) for name in ("Model", "Method", "Whose")]
    columns += [Column(p.title, str(p.budget or "without privacy")) for p in places]
    foot = [*_majority_rows(cells, places), *_spent_rows(cells, places, bool(compared))]
    title = "Accuracy (%) on development sets"
    notes = _notes(cells, compared)
    return Table("main", title, columns, rows, foot, notes, blocks=True)


def _places(cells: Sequence[Cell]) -> list[Place]:
    """For each budget the tasks that were run at it; within them, gaps are shown as gaps."""
    splits: dict[str, list[str]] = {}
    for cell in sorted(cells, key=_task_order):
        known = splits.setdefault(cell.key.task, [])
        known += [name for name in cell.first.splits or {"dev": 0} if name not in known]
    places: list[Place] = []
    budgets: list[Budget | None] = [*budgets_of(cells)]
    for budget in budgets or [None]:
        run_here = {cell.key.task for cell in cells if cell.budget == budget}
        scored = [
            Place(budget, task, name)
            for task, names in splits.items()
            if task in run_here
            for name in names
        ]
        rows = {(cell.key.model, cell.key.method) for cell in cells}
        whole = any(
            all(_score([c for c in cells if (c.key.model, c.key.method) == row], p) for p in scored)
            for row in rows
        )
        places += [*scored, *([Place(budget, "", None)] if len(scored) > 1 and whole else [])]
    return places


def _task_order(cell: Cell) -> tuple[int, str]:
    names = list(TASK_NAMES.values())
    base = cell.key.task.split(" (")[0]
    return (names.index(base) if base in names else len(names), cell.key.task)


def _score(cells: Iterable[Cell], place: Place) -> tuple[float, float | None, Cell] | None:
    """Training without privacy has no ε and stands under every one, as in the paper."""
    for cell in cells:
        if cell.key.task == place.task and cell.budget in (None, place.budget):
            found = cell.split(str(place.split))
            if found is None and place.split == "dev":
                found = (cell.accuracy, cell.spread)
            return None if found is None else (*found, cell)
    return None


def _ours(
    won: set[int],
    place: Place,
    places: Sequence[Place],
    scores: dict[Place, tuple[float, float | None, Cell]],
) -> Entry:
    if place.split is None:  # an average over fewer tasks than the others' would mislead
        parts = [p for p in places if p.split and p.budget == place.budget]
        if not all(p in scores for p in parts):
            return Entry(MISSING)
        return percent(mean(scores[p][0] for p in parts))
    if place not in scores:
        return Entry(MISSING)
    score, spread, cell = scores[place]
    # The test is on the task's first dev set; a second one's number is not called by it.
    first = next(iter(cell.first.splits), place.split) == place.split
    shown = percent(score, spread, bold=first and id(cell) in won)
    marks = (" (one class)" if cell.one_class else "") + (" (tuned)" if cell.tuning else "")
    shown = replace(shown, text=shown.text + marks)
    if cell.guarantee != "refuted":
        return shown
    return replace(shown, text=shown.text + REFUTED, alarm=True)


def _papers(
    mine: Sequence[Cell], places: Sequence[Place]
) -> dict[Place, tuple[float, Cell, int, bool]]:
    """The paper's numbers for a method's columns; only for whole tasks and the plain method."""
    found: dict[Place, tuple[float, Cell, int, bool]] = {}
    for place in places:
        if place.split is None:
            continue
        for cell in mine:
            hit = _paper_row(cell, place)
            value = hit and hit[0].scores.get(place.paper_column)
            if hit and value is not None and cell.budget in (None, place.budget):
                found[place] = (value, cell, hit[0].budget, hit[1])
    for place in places:  # the paper's own average, where all that it averages over is here
        parts = {
            p.paper_column: found.get(p) for p in places if p.split and p.budget == place.budget
        }
        hits = [hit for hit in parts.values() if hit is not None]
        if place.split is None and set(parts) == set(paper.COLUMNS) and len(hits) == len(parts):
            _, cell, budget, alike = hits[0]
            family = str(paper.family(str(cell.first.row["model"])))
            average = paper.DOCUMENTED[family, cell.base_method, budget].average
            if average is not None:
                found[place] = (average, cell, budget, alike)
    return found


def _paper_row(cell: Cell, place: Place) -> tuple[paper.Documented, bool] | None:
    family = paper.family(str(cell.first.row["model"]))
    plain = cell.key.method in paper.CLAIMS
    if family is None or not plain or not cell.first.whole_task or cell.key.task != place.task:
        return None
    if cell.base_method not in paper.CLAIMS:  # not one that the paper has numbers for
        return None
    key = _KEYS.get(place.task, "")
    if cell.budget is None:  # the same in both of the paper's columns
        return paper.DOCUMENTED[family, cell.base_method, paper.BUDGETS[0]], True
    hit = paper.budget_of(cell.base_method, cell.budget.epsilon, cell.budget.accountant, key)
    if hit is None:
        return None
    return paper.DOCUMENTED[family, cell.base_method, hit[0]], hit[1]


def _divided(value: float | None) -> float | None:
    return None if value is None else value / 100


def _gap(ours: Entry, theirs: Entry) -> Entry:
    if ours.value is None or theirs.value is None:
        return Entry(MISSING)
    return number(round(ours.value - theirs.value, 6), "+.2f")


def _majority_rows(cells: Sequence[Cell], places: Sequence[Place]) -> list[Row]:
    """What always answering the most frequent class of the dev rows scores."""
    entries = [percent(_majority(cells, place)) for place in places]
    if all(entry.missing for entry in entries):
        return []
    return [Row([text("majority class"), text("constant answer"), text(OURS), *entries], "spent")]


def _majority(cells: Sequence[Cell], place: Place) -> float | None:
    for cell in cells:
        kept = cell.first.predictions.get(place.split or "")
        if cell.key.task == place.task and kept is not None:
            truth = kept.truth()
            return float((truth == majority_class(truth)).mean())
    return None


def _spent_rows(cells: Sequence[Cell], places: Sequence[Place], papers: bool) -> list[Row]:
    """What each accountant says was spent, as at the foot of the paper's table."""
    rows: list[Row] = []
    for accountant, shown in ACCOUNTANT_NAMES.items():
        for method in _distinct(c.key.method for c in cells if c.private):
            lines: list[tuple[list[str], list[Entry]]] = []
            same = [c for c in cells if c.key.method == method]
            for model in _distinct(c.key.model for c in same):
                mine = [c for c in same if c.key.model == model]
                _join(lines, model, [_spent(mine, place, accountant) for place in places])
            name = max((cell_label(c) for c in same), key=len)
            for models, entries in lines:
                label = f"ε by {shown}" + (f": {', '.join(models)}" if len(lines) > 1 else "")
                rows.append(Row([text(label), text(name), text(OURS), *entries], "spent"))
        if papers:
            known = [_paper_spent(place, accountant) for place in places]
            if any(not entry.missing for entry in known):
                head = [text(f"ε by {shown}"), text("all"), text(PAPERS)]
                rows.append(Row([*head, *known], "paper"))
    return rows


def _join(lines: list[tuple[list[str], list[Entry]]], model: str, new: list[Entry]) -> None:
    """One line for models that do not contradict each other: ε does not depend on the model."""
    for models, old in lines:
        pairs = list(zip(old, new, strict=True))
        if all(a.missing or b.missing or a.text == b.text for a, b in pairs):
            models.append(model)
            old[:] = [b if a.missing else a for a, b in pairs]
            return
    lines.append(([model], new))


def _spent(mine: Sequence[Cell], place: Place, accountant: str) -> Entry:
    for cell in mine:
        if place.split and cell.key.task == place.task and cell.budget == place.budget:
            return number(cell.first.row[f"epsilon_{accountant}"], ".2f", cell.mark)
    return Entry(MISSING)


def _paper_spent(place: Place, accountant: str) -> Entry:
    if place.split is None or place.budget is None or place.budget.epsilon not in paper.BUDGETS:
        return Entry(MISSING)
    budget = int(place.budget.epsilon)
    known = paper.SPENT[accountant][budget].get(_KEYS.get(place.task, ""))
    return number(known, ".2f")


def _notes(cells: Sequence[Cell], compared: Sequence[tuple[Cell, int, bool]]) -> list[str]:
    notes = [
        "Bold: better than every other private method there, by a paired test (see Summary); "
        "nothing is bold where they tie. ±: standard deviation over seeds."
    ]
    if any(cell.one_class for cell in cells):
        notes.append("One class: the model gives every row the same answer.")
    for model in _distinct(c.key.model for c in cells):
        if paper.family(str(next(c for c in cells if c.key.model == model).first.row["model"])):
            continue
        notes.append(
            f"The paper did not run {model}: there is no number of its to put beside ours."
        )
    if compared:
        cited = _distinct(
            (c.base_method, paper.DOCUMENTED[family, c.base_method, budget].cited)
            for c, budget, _ in compared
            if (family := paper.family(str(c.first.row["model"])))
        )
        sources = "; ".join(f"{method_label(method)}: {source}" for method, source in cited)
        notes.append(f"Rows of the paper: {paper.SOURCE}. {sources}.")
    if any(not alike for _, _, alike in compared):
        notes.append(
            "The paper names its columns by RDP and calibrates DP-FP by GDP + CLT: the same ε by "
            "another accountant is not the same noise. The lines at the foot say what each spent."
        )
    for cell in cells:
        if cell.guarantee == "refuted":
            said = f"{cell_label(cell)} on {cell.key.task} at {cell.budget}, {cell.key.model}"
            notes.append(f"{said}: {guarantee_text(cell)}.")
        if cell.settings > 1:
            at = f" at {cell.budget}" if cell.budget else ""
            notes.append(
                f"{cell_label(cell)} on {cell.key.task}{at}, {cell.key.model}: the best of "
                f"{cell.settings} settings on dev (tuned), which flatters it: it is compared with "
                "no untuned row."
            )
    return notes + marks_legend(cells)


def _distinct(items: Iterable[object]) -> list:  # type: ignore[type-arg]
    return list(dict.fromkeys(items))
