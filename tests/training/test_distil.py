"""A student, its teacher, and what both of them cost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from dpfp_ray.methods.parts import perturbed_minimum
from dpfp_ray.plan.method_spec import find_spec
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.accounting import epsilons, mechanism
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.ledger import open_ledger
from dpfp_ray.privacy.statement import first_line
from dpfp_ray.sweeps.compare import plan_cells
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.system.errors import UserError
from dpfp_ray.training import distil
from dpfp_ray.training.loop import Drawing, Epoch, Released, Step
from dpfp_ray.training.prepare import Run, build_model, load_inputs, prepare
from dpfp_ray.training.train import TrainedRun, run_events, train
from tests.support.tiny_runs import tiny_split


@pytest.fixture
def values(tiny_task: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A student of four steps an epoch."""
    public = tmp_path / "public.txt"
    public.write_text("\n".join(f"{text} it said" for text in tiny_split(48, seed=5).texts))
    names = ("train_file", "dev_file", "model", "representation")
    return {
        **{name: tiny_task[name] for name in names},
        "method": "distil",
        "teacher_model": tiny_task["model"],
        "public_file": str(public),
        "batch_size": 8,
        "epsilon": 8.0,
    }


def same_weights(first: TrainedRun, second: TrainedRun) -> bool:
    texts = list(tiny_split(20, seed=8).texts)
    answers = [[a.probabilities for a in run.model.predict(texts)] for run in (first, second)]  # type: ignore[union-attr]
    return answers[0] == answers[1]


def test_all_that_reads_private_records_is_the_teacher_s_plan(values: dict[str, Any]) -> None:
    plan = prepare(Plan(**values)).plan
    alone = Plan(
        method="objpert",
        epsilon=8.0,
        **{name: values[name] for name in ("train_file", "dev_file", "model")},
    )
    teacher = prepare(alone).plan
    assert plan.private_part == teacher
    assert noise_multiplier(plan) == noise_multiplier(teacher)


def test_every_step_of_the_student_follows_one_release(values: dict[str, Any]) -> None:
    plan = prepare(Plan(**values)).plan
    noise, delta = noise_multiplier(plan), plan.delta or 0.0
    assert plan.steps > 4
    spent = [epsilons(mechanism(plan, noise, steps), delta)["pld"] for steps in (0, 1, plan.steps)]
    assert spent[0] == 0.0
    assert spent[1] == spent[2] == pytest.approx(8.0, rel=1e-4)


def test_half_of_the_teacher_s_noise_is_stated_as_more_than_the_budget(
    values: dict[str, Any],
) -> None:
    plan = prepare(Plan(**values)).plan
    half = epsilons(mechanism(plan, noise_multiplier(plan) / 2), plan.delta or 0.0)["pld"]
    assert half is not None
    assert half > 12


