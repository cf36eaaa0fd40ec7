"""The statement's words and numbers reach the report, whatever version wrote them."""

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.statement import render, statement
from dpfp_ray.reports import statements
from dpfp_ray.results.runs import read_runs
from tests.support.samples import sample


def test_a_statement_is_worded_by_its_own_module() -> None:
    record = sample("a", method="dpfp", epochs=1)
    plan = Plan(method="dpfp", epochs=1).bind(records=1_000, representation="mean")
    facts = statement(plan, 1.0, tuning={"epsilon": 5.5, "text": "t"})
    (run,) = read_runs([record | {"statement": facts}])
    assert statements.statement_text(run) == render(facts)


def test_a_statement_of_another_version_is_shown_as_it_is() -> None:
    (run,) = read_runs([sample("a") | {"statement": {"schema": 99, "tuning": {"epsilon": "inf"}}}])
    assert '"schema": 99' in str(statements.statement_text(run))


def test_records_without_a_statement_have_none() -> None:
    (run,) = read_runs([sample("a")])
    assert statements.statement_text(run) is None
