"""The numbers that the paper documents, as data, each with where it comes from.

Du & Mi, "DP-FP: Differentially Private Forward Propagation for Large Models" (2021). Accuracies are
dev-set percentages of its Table "main_results"; None is a "--" there. The paper's heat maps and
its curve over M are pictures without numbers, so there is nothing to put beside ours but their
captions' claims (`FIGURE_CLAIMS`).
"""

from dataclasses import dataclass

from dpfp_ray.reports.tables import Column, Row, Table, number, text
from dpfp_ray.results.runs import method_label

SOURCE = "Du & Mi 2021, Table main_results"
METHOD, BASELINE = "dpfp", "dpsgd"  # what the paper proposes, and whose noise it compares with
TASKS = ("mnli", "qqp", "qnli", "sst2")
# Each column of the table, MNLI's two dev sets apart; the paper averages over these five.
COLUMNS = ("mnli matched", "mnli mismatched", "qqp", "qnli", "sst2")
BUDGETS = (3, 8)

# The paper names its two budgets by RDP (Li et al.'s), but calibrates DP-FP by GDP + CLT to these.
SPENT: dict[str, dict[int, dict[str, float]]] = {
    "gdp": {
        3: {"mnli": 2.52, "qqp": 2.52, "qnli": 2.00, "sst2": 1.73},
        8: {"mnli": 5.83, "qqp": 5.85, "qnli": 4.75, "sst2": 4.33},
    },
    "pld": {  # "Compose tradeoff func."
        3: {"mnli": 2.75, "qqp": 2.75, "qnli": 2.57, "sst2": 2.41},
        8: {"mnli": 7.15, "qqp": 7.16, "qnli": 6.87, "sst2": 6.69},
    },
    "rdp": {budget: dict.fromkeys(TASKS, float(budget)) for budget in BUDGETS},
}

OWN = "run by Du & Mi"
YU = "documented in Yu et al. 2021, δ = 1e-5"
LI = "documented in Li et al. 2021"


@dataclass(frozen=True)
class Documented:
    """One row of the paper's table at one budget."""

    family: str
    method: str
    cited: str
    budget: int
    scores: dict[str, float | None]
    average: float | None


# family, method (ours), whose number, the five accuracies and the average, at ε = 3 and at ε = 8
_NONE = (None,) * 6
_Numbers = tuple[float | None, ...]
_TABLE: tuple[tuple[str, str, str, _Numbers, _Numbers], ...] = (
    ("BERT-base", "non_private", OWN,
     (83.97, 84.46, 90.99, 90.09, 92.55, 88.41), (83.97, 84.46, 90.99, 90.09, 92.55, 88.41)),
    ("BERT-base", "dpsgd", YU, _NONE, (54.6, 53.4, 74.5, 63.6, 82.3, 65.68)),
    ("BERT-base", "rgp", YU, _NONE, (79.1, 78.0, 84.8, 86.2, 91.5, 83.92)),
    ("BERT-base", "dpfp", OWN,
     (81.93, 82.11, 89.47, 89.25, 90.14, 86.58), (82.54, 82.39, 89.68, 88.82, 91.51, 86.99)),
    ("RoBERTa-base", "non_private", OWN,
     (87.33, 87.08, 91.07, 91.61, 94.27, 90.27), (87.33, 87.08, 91.07, 91.61, 94.27, 90.27)),
    ("RoBERTa-base", "dpsgd", LI,
     (82.47, 82.10, 85.41, 84.62, 86.12, 84.14), (83.30, 83.13, 86.15, 84.81, 85.89, 84.66)),
    ("RoBERTa-base", "rgp", LI, _NONE, (80.5, 79.6, 85.5, 87.2, 91.6, 84.88)),
    ("RoBERTa-base", "dpfp", OWN,
     (85.84, 86.18, 89.92, 90.35, 93.23, 89.10), (86.00, 85.81, 89.84, 90.96, 93.23, 89.17)),
    ("RoBERTa-large", "non_private", OWN,
     (90.12, 89.72, 91.60, 93.56, 96.22, 92.24), (90.12, 89.72, 91.60, 93.56, 96.22, 92.24)),
    ("RoBERTa-large", "dpsgd", LI,
     (85.53, 85.81, 86.65, 88.94, 90.71, 87.53), (86.28, 86.54, 87.49, 89.42, 90.94, 88.13)),
    ("RoBERTa-large", "rgp", LI, _NONE, (86.1, 86.0, 86.7, 90.0, 93.0, 88.36)),
    ("RoBERTa-large", "dpfp", OWN,
     (89.27, 89.08, 90.68, 92.59, 95.07, 91.34), (89.70, 89.05, 90.81, 93.11, 95.18, 91.57)),
)  # fmt: skip