def test_the_release_is_made_with_the_noise_that_is_stated(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches the mechanism is what the accountant, the record and the ledger are given."""
    made = []
    real = perturbed_minimum.perturbed_minimum

    def listening(x: Any, labels: Any, own: Any, *rest: Any) -> Any:
        made.append(own.sigma)
        return real(x, labels, own, *rest)

    monkeypatch.setattr(perturbed_minimum, "perturbed_minimum", listening)
    record = train(Plan(**values), seed=11, reporter="silent").record
    assert made == [record["privacy"]["noise_multiplier"]]


def test_the_student_depends_on_private_records_through_the_release_alone(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours as far apart as can be (all texts, all labels), and the same release: the same
    student to the bit. So whatever protects the release protects the student."""
    spec = find_spec("objpert")
    assert spec is not None
    assert spec.one_release is not None

    def release(plan: Plan, noise: float, table: Any, classes: int, seed: int) -> Any:
        return np.random.default_rng(0).standard_normal((table.width + 1, 1))

    monkeypatch.setitem(vars(spec.one_release), "release", release)
    plan = Plan(**{k: v for k, v in values.items() if k not in ("train_file", "dev_file")})
    dev = (tiny_split(20, seed=2).texts, tiny_split(20, seed=2).labels)
    other = tiny_split(60, seed=7)
    first, second = (
        train(plan, data=data, dev=dev, seed=1, reporter="silent")
        for data in (
            (tiny_split(60).texts, tiny_split(60).labels),
            ([f"{text} again" for text in other.texts], 1 - other.labels),
        )
    )
    assert same_weights(first, second)
    assert first.record["metrics"] == second.record["metrics"]


def test_labels_are_the_teacher_s_own_answers(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the teacher trained by itself with the same seed, asked by `predict`."""
    labels = []
    prepared = prepare(Plan(**values))
    real = distil.train_steps

    def listening(run: Any, model: Any, data: Any, comm: Any) -> Any:
        labels.append(data.train.labels)
        return real(run, model, data, comm)

    monkeypatch.setattr(distil, "train_steps", listening)
    list(run_events(Run(prepared, seed=4), build_model(prepared, 4)))
    teacher = train(prepared.plan.private_part, seed=4, reporter="silent").model
    assert teacher is not None
    texts = Path(values["public_file"]).read_text().splitlines()
    expected = [list(answer.probabilities.values()) for answer in teacher.predict(texts)]
    assert_allclose(labels[0], expected, atol=1e-3)  # rows are kept in half precision


def test_the_loop_pays_before_the_release_and_tells_of_it(values: dict[str, Any]) -> None:
    prepared = prepare(Plan(**values))
    events = [type(event) for event in run_events(Run(prepared, 4), build_model(prepared, 4))]
    assert events.index(Drawing) < events.index(Released) < events.index(Step)
    assert events.count(Released) == 1
    assert events.count(Epoch) == 2


def test_a_ledger_charges_the_teacher_once_for_all_of_its_students(
    values: dict[str, Any], tmp_path: Path
) -> None:
    book = tmp_path / "ledger"
    for rate in (1e-3, 1e-4, 1e-5):
        train(Plan(**values, learning_rate=rate), seed=3, ledger=book, reporter="silent")
    (spent,) = open_ledger(book).groups()
    train(Plan(**values).private_part, seed=3, ledger=book, reporter="silent")
    (with_teacher,) = open_ledger(book).groups()
    assert spent.epsilon == with_teacher.epsilon < 9.0
    train(Plan(**values), seed=4, ledger=book, reporter="silent")
    assert open_ledger(book).groups()[0].epsilon > with_teacher.epsilon


def test_a_killed_run_ends_with_the_same_student(values: dict[str, Any], tmp_path: Path) -> None:
    plan = Plan(**values)
    whole = train(plan, seed=3, output=tmp_path / "whole", reporter="silent")
    prepared = prepare(plan)
    events = run_events(Run(prepared, 3), build_model(prepared, 3))
    state = next(e.checkpoint() for e in events if isinstance(e, Step) and e.done == 5)
    model = build_model(prepared, 3)
    *_, finished = run_events(Run(prepared, 3, state), model)
    assert finished.record["metrics"] == whole.record["metrics"]  # type: ignore[union-attr]
    assert finished.record["privacy"] == whole.record["privacy"]  # type: ignore[union-attr]


def test_the_record_states_the_teacher_s_cost_and_names_the_text(values: dict[str, Any]) -> None:
    record = train(Plan(**values), seed=3, reporter="silent").record
    privacy, facts = record["privacy"], record["statement"]
    assert (privacy["p"], privacy["steps"], privacy["guarantee"]) == (1.0, 1, "proved")
    assert first_line(facts).startswith("proved, ε = 8 at δ")
    assert any("48 texts that the teacher labels" in text for text in facts["assumptions"])
    assert not any("training loss" in text for text in facts["not_protected"])


def test_a_teacher_without_records_spends_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    """The control: what public text does without a private label."""
    del values["epsilon"]
    run = train(
        Plan(**values, teacher="public", label_words=("dull|boring", "great|superb")),
        ledger=tmp_path / "ledger",
        reporter="silent",
    )
    assert run.statement.startswith("privacy: proved, ε = 0: no private record was read")
    assert open_ledger(tmp_path / "ledger").groups()[0].epsilon == 0.0


def test_a_comparison_runs_a_student_without_records_once(values: dict[str, Any]) -> None:
    """It has no ε to repeat; with a private teacher there is one for each."""
    del values["method"], values["epsilon"]
    control = plan_cells(["distil"], [1.0, 3.0], {**values, "teacher": "public"}, None)
    assert ["epsilon" in cell for cell in control] == [False]
    assert [cell["epsilon"] for cell in plan_cells(["distil"], [1.0, 3.0], values, None)] == [1, 3]


def test_students_of_one_sweep_share_a_release(values: dict[str, Any]) -> None:
    """Trials with another rate get the same seed, so the same teacher, which is paid once."""
    plans = [prepare(Plan(**values, learning_rate=rate)).plan for rate in (1e-3, 1e-4)]
    first, second = (Trial(plan, 0, noise_multiplier(plan)) for plan in plans)
    assert first.id != second.id
    assert first.seed(7) == second.seed(7)


def test_a_budget_without_a_private_teacher_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="spends no budget; drop epsilon and delta"):
        Plan(**values, teacher="public")


def test_teachers_are_heads_with_the_same_neighbours() -> None:
    with pytest.raises(UserError, match="unknown teacher 'rgp'; use one of"):
        Plan(method="distil", teacher="rgp")


def test_the_student_s_inputs_are_its_own_encoder_s(values: dict[str, Any]) -> None:
    inputs = load_inputs(Plan(**values))
    assert inputs.public is not None
    assert len(inputs.public.rows) == len(inputs.public.tokens) == 48
    assert inputs.public.rows.width == inputs.data.train.width  # type: ignore[attr-defined]
