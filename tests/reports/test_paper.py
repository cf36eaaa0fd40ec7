"""The paper's numbers: complete, and consistent with the paper's own arithmetic."""

from statistics import mean

import pytest

from dpfp_ray.reports import paper
from tests.support.samples import PAPER_METHODS


def test_every_model_method_and_budget_of_the_table_is_there() -> None:
    families = {"BERT-base", "RoBERTa-base", "RoBERTa-large"}
    keys = {(f, m, b) for f in families for m in PAPER_METHODS for b in paper.BUDGETS}
    assert set(paper.DOCUMENTED) == keys


@pytest.mark.parametrize("row", paper.DOCUMENTED.values(), ids=lambda r: f"{r.family} {r.method}")
def test_averages_are_those_of_the_five_columns(row: paper.Documented) -> None:
    """A slip in copying a number would show here."""
    scores = [score for score in row.scores.values() if score is not None]
    if row.average is None:
        assert scores == []
    else:
        assert len(scores) == 5
        assert mean(scores) == pytest.approx(row.average, abs=0.006)


def test_the_abstract_agrees_with_the_table() -> None:
    """91.34% on average with RoBERTa-large, 3.81 above DP-SGD, 0.9 below the baseline."""
    average = {m: paper.DOCUMENTED["RoBERTa-large", m, 3].average or 0.0 for m in PAPER_METHODS}
    assert average["dpfp"] == 91.34
    assert average["dpfp"] - average["dpsgd"] == pytest.approx(3.81)
    assert average["non_private"] - average["dpfp"] == pytest.approx(0.9)


def test_every_task_of_the_paper_has_an_epsilon_by_every_accountant() -> None:
    for by_budget in paper.SPENT.values():
        assert all(set(by_budget[budget]) == set(paper.TASKS) for budget in paper.BUDGETS)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("roberta-base", "RoBERTa-base"),
        ("FacebookAI/roberta-large", "RoBERTa-large"),
        ("/models/bert-base-uncased/", "BERT-base"),
        ("minilm", None),
        ("distilroberta-base", None),
    ],
)
def test_only_the_papers_own_encoders_have_a_number(name: str, family: str | None) -> None:
    assert paper.family(name) == family


def test_budgets_are_alike_only_by_the_accountant_that_the_paper_used() -> None:
    assert paper.budget_of("dpfp", 1.73, "gdp", "sst2") == (3, True)
    assert paper.budget_of("dpfp", 3.0, "pld", "sst2") == (3, False)
    assert paper.budget_of("dpfp", 3.0, "rdp", "sst2") == (3, False)
    assert paper.budget_of("dpsgd", 3.0, "rdp", "sst2") == (3, True)
    assert paper.budget_of("dpsgd", 8.0, "pld", "demo") == (8, False)
    assert paper.budget_of("dpfp", 1.73, "gdp", "qnli") is None
    assert paper.budget_of("dpfp", 5.0, "pld", "sst2") is None
