"""What the people behind the records have paid, on the first screen of report and service."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_cost import Gaussian
from dpfp_ray.privacy.ledger_entries import Use
from dpfp_ray.reports.ledger import Paid, ledger_figure, spent_on
from dpfp_ray.reports.page import Report, render
from dpfp_ray.results.store import Store
from dpfp_ray.service.app import build_app
from tests.service.conftest import serving
from tests.support.result_records import make_record


def record_of(trial: str, entry: str) -> dict[str, Any]:
    record = make_record(trial)
    return {**record, "trial": {**record["trial"], "ledger_entry": entry}}


@pytest.fixture
def book(tmp_path: Path) -> Ledger:
    """Total 8; one use of σ = 1 that is finished."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.set_total(8.0, 1e-5)
    use = Use(
        purpose="train",
        plan_hash="plan",
        method="dpsgd",
        people=ledger.register(["a text", "another"]).id,
        records=2,
        steps=1,
        parts=(Gaussian(1.0, 1.0),),
        adjacency="add_remove",
        labels_protected=True,
        guarantee="proved",
        delta=1e-5,
        run="run",
    )
    ledger.end(ledger.begin(use).id, 1)
    return ledger


def test_runs_of_another_ledger_are_named_not_left_out(book: Ledger) -> None:
    (entry,) = book.entries()
    known, strange = record_of("one", entry.id), record_of("two", "of-another")
    refused = record_of("three", "")
    refused["trial"]["status"] = "refused"
    assert spent_on(book, [known, refused]).warning() == ""
    paid = spent_on(book, [known, strange, refused])
    assert len(paid.sums) == 1
    assert paid.warning().startswith("1 run that is shown here")


@pytest.mark.slow
def test_the_report_begins_with_spent_and_total(report: Report, book: Ledger) -> None:
    page = render(replace(report, paid=Paid(book.groups(), unknown=2)))
    panel = page.index(f"Paid by the people in the data: ε = {book.groups()[0].shown} of 8")
    assert panel < page.index("<nav")
    assert "2 runs that are shown here cost more than this" in page
    (spent,) = book.groups()
    assert b"total" in ledger_figure(spent, book.total(), "dpfp report").svg


@pytest.mark.slow
def test_the_service_begins_with_spent_and_total(book: Ledger, tmp_path: Path) -> None:
    (entry,) = book.entries()
    Store(tmp_path / "store").put(record_of("one", entry.id))
    with serving(build_app(str(tmp_path / "store"), ledger=book.files.name)) as url:
        page = requests.get(url, timeout=120).text
    assert f"Paid by the people in the data: ε = {book.groups()[0].shown} of 8" in page
