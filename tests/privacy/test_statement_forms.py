"""Statements for machines: complete, honest about nominal ε, and fillable."""

import math
from typing import Any

import pytest

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.statement import statement
from dpfp_ray.privacy.statement_forms import (
    first_line,
    nist_questions,
    registry_entry,
    reporting_list,
    seed_handling,
)
from dpfp_ray.system.errors import UserError

Case = tuple[dict[str, Any], Plan, dict[str, Any]]


def case(method: str, seed_known: bool = False, **changes: Any) -> Case:
    plan = Plan(method=method, accountant="pld", **changes).bind(
        records=2000, representation="mean", classes=2
    )
    if not plan.private:
        return statement(plan, 0.0), plan, {}
    noise = noise_multiplier(plan)
    privacy = {"noise_multiplier": noise, "draws": plan.draws}
    return statement(plan, noise, seed_known=seed_known), plan, privacy


PROVED = case("dpfp", mode="moments", epsilon=2.0)
NOMINAL = case("dpfp", scope="head", batch_size=100, epochs=1, epsilon=2.0)
LOCAL = case("dpfp", mode="release_once", epsilon=2.0)


def test_the_reporting_list_states_every_part() -> None:
    found = reporting_list(*PROVED)
    assert {"setting", "definition", "accounting", "transparency"} <= set(found)
    assert found["accounting"]["epsilon"]["pld"] == pytest.approx(2.0, abs=1e-3)
    assert found["definition"]["unit_of_privacy"] == "one training record"
    assert found["definition"]["adjacency"]["name"] == "add_remove"


@pytest.mark.parametrize("one", [PROVED, NOMINAL, LOCAL])
def test_every_question_has_an_answer(one: Case) -> None:
    asked = nist_questions(*one)
    assert all(qa["question"].endswith("?") and qa["answer"] for qa in asked)
    assert len({qa["layer"] for qa in asked}) == len(asked) == 11


def test_without_privacy_the_one_answer_is_no() -> None:
    (only,) = nist_questions(*case("non_private"))
    assert only["answer"].startswith("No privacy guarantee")
    with pytest.raises(UserError, match="promises nothing"):
        registry_entry(*case("non_private"))


def test_a_proved_epsilon_is_registered_rounded_up() -> None:
    facts = PROVED[0]
    given = registry_entry(*PROVED)["deployment"]["privacy_loss"]["privacy_parameters"]
    assert given["epsilon"] >= facts["epsilon"]["pld"]
    assert given["epsilon"] == pytest.approx(facts["epsilon"]["pld"], abs=1e-4)


def test_a_nominal_epsilon_is_not_registered_as_a_guarantee() -> None:
    facts = NOMINAL[0]
    given = registry_entry(*NOMINAL)["deployment"]["privacy_loss"]
    proved = facts["proved"]["epsilon"]
    assert given["privacy_parameters"]["epsilon"] == math.ceil(proved * 1e4) / 1e4
    assert given["privacy_parameters"]["epsilon"] > facts["epsilon"]["pld"]
    assert "NOMINAL" in given["privacy_parameters_description"]


def test_a_refuted_epsilon_is_not_registered() -> None:
    facts, plan, privacy = PROVED
    audited = facts | {"audit": {"verdict": "refuted", "epsilon": 5.0}}
    given = registry_entry(audited, plan, privacy)["deployment"]["privacy_loss"]
    assert given["privacy_parameters"] == {}
    assert first_line(audited).startswith("WARNING: the stated ε is REFUTED")


def test_who_must_be_trusted_is_registered() -> None:
    assert registry_entry(*LOCAL)["deployment"]["model"]["model_name"] == "Local"
    assert registry_entry(*PROVED)["deployment"]["model"]["model_name"] == "Central"


def test_a_known_seed_is_said() -> None:
    known = case("dpfp", mode="moments", epsilon=2.0, seed_known=True)
    assert "given by hand" in seed_handling(known[0])
    assert "deleted" in seed_handling(PROVED[0])
