"""The tables of docs/study_tables.md and README.md here, each from the records, the plans or the
accountants alone; docs/study.md has pictures of them.

The documents hold them between `<!-- study: NAME -->` and `<!-- end -->`; `write_report.py` puts
them there, and a test compares them with the records.
"""

import math
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cells import HERE, PLANS, all_cells
from cells import Cell as Planned
from PIL import Image

from dpfp_ray import Plan, calibrate
from dpfp_ray.plan.values import read_plan_file
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_entries import Spent
from dpfp_ray.results.cells import Cell, cells_of
from dpfp_ray.results.contests import contests_of
from dpfp_ray.results.runs import REFUTED, TASK_NAMES, Run, method_label, read_runs
from dpfp_ray.results.statistics import compare_predictions
from dpfp_ray.results.store import Store
from dpfp_ray.training.charged import enter_past
from dpfp_ray.training.dev_scores import DevPredictions
from dpfp_ray.training.record import Record
from dpfp_ray.training.run_folder import RESULT, read_result

DOCS = HERE.parents[1] / "docs"
DOCUMENTS = (
    *(DOCS / name for name in ("study.md", "study_tables.md", "leaderboard.md")),
    HERE / "README.md",
)
AGAIN = HERE / "again"  # one more run of cells that were known, from the same plans
SEARCHES = HERE / "search" / "records"
BLOCK = re.compile(r"(<!-- study: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
CURVES = "Accuracy against ε (PLD)"
FEWEST = 3  # seeds, for a rank
NOTHING = "*No run that belongs here is finished yet.*\n"
# D of the paper's four tasks, and what it says it spent by gdp with CLT (its columns ε = 3 and 8).
GLUE = {
    "SST-2": (67_349, 1.73, 4.33),
    "QNLI": (104_374, 2.00, 4.75),
    "MNLI": (240_942, 2.52, 5.83),
    "QQP": (384_348, 2.52, 5.85),
}


def study_tables(records: Path, report: Path, plans: Path = PLANS) -> dict[str, str]:
    """All that is made for the document, by name; pictures are those that `report` has."""
    runs = read_runs(Store(records).records())
    cells = [cell for cell in cells_of(runs) if not cell.first.record["audit"]]
    cells = [cell for cell in cells if not is_subset(cell.first)]
    return {
        "progress": progress_table(all_cells(Path("data"), plans), records, plans),
        "accuracy": accuracy_tables(cells),
        "outcomes": outcome_lines(cells),
        "leaderboard": leaderboard(cells),
        "search": search_table(read_runs(Store(SEARCHES).records())),
        "again": again_table(cells, AGAIN),
        "accounting": accounting_table(),
        "audits": audit_table([run for run in runs if run.record["audit"]]),
        "price": price_table(records, SEARCHES, AGAIN),
        "cost": cost_table(cells),
        "curves": pictures(report, f"{CURVES}: SST-2,"),
        "curves_of_mnli": pictures(report, f"{CURVES}: MNLI,"),
        "figures": pictures(report, "Accuracy over", "Accuracy against M"),
    }


def is_subset(run: Run) -> bool:
    """The paper's figures are drawn on a part of SST-2: another task than the whole."""
    return run.record["plan"].get("max_train") is not None


def filled(text: str, tables: Mapping[str, str]) -> str:
    """A document with its tables as they are now."""
    return BLOCK.sub(lambda block: block[1] + tables[block[2]] + block[3], text)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return NOTHING
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def progress_table(planned: Sequence[Planned], records: Path, plans: Path) -> str:
    """How much of each plan there is."""
    rows = []
    for name in dict.fromkeys(cell.name.split("/")[0] for cell in planned):
        mine = [cell for cell in planned if cell.name.startswith(f"{name}/")]
        question = str(read_plan_file(plans / f"{name}.yaml").get("question", ""))
        done = sum(cell.record(records) is not None for cell in mine)
        rows.append([f"`{name}`", question, f"{done} of {len(mine)}"])
    return table(["plan", "question", "runs finished"], rows)


def accuracy_tables(cells: Sequence[Cell]) -> str:
    """For each task and model: methods by ε; mean, 95% interval over rows and seeds, seeds."""
    said = []
    places = {(cell.key.task, cell.key.model) for cell in cells}
    for task, model in sorted(places, reverse=True):  # all of SST-2 before a part of MNLI
        here = [cell for cell in cells if cell.key[:2] == (model, task)]
        budgets = sorted({c.key.epsilon for c in here if c.key.epsilon is not None})
        rows = []
        for method, accountant in dict.fromkeys((c.key.method, c.key.accountant) for c in here):
            mine = [c for c in here if (c.key.method, c.key.accountant) == (method, accountant)]
            label = mine[0].title + (f", by {accountant}" if accountant != "pld" else "")
            label = label if mine[0].private else mine[0].title
            by = {cell.key.epsilon: score(cell) for cell in mine}
            rows.append([label, by.get(None, ""), *(by.get(budget, "") for budget in budgets)])
        majority = next((c.majority for c in here if c.majority is not None), None)
        if majority is not None:
            rows.append(["majority class", f"{100 * majority:.1f}", *[""] * len(budgets)])
        said.append(f"**{task}, {model}**\n\n")
        headings = ["method", "without privacy", *(f"ε = {budget:g}" for budget in budgets)]
        said.append(table(headings, rows) + "\n")
    return "".join(said) or NOTHING


def score(cell: Cell) -> str:
    """`83.6 ± 0.4 [81.1, 85.8], 10 seeds`: ± the deviation of one run over seeds."""
    seeds = f"{len(cell.runs)} seed{'s' if len(cell.runs) > 1 else ''}"
    shown = f"{100 * cell.accuracy:.1f}" + (REFUTED if cell.refutation else "")
    if len(cell.runs) > 1:
        shown += f" ± {100 * statistics.stdev(accuracies(cell)):.1f}"
    if cell.interval is not None:
        shown += f" [{100 * cell.interval[0]:.1f}, {100 * cell.interval[1]:.1f}]"
    return f"{shown}, {seeds}" + (" (one class)" if cell.one_class else "")


def accuracies(cell: Cell) -> list[float]:
    return [float(run.row["accuracy"]) for run in cell.runs]


def pictures(report: Path, *titles: str) -> str:
    """Links to the report's pictures whose titles begin so, from the folder of the document."""
    found = {}
    for path in sorted((report / "figures").glob("*.png")):
        with Image.open(path) as drawn:
            found[path.name] = drawn.info.get("Title", "")
    links = [
        f"![{title}](../benchmarks/study/report/figures/{name})\n"
        for beginning in titles
        for name, title in found.items()
        if title.startswith(beginning)
    ]
    return "".join(links)


def outcome_lines(cells: Sequence[Cell]) -> str:
    """What the paired tests say, budget by budget, of the methods with more than one seed."""
    lines = []
    for one in contests_of([cell for cell in cells if len(cell.runs) > 1]):
        if len(one.ranked) < 2 or one.budget is None:
            continue
        names = ", ".join(cell.title for cell in one.leaders)
        behind = ", ".join(c.title for c in one.ranked if c not in one.leaders)
        said = {"won": f"{names} is best", "tie": f"a tie of {names}"}.get(one.outcome, one.outcome)
        said += f"; behind: {behind}" if behind else ""
        lines.append(f"- {one.task}, {one.model}, {one.budget}: {said}.\n")
    return "".join(lines)


def leaderboard(cells: Sequence[Cell]) -> str:
    """For each task and ε: every entry; its rank is one more than the number of entries that are
    better by a paired test, Holm's correction over all pairs. Too few seeds have no rank."""
    said = []
    for task, budget in sorted({(c.key.task, c.key.epsilon or 0.0) for c in cells}, reverse=True):
        here = [c for c in cells if (c.key.task, c.key.epsilon or 0.0) == (task, budget)]
        here = [c for c in here if c.key.accountant in (None, "pld")]
        named = {f"{cell.title}, {cell.key.model}": cell for cell in here}
        ranked = {name: predictions(c) for name, c in named.items() if len(c.runs) >= FEWEST}
        ranks = dict.fromkeys(ranked, 1)
        for pair in compare_predictions(ranked).pairs if len(ranked) > 1 else ():
            if pair.call in ("better", "worse"):
                ranks[pair.second if pair.call == "better" else pair.first] += 1
        rows = [
            [str(ranks.get(name, "–")), cell.title, cell.key.model, status(cell), score(cell)]
            for name, cell in sorted(
                named.items(), key=lambda item: (ranks.get(item[0], math.inf), -item[1].accuracy)
            )
        ]
        said.append(f"## {task}, {f'ε = {budget:g}' if budget else 'no ε is spent'}\n\n")
        said.append(table(["rank", "method", "encoder", "its ε is", "accuracy"], rows) + "\n")
    return "".join(said) or NOTHING


def status(cell: Cell) -> str:
    return "–" if cell.guarantee == "none" else cell.guarantee


def predictions(cell: Cell) -> list[DevPredictions]:
    kept = [run.record["predictions"][0]["dev"] for run in cell.runs]
    return [DevPredictions(**next(iter(dev.values()))) for dev in kept]


def search_table(runs: Sequence[Run]) -> str:
    """Every point that was tried, with its interval over dev rows."""
    rows = []
    for run in sorted(runs, key=lambda run: (run.method, run.row["accuracy"])):
        names = ("batch_size", "learning_rate", "epochs")
        setting = [f"{run.record['plan'][name]:g}" for name in names]
        shown = score(Cell(run.key, [run])).removesuffix(", 1 seed")
        rows.append([method_label(run.method), *setting, shown])
    return table(["method", "B", "learning rate", "epochs", "accuracy"], rows)


def again_table(cells: Sequence[Cell], again: Path) -> str:
    """Where one more run landed, and how far from the mean of the runs before it."""
    rows = []
    for one in cells_of(read_runs(Store(again).records())) if again.exists() else []:
        known = next((cell for cell in cells if cell.key == one.key), None)
        if known is None or known.interval is None:
            continue
        low, high = known.interval
        for accuracy in accuracies(one):
            inside = "inside" if low <= accuracy <= high else "outside"
            at = "" if one.key.epsilon is None else f"{one.key.epsilon:g}"
            place = [one.key.task, one.key.model, known.title, at]
            rows.append([*place, score(known), f"{100 * accuracy:.1f}", inside])
    headings = ["task", "model", "method", "ε", "the study", "once more", "its interval"]
    return table(headings, rows)


def accounting_table() -> str:
    """The paper's own settings (B = M = 32, E = 3, δ = 1/(2D)) by three accountants."""
    rows = []
    for task, (records, *stated) in GLUE.items():
        for epsilon in stated:
            plan = Plan(method="dpfp", epsilon=epsilon, accountant="gdp")
            solved = calibrate(plan, records=records)
            spent = [f"{solved.epsilon[name] or 0:.2f}" for name in ("gdp", "rdp", "pld")]
            rows.append([task, f"{records:,}", f"{solved.noise_multiplier:.4f}", *spent])
    return table(["task", "D", "σ/C", "ε gdp (stated)", "ε rdp", "ε pld"], rows)


def audit_table(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        audit = run.record["audit"]
        stated, bound = run.row["epsilon"], run.row["audit_epsilon"]
        shown = "—" if bound is None else f"{bound:.2f}"
        budget = "—" if stated is None else f"{stated:g}{run.mark}"
        kind = f"{audit.get('canaries', '—')} {audit.get('family', '')}".strip()
        records = f"{run.row['records']:,}"
        rows.append([method_label(run.method), records, budget, shown, kind, str(run.outcome)])
    return table(["method", "D", "stated ε", "audit: ε ≥", "canaries", "outcome"], rows)


def cost_table(cells: Sequence[Cell]) -> str:
    """Of each method the run that is in the middle, by the time of an epoch, at any ε."""
    by_method: dict[tuple[str, str, str], list[Run]] = {}
    for cell in cells:
        place = (cell.key.task, cell.key.model, method_label(cell.key.method))
        by_method.setdefault(place, []).extend(cell.runs)
    rows = []
    for place, runs in by_method.items():
        ordered = sorted(runs, key=lambda run: run.row["train_seconds"] / run.row["epochs"])
        middle = ordered[len(ordered) // 2]
        rate = "—" if middle.rate is None else f"{middle.rate:,.0f}"
        seconds = f"{middle.row['train_seconds']:,.1f}"
        memory = max(run.row["peak_memory_bytes"] for run in runs)
        epochs = f"{middle.row['epochs']:g}"
        rows.append([*place, epochs, seconds, rate, f"{memory / 2**20:,.0f}"])
    headings = ["task", "model", "method", "epochs", "training (s)", "rows/s", "MiB, at most"]
    return table(headings, rows)


def price_table(records: Path, searches: Path, again: Path) -> str:
    """What the people in the data would pay if all private runs were published, by the ledger."""
    found = {f"`{path.name}`": private_runs(path, "*") for path in sorted(records.glob("*/"))}
    found["the searches"] = private_runs(searches, "*/*")
    for path in sorted(again.glob("*/")):
        found[f"`{path.name}`, once more"] = private_runs(path, "*")
    rows = []
    for task in dict.fromkeys(task_of(runs) for runs in found.values() if runs):
        mine = {name: runs for name, runs in found.items() if runs and task_of(runs) == task}
        mine["**all of them**"] = [run for runs in mine.values() for run in runs]
        # 1/(2D); the runs on a part of the data have larger ones.
        delta = min(run["plan"]["delta"] for run in mine["**all of them**"])
        for name, runs in mine.items():
            spent = charged_together(runs, delta)
            mark = "†" if spent.guarantee == "nominal" else ""
            rows.append([task, name, str(len(runs)), f"{spent.private_epsilon:.1f}{mark}"])
    return table(["people of", "runs of", "private runs", "ε of all of them"], rows)


def private_runs(folder: Path, runs: str) -> list[Record]:
    found = [read_result(path.parent) for path in sorted(folder.glob(f"{runs}/{RESULT}"))]
    return [record for record in found if record["plan"]["epsilon"] is not None]


def task_of(runs: Sequence[Record]) -> str:
    return TASK_NAMES[runs[0]["plan"]["task"]]


def charged_together(runs: Sequence[Record], delta: float) -> Spent:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(folder, delta=delta)
        people = ledger.register(["all in the data"]).id
        for record in runs:
            enter_past(ledger, record, people, set())
        return ledger.spent(people)
