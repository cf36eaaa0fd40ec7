"""None"""

import inspect
import json
import math
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpfp_ray.plan.method_spec import all_specs
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.accounting import Mechanism, gdp_delta, gdp_epsilon
from dpfp_ray.privacy.calibration import (
    expected_epsilon,
    likely_most_rows,
    noise_multiplier,
    shown_epsilon,
)
from dpfp_ray.privacy.statement import brief, guarantee, one_line, render, statement
from dpfp_ray.privacy.statement_forms import (
    first_line,
    nist_questions,
    registry_entry,
    reporting_list,
    seed_handling,
)
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import to_json

RECORDS = 2000
PLANS: dict[str, dict[str, Any]] = {
    "non_private": {"method": "non_private"},
    "paper": {},
    "paper_head": {"scope": "head"},
    "paper_bias": {"scope": "bias"},
    "paper_top": {"scope": "top:2"},
    "dpsgd_lora": {"method": "dpsgd", "scope": "lora", "epochs": 3},
    "release_once": {"mode": "release_once"},
    "release_once_labels": {"mode": "release_once", "label_epsilon": 1.0},
    "release_once_replace": {"mode": "release_once", "adjacency": "replace_one"},
    "moments": {"mode": "moments"},
    "dpsgd": {"method": "dpsgd"},
    "dpsgd_clt": {"method": "dpsgd", "accountant": "gdp"},
    "rgp": {"method": "rgp", "epochs": 3},
}


def facts(name: str, **options: Any) -> dict[str, Any]:
    plan = Plan(**PLANS[name]).bind(records=RECORDS)
    return statement(plan, noise_multiplier(plan), **options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("non_private", "none"),
        ("paper", "nominal"),
        ("paper_head", "nominal"),
        ("paper_bias", "nominal"),
        ("dpsgd_lora", "proved"),
        ("release_once", "proved"),
        ("release_once_labels", "proved"),
        ("moments", "proved"),
        ("dpsgd", "proved"),
        ("dpsgd_clt", "nominal"),  # the central limit theorem is no upper bound
        ("rgp", "proved"),
    ],
)
def test_guarantee(name: str, expected: str) -> None:
    assert guarantee(Plan(**PLANS[name]).bind(records=RECORDS)) == expected
    assert facts(name)["guarantee"] == expected


@pytest.mark.parametrize("name", ["paper_bias", "paper_top"])
def test_no_epsilon_is_proved_while_a_part_of_the_encoder_trains_on_raw_text(name: str) -> None:
    stated = facts(name)
    assert stated["proved"]["epsilon"] is None
    assert any("raw text" in reason for reason in stated["reasons"])
    assert stated["scope"] == PLANS[name]["scope"]


@pytest.mark.parametrize("name", PLANS)
def test_every_statement_is_json_and_is_rendered_from_json(name: str) -> None:
    stored = json.loads(to_json(facts(name)))
    text, short = render(stored), brief(stored)
    assert stored["plan_hash"] in text
    assert len(short.splitlines()) <= 8
    assert stored["guarantee"] in text
    assert stored["guarantee"] in short
    assert one_line(stored).startswith(stored["guarantee"])


@pytest.mark.parametrize("name", ["paper", "paper_head", "dpsgd_clt"])
def test_a_nominal_epsilon_is_never_shown_without_the_word(name: str) -> None:
    for text in (render(facts(name)), brief(facts(name)), one_line(facts(name))):
        for line in text.splitlines():
            if "ε = " in line and "proved" not in line:
                assert line.count("nominal ε = ") == line.count("ε = "), line


def test_paper_gives_three_reasons_and_no_proved_epsilon() -> None:
    found = facts("paper")
    assert len(found["reasons"]) == 3
    assert found["proved"]["epsilon"] is None
    assert not found["accountants"]["pld"]["applies"]
    assert any(item.startswith("labels") for item in found["not_protected"])


def test_a_frozen_encoder_proves_something_in_paper_mode_but_without_amplification() -> None:
    found = facts("paper_head")
    assert found["proved"]["epsilon"] == found["amplification"]["without_amplification"]
    assert found["proved"]["epsilon"] > found["epsilon"]["pld"]
    assert "Jacobian" not in render(found)


def test_who_protects_labels() -> None:
    def labels_open(name: str) -> bool:
        return any(item.startswith("labels") for item in facts(name)["not_protected"])

    assert [name for name in PLANS if name != "non_private" and labels_open(name)] == [
        "paper",
        "paper_head",
        "paper_bias",
        "paper_top",
        "release_once",
        "release_once_replace",
    ]


def test_modes_of_one_release_are_exact_and_count_on_no_sampling() -> None:
    for name in ("release_once", "moments"):
        found = facts(name)
        assert found["epsilon"]["gdp"] == pytest.approx(3.0, rel=1e-3)
        assert found["proved"]["epsilon"] == pytest.approx(3.0, rel=1e-3)
        assert found["amplification"] == {
            "counted": False,
            "without_amplification": found["epsilon"]["pld"],
        }
        assert all(about["applies"] for about in found["accountants"].values())
        assert "no further cost" in found["tuning"]["text"]
    assert facts("release_once")["trust"].startswith("local")
    assert facts("moments")["trust"].startswith("central")


