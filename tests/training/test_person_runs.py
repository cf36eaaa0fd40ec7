"""Whole runs whose unit is the person: D, δ, noise, resume, workers, statement, ledger, audit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpfp_ray.auditing.audit import Settings, set_up
from dpfp_ray.auditing.canaries import FAMILIES
from dpfp_ray.data import Split, Task
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_cost import Gaussian, Pure, RdpCurve, composed_epsilon, for_group
from dpfp_ray.privacy.ledger_entries import use_of
from dpfp_ray.privacy.statement import render
from dpfp_ray.privacy.statement_forms import nist_questions, registry_entry
from dpfp_ray.training.charged import charged
from dpfp_ray.training.prepare import Prepared, Run, build_model, load_inputs, prepare
from tests.support.tiny_runs import (
    Killed,
    Listener,
    audit_with,
    in_threads,
    run_with,
    tiny_split,
    train_with,
)
from tests.training.test_measured_noise import CPU, SEED, empty_steps

SIZES = (1, 2, 3, 5, 1, 8, 2, 2, 1, 4, 6, 1)  # of twelve persons


def person_task(sizes: tuple[int, ...] = SIZES) -> Task:
    users = [f"author {i}" for i, size in enumerate(sizes) for _ in range(size)]
    split = replace(tiny_split(len(users)), users=users)
    return Task("tiny", ("no", "yes"), split, {"dev": tiny_split(10, seed=2)})


def prepared_run(steady_folder: str, task: Task | None = None, **settings: Any) -> Prepared:
    common: dict[str, Any] = {"epsilon": 3.0, "representation": "mean", "user_column": "author"}
    plan = Plan(model=steady_folder, task="sst2", **{**common, **settings})
    return prepare(plan, load_inputs(plan, task or person_task()))


RUNS: dict[str, dict[str, Any]] = {
    "ghost": {"method": "dpsgd", "batch_size": 3, "epochs": 2},
    "hooks head": {
        "method": "dpsgd",
        "scope": "head",
        "clipping": "hooks",
        "batch_size": 3,
        "epochs": 2,
    },
    "rgp": {"method": "rgp", "batch_size": 3, "epochs": 2},
    "dpfp": {"method": "dpfp", "batch_size": 4, "micro_batches": 2, "epochs": 2},
    "non_private": {"method": "non_private", "epsilon": None, "batch_size": 4, "epochs": 2},
    "moments": {"mode": "moments"},
    "release_once": {"mode": "release_once"},
    "release_once labels": {"mode": "release_once", "label_epsilon": 1.0},
    "objpert": {"method": "objpert"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_method_runs_on_persons(steady_folder: str, name: str) -> None:
    prepared = prepared_run(steady_folder, **RUNS[name])
    assert len(SIZES) == prepared.plan.D
    assert len(prepared.data.train) == sum(SIZES)
    record, _ = run_with(prepared, seed=SEED)
    assert record["finished"]
    if prepared.plan.private:
        assert prepared.plan.delta == 1 / (2 * len(SIZES))
        facts = record["statement"]
        assert facts["unit"].startswith("one person, with all of their records (column 'author'")
        assert "person" in facts["neighbours"]
        assert not any("the unit is one record" in text for text in facts["not_protected"])
        assert "D = 12 persons" in facts["assumptions"][0]
        assert "a record drawn" not in render(facts)
        if prepared.plan.label_epsilon:
            assert "and all labels by any others (randomised response, ε = 1" in facts["neighbours"]
        answers = {q["layer"]: q["answer"] for q in nist_questions(facts, prepared.plan, {})}
        assert "For a person with k records" not in answers["unit of privacy"]
        entry = registry_entry(facts, prepared.plan, record["privacy"])
        assert entry["deployment"]["privacy_loss"]["privacy_unit"] == "user-level"


def test_sampling_rate_and_noise_are_those_of_so_many_persons(steady_folder: str) -> None:
    prepared = prepared_run(steady_folder, **RUNS["ghost"])
    by_records = Plan(
        model=steady_folder, task="sst2", representation="mean", **RUNS["ghost"]
    ).bind(records=len(SIZES))
    assert prepared.plan.p == 3 / len(SIZES)
    assert prepared.noise_multiplier == noise_multiplier(by_records)


@pytest.mark.slow
def test_steps_without_a_person_are_the_planned_noise(steady_folder: str) -> None:
    prepared = prepared_run(
        steady_folder, method="dpsgd", batch_size=1, epochs=10, delta=1e-3, scope="head"
    )
    model = build_model(prepared, SEED, CPU)
    with empty_steps(model) as found:
        run_with(prepared, seed=SEED, model=model)
    assert len(found) > 15
    values = torch.cat([value.flatten() for step in found for value in step.values()])
    needed = noise_multiplier(prepared.plan) * prepared.plan.C
    assert values.std().item() == pytest.approx(needed, rel=0.1)


def weights(model: Classifier) -> list[torch.Tensor]:
    return [parameter.detach().clone() for _, parameter in trainable_parameters(model)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ghost", "dpfp"])
def test_a_resumed_run_and_two_workers_end_with_the_same_weights(
    steady_folder: str, name: str
) -> None:
    prepared = prepared_run(steady_folder, **RUNS[name])

    def trained(comm: Any = None, state: Any = None, kill: int | None = None) -> Any:
        model, listener = build_model(prepared, SEED, CPU), Listener(kill)
        facts = (prepared.plan, prepared.noise_multiplier, model, prepared.data)
        try:
            train_with(*facts, listener, seed=SEED, comm=comm, state=state)
        except Killed:
            return listener.state()
        return weights(model)

    whole = trained()
    resumed = trained(state=trained(kill=3))
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
    for shared in in_threads(2, trained):
        for one, other in zip(whole, shared, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_whose_rows_they_are_is_part_of_what_the_noise_is_keyed_by(steady_folder: str) -> None:
    train_table = prepared_run(steady_folder, **RUNS["ghost"]).data.train
    persons = train_table.persons
    assert persons is not None
    other = replace(train_table, persons=persons[::-1].copy())  # type: ignore[type-var]
    assert train_table.content() != other.content()  # type: ignore[attr-defined]


# --- the ledger ----------------------------------------------------------------------------------


def enter(ledger: Ledger, prepared: Prepared, name: str) -> None:
    with charged(ledger, Run(prepared, SEED), where=name):
        pass


@pytest.mark.slow
def test_the_sum_says_whom_it_holds_for(steady_folder: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    enter(ledger, prepared_run(steady_folder, **RUNS["ghost"]), "persons")
    (spent,) = ledger.groups()
    assert spent.holds_for == "one person"
    assert spent.to_json()["entries"][0]["unit"] == "person"
    records = prepared_run(steady_folder, **{**RUNS["ghost"], "user_column": None, "epochs": 3})
    enter(ledger, records, "records")
    (mixed,) = ledger.groups()
    assert "one person with 1 record in each of the 1 uses that protect records" in mixed.sentence()
    assert "one with more there pays more" in mixed.sentence()
    (more,) = ledger.groups(records_per_person=3)
    assert more.epsilon > mixed.epsilon > spent.epsilon
    assert "one person with 3 records" in more.sentence()


def test_sets_that_share_a_person_are_one_group(tmp_path: Path) -> None:
    def texts(*rows: tuple[str, str]) -> list[str]:
        found, users = zip(*rows, strict=True)
        return Split(list(found), None, np.zeros(len(rows)), users=list(users)).all_texts()

    ledger = Ledger(tmp_path / "ledger")
    one = ledger.register(texts(("a text", "ann")))
    assert not ledger.register(texts(("another text", "bob"))).overlaps
    assert one.id in ledger.register(texts(("a third text", "Ann"), ("more", "carl"))).overlaps


def test_an_entry_from_before_units_is_of_records(steady_folder: str) -> None:
    from dpfp_ray.privacy.ledger_entries import Entry, entry_from_json, opening_to_json

    prepared = prepared_run(steady_folder, **RUNS["ghost"])
    use = use_of(prepared.plan, prepared.noise_multiplier, people="x", run="r")
    opening = opening_to_json(Entry("r-1", "now", "me", use))
    assert entry_from_json(opening, []).use.unit == "person"
    del opening["use"]["unit"]
    assert entry_from_json(opening, []).use.unit == "record"


def test_a_group_of_records_costs_no_less_than_it_can() -> None:
    """Against draws that are known to happen together: M records as one of M times the length."""
    assert for_group(Gaussian(1.0, 6.0), 3) == Gaussian(1.0, 2.0)
    assert for_group(Pure(0.5), 3) == Pure(1.5)
    sampled = for_group(Gaussian(0.1, 6.0, 2), 3)
    assert isinstance(sampled, Gaussian)
    assert sampled.p == pytest.approx(1 - 0.9**3)
    assert (sampled.noise_multiplier, sampled.per_step) == (2.0, 2)
    # 2^1 records: order 4 at R = 0.2 becomes order 2 at 0.6; orders below 4 say nothing.
    assert for_group(RdpCurve((1.5, 4.0), (0.1, 0.2)), 2) == RdpCurve((2.0,), (3 * 0.2,))
    few = composed_epsilon({Gaussian(0.1, 6.0): 20}, 1e-5)
    assert composed_epsilon({sampled: 20}, 1e-5) > 3 * few


# --- the audit -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ghost", "rgp", "dpfp", "moments", "release_once", "objpert"])
def test_canaries_are_persons(steady_folder: str, name: str) -> None:
    settings = {key: value for key, value in RUNS[name].items() if key != "epochs"}
    common: dict[str, Any] = {"user_column": "author", "representation": "mean", "epsilon": 400.0}
    plan = Plan(model=steady_folder, task="sst2", **{**common, **settings})
    task = person_task(SIZES * 4)
    audit = set_up(plan, Settings(canaries=20), membership_seed=3, task=task)
    assert len(audit.canaries) == 20
    assert len(audit.canaries.places) > 20
    train_table = audit.prepared.data.train
    assert audit.prepared.plan.D == 48
    persons, owners = audit.real.persons, audit.canaries.table.persons
    assert persons is not None
    assert owners is not None
    # All rows of a canary are in, or none is.
    displaced = persons[audit.canaries.places]
    assert all(len(np.unique(displaced[owners == c])) == 1 for c in range(20))
    if plan.one_release and plan.adjacency == "add_remove":
        assert len(train_table) == len(persons) - np.sum(~audit.members[owners])
    record, scores = audit_with(audit, seed=SEED)
    assert len(scores) == 20
    assert record["audit"]["unit"] == "person"
    here, away = scores[audit.members], scores[~audit.members]
    if plan.one_release:  # next to no noise: who was in shows
        assert here.mean() > away.mean() + 0.1
    if name in ("moments", "release_once"):
        assert here.min() > away.max()
    if name == "dpfp":  # its rows move for those who were drawn, and for nobody else
        assert record["audit"]["score"] == "row_movement"
        assert away.max() < 1e-7  # rounding
        assert np.mean(here > 1e-5) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "verdict"), [("dpfp", "refuted"), ("rgp", "consistent")])
def test_persons_as_canaries_refute_the_nominal_epsilon_and_not_the_proved_one(
    steady_folder: str, name: str, verdict: str
) -> None:
    settings = {**RUNS[name], "epochs": 8, "epsilon": 0.2, "delta": 1e-6}
    common: dict[str, Any] = {"user_column": "author", "representation": "mean"}
    plan = Plan(model=steady_folder, task="sst2", **{**common, **settings})
    audit = set_up(plan, Settings(canaries=24), membership_seed=3, task=person_task(SIZES * 4))
    record, _ = audit_with(audit, seed=SEED)
    found = record["audit"]
    assert (found["unit"], found["verdict"]) == ("person", verdict)
    assert (found["epsilon"] > 0.2) == (verdict == "refuted")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_canary_has_as_many_rows_as_the_person_it_displaces(
    steady_folder: str, family: str
) -> None:
    from dpfp_ray.auditing.canaries import make_canaries
    from dpfp_ray.models.pretrained import load_tokenizer

    task = person_task()
    canaries = make_canaries(family, 5, task, load_tokenizer(steady_folder), 32)
    sizes = [len(canaries.rows_of(canary)) for canary in range(5)]
    users = np.array(task.train.users)[canaries.places]
    assert sorted(sizes) == sorted(np.unique(users, return_counts=True)[1])
    if canaries.tokens is not None:
        assert len(canaries.tokens) == 5
