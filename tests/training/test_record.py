"""A record is checked when it is read; what is read has the shape that its type says."""

import json
from typing import Any

import pytest

from dpfp_ray.training.record import checked_record, make_record, read_record, record_id
from tests.support.samples import everything_small


def test_a_record_comes_back_as_it_was_written() -> None:
    for record in everything_small():
        assert read_record(json.dumps(record)) == record


def test_a_failed_trial_has_all_sections_but_empty() -> None:
    record = checked_record({"plan": {}, "trial": {"id": "t", "status": "failed"}})
    assert record == make_record(trial={"id": "t", "status": "failed"})
    assert record_id(record) == "t"


def test_what_a_later_version_adds_is_kept() -> None:
    facts = {"plan": {}, "plan_hash": "x", "cost": {"watts": 5}, "later": 1}
    assert checked_record(facts)["cost"] == {"watts": 5}


@pytest.mark.parametrize(
    ("facts", "where"),
    [
        ({"plan_hash": "x"}, "no plan"),
        ([], "no plan"),
        ({"plan": {}}, "neither trial.id nor plan_hash"),
        ({"plan": {}, "plan_hash": "x", "privacy": []}, "privacy"),
        ({"plan": {}, "plan_hash": "x", "history": [None]}, "history.0"),
        ({"plan": {}, "plan_hash": "x", "history": [{"dev": {"dev": 1}}]}, "history.0"),
        ({"plan": {}, "plan_hash": "x", "trial": {"id": ["t"]}}, "trial.id"),
        ({"plan": {"batch_size": "many"}, "plan_hash": "x"}, "batch_size"),
        ({"plan": {"clip": {}}, "plan_hash": "x"}, "clip"),
    ],
)
def test_nonsense_is_refused_by_its_place(facts: Any, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        read_record(json.dumps(facts))


def test_endless_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        read_record("[" * 100_000)