def test_training_loss_is_said_to_be_private_where_it_was_shown() -> None:
    assert "training loss" in render(facts("dpsgd", loss_shown=True))
    assert "training loss" not in render(facts("dpsgd"))
    assert "timings" in render(facts("dpsgd"))
    assert "training loss" not in render(facts("moments"))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"train_file": "mine.csv"}, ["moves no other"]),
        ({"train_file": "mine.csv", "dev_file": "dev.csv"}, []),
        ({"task": "sst2", "max_train": 2000}, ["lets the next one in"]),
        ({"task": "demo", "max_train": 2000}, ["moves no other", "lets the next one in"]),
        ({"task": "sst2"}, []),
    ],
)
def test_how_records_were_chosen_is_among_the_assumptions(
    choice: dict[str, Any], said: list[str]
) -> None:
    plan = Plan(method="dpsgd", **choice).bind(records=RECORDS)
    found = [line for line in statement(plan, 1.0)["assumptions"] if "hash" in line]
    assert len(found) == bool(said)
    assert all(part in found[0] for part in said)


def test_held_out_dev_records_and_a_dev_prior_are_named() -> None:
    plan = Plan(train_file="mine.csv", mode="moments", prior="dev").bind(records=RECORDS)
    text = render(statement(plan, 1.0))
    assert "held out of your training file" in text
    assert "dev texts" in text


def test_a_known_seed_tuning_and_an_audit_are_in_it() -> None:
    found = facts(
        "dpsgd",
        seed_known=True,
        tuning={"epsilon": 5.36, "text": "logarithmic:30"},
        audit={"epsilon": 1.25, "confidence": 0.95},
    )
    text = render(found)
    assert "the seed was given" in text
    assert "ε = 5.36. logarithmic:30" in text
    assert "ε ≥ 1.25 at 95% confidence" in text
    assert "none was run" in render(facts("dpsgd"))


def test_a_partly_done_run_states_what_it_has_spent() -> None:
    plan = Plan(method="dpsgd").bind(records=RECORDS)
    part = statement(plan, noise_multiplier(plan), steps=plan.steps // 3)
    assert part["epsilon"]["pld"] < facts("dpsgd")["epsilon"]["pld"]


def test_epsilon_without_amplification_is_the_mean_over_draws() -> None:
    mech, delta = Mechanism(p=0.02, n=150, noise_multiplier=1.3, adjacency="zero_out"), 1e-4
    found = shown_epsilon(mech, delta)
    draws = np.random.default_rng(0).binomial(150, 0.02, 400_000)
    chances = np.bincount(draws) / len(draws)
    total = sum(c * gdp_delta(found, math.sqrt(k) / 1.3) for k, c in enumerate(chances) if k)
    assert total == pytest.approx(delta, rel=0.1)
    expected = expected_epsilon(mech, delta)
    assert expected == pytest.approx(gdp_epsilon(math.sqrt(3) / 1.3, delta))
    assert found > expected  # some records are drawn more often
    most = likely_most_rows(mech, 1e-6)
    assert stats.binom.sf(most, 150, 0.02) <= 1e-6 < stats.binom.sf(most - 1, 150, 0.02)


def test_without_sampling_nothing_is_averaged() -> None:
    mech = Mechanism(p=1.0, n=4, noise_multiplier=2.0, adjacency="replace_one")
    assert shown_epsilon(mech, 1e-5) == pytest.approx(gdp_epsilon(2.0, 1e-5))


@pytest.mark.parametrize(
    "name", [name for name, spec in all_specs().items() if spec.private and not spec.by_library]
)
def test_a_statement_names_the_generator_that_the_method_calls(name: str) -> None:
    spec = all_specs()[name]
    plan = Plan(method=spec.method, mode=spec.mode).bind(records=1000, representation="mean")
    (line,) = [line for line in statement(plan, 1.0)["assumptions"] if "pseudo-random" in line]
    calls_aes = "add_noise(" in inspect.getsource(import_module(f"dpfp_ray.methods.{name}"))
    assert ("AES" in line, "Philox" in line) == (calls_aes, not calls_aes)


# Statements for machines: complete, honest about nominal ε, and fillable.


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
    assert only["answer"].startswith("none: no guarantee")
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
    assert first_line(audited).startswith("REFUTED: an audit measured")


def test_who_must_be_trusted_is_registered() -> None:
    assert registry_entry(*LOCAL)["deployment"]["model"]["model_name"] == "Local"
    assert registry_entry(*PROVED)["deployment"]["model"]["model_name"] == "Central"


def test_a_known_seed_is_said() -> None:
    known = case("dpfp", mode="moments", epsilon=2.0, seed_known=True)
    assert "given by hand" in seed_handling(known[0])
    assert "deleted" in seed_handling(PROVED[0])