DOCUMENTED: dict[tuple[str, str, int], Documented] = {
    (family, method, budget): Documented(
        family,
        method,
        cited,
        budget,
        dict(zip(COLUMNS, numbers[:5], strict=True)),
        numbers[5],
    )
    for family, method, cited, *both in _TABLE
    for budget, numbers in zip(BUDGETS, both, strict=True)
}

# Names under which people load the three encoders of the paper, lower case, without an owner.
_FAMILIES = {
    "bert-base-uncased": "BERT-base",
    "bert-base-cased": "BERT-base",
    "roberta-base": "RoBERTa-base",
    "roberta-large": "RoBERTa-large",
}

# Table "cmp": m batch size, d model size, k width of the representation, w model width, r rank,
# K power iterations, M micro-batches.
CLAIMS: dict[str, dict[str, str]] = {
    "dpsgd": {"memory": "O(md)", "compute": "O(md)", "coordinates": "O(d)"},
    "dpfp": {"memory": "O(d)", "compute": "O(md)", "coordinates": "O(k)"},
    "rgp": {"memory": "O(mrw)", "compute": "O(md + Krd + Kr²w)", "coordinates": "O(w)"},
    "non_private": {"memory": "O(d)", "compute": "O(md)"},
}

FIGURE_CLAIMS = {
    "batch": "The paper, RoBERTa-base on SST-2, M = 1, C = 1, ε = 3: large batches (128, 256) hurt,"
    " small learning rates are best. It prints no numbers.",
    "clip": "The paper, RoBERTa-base on SST-2, M = 1, B = 32, ε = 3: C below 0.4 hurts, 0.6 to 1.0"
    " makes no difference. It prints no numbers.",
    "micro": "The paper, SST-2, ε = 0.02 by GDP + CLT, B = 32, 3 epochs: larger M is better, as the"
    " noise power falls by 1/M. It prints no numbers.",
}


def family(model: str) -> str | None:
    """Which of the paper's encoders `model` (a hub id or a folder) is, if any."""
    return _FAMILIES.get(model.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower())


def budget_of(method: str, epsilon: float, accountant: str, task: str) -> tuple[int, bool] | None:
    """The paper's column for a run's budget, and whether the two are calibrated alike.

    Any ε = 3 stands beside the paper's "ε = 3". Alike are only what the paper states for the run's
    own accountant (1.73 by GDP + CLT on SST-2), and for DP-FP only GDP + CLT: that is what the
    paper calibrated it by, and its RDP ε is not 3 (DESIGN 2.1, `privacy/accounting.py`).
    """
    for budget in BUDGETS:
        stated = SPENT.get(accountant, {}).get(budget, {}).get(task)
        if stated is not None and abs(epsilon - stated) < 5e-3:
            return budget, method != METHOD or accountant == "gdp"
    return (int(epsilon), False) if epsilon in BUDGETS else None


def paper_table() -> Table:
    """The paper's main table as printed, to compare ours with."""
    titles = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "Avg.")
    columns = [Column(name, numeric=False) for name in ("Model", "Method", "Whose number")]
    columns += [Column(t, f"ε = {b} (RDP)") for b in BUDGETS for t in titles]
    rows, seen = [], dict.fromkeys((d.family, d.method) for d in DOCUMENTED.values())
    for family, method in seen:
        documented = [DOCUMENTED[family, method, budget] for budget in BUDGETS]
        scores = [s for d in documented for s in (*d.scores.values(), d.average)]
        head = [text(family), text(method_label(method)), text(documented[0].cited)]
        rows.append(Row([*head, *(number(score, ".2f") for score in scores)]))
    foot = []
    for accountant, name in (("gdp", "Gaussian DP + CLT"), ("pld", "Compose tradeoff func.")):
        spent = [
            number(known.get(column.split()[0]), ".2f")
            for budget in BUDGETS
            for known in [SPENT[accountant][budget]]
            for column in (*COLUMNS, "average")
        ]
        foot.append(Row([text("ε ≈"), text(name), text(OWN), *spent], "spent"))
    title = f"What the paper documents ({SOURCE})"
    return Table("paper", title, columns, rows, foot, blocks=True)
