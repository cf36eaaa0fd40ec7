"""The loop: killed runs that end as if nothing had happened, empty steps, several workers."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfp_ray.auditing.canaries import blank, hide_empty, stack
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.methods.dpfp import DpFp
from dpfp_ray.methods.parts.base import Rows
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import Spending
from dpfp_ray.privacy.sampling import Records, Sampler, make_sampler, run_seed
from dpfp_ray.system.errors import UserError
from dpfp_ray.training import loop as module
from dpfp_ray.training.loop import Progress, State, evaluate, weights_hash
from dpfp_ray.training.machine import Comm, SoloComm, TorchComm
from dpfp_ray.training.prepare import freeze_unreached
from dpfp_ray.training.step import Steps, make_optimizer
from tests.support.gloo import run_workers
from tests.support.tiny_runs import (
    Killed,
    Listener,
    in_threads,
    tiny_classifier,
    tiny_data,
    tiny_plan,
    train_with,
)

SEED = 2**90 + 1
Weights = dict[str, Tensor]


def run(
    model_folder: str,
    plan: Plan,
    listener: Listener | None = None,
    *,
    comm: Comm | None = None,
    state: State | None = None,
    noise: float = 0.5,
    seed: int = SEED,
    show_training_loss: bool = True,
) -> tuple[Progress, Weights]:
    """One run from the start, or from `state`; the weights that it ends with."""
    model = tiny_classifier(model_folder, plan)
    progress = train_with(
        plan,
        noise if plan.private else 0.0,
        model,
        tiny_data(model_folder, train_rows=plan.D),
        listener,
        seed=seed,
        comm=comm,
        state=state,
        show_training_loss=show_training_loss,
    )
    return progress, {name: p.detach() for name, p in trainable_parameters(model)}


def killed(
    model_folder: str, plan: Plan, kill_after: int, at_epoch: bool = False, **options: Any
) -> Listener:
    """A run that is killed after so many steps; what it heard, and its saved state."""
    victim = Listener(kill_after, at_epoch)
    with pytest.raises(Killed):
        run(model_folder, plan, victim, **options)
    return victim


def sampler_of(model_folder: str, plan: Plan, seed: int) -> Sampler:
    """What `run` draws its rows by."""
    content = tiny_data(model_folder, train_rows=plan.D).train.content()
    content += f" {weights_hash(tiny_classifier(model_folder, plan))}"
    return make_sampler(plan, run_seed(seed, plan, 0.5 if plan.private else 0.0, content))


def facts(progress: Progress) -> dict[str, Any]:
    """All that a run remembers but its clock."""
    found = copy.deepcopy(vars(progress))
    for clock in ("train_seconds", "eval_seconds"):
        del found[clock]
    for record in found["history"]:
        del record["train_seconds"]
    return found


def assert_identical(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# Killed and resumed ------------------------------------------------------------------------------

PLANS = {
    "non_private": tiny_plan("non_private"),
    "dpfp": tiny_plan("dpfp"),
    "dropout": tiny_plan("non_private", dropout=0.2),
    "head": tiny_plan("dpfp", scope="head"),
    "split": tiny_plan("dpfp", max_physical_batch=3),
}


@pytest.fixture(scope="module")
def unbroken(model_folder: str) -> dict[str, tuple[Progress, Weights]]:
    return {name: run(model_folder, plan) for name, plan in PLANS.items()}


# Around the ends of epochs (after 6, 12 and 18 steps) and away from them.
KILLS = {
    "non_private": [1, 5, 6, 7, 17, 18],
    "dpfp": [1, 5, 6, 7, 12, 17, 18],
    "dropout": [5, 7],
    "head": [7],
    "split": [7],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kill_after"), [(name, step) for name in KILLS for step in KILLS[name]]
)
def test_a_killed_and_resumed_run_ends_as_an_unbroken_one(
    model_folder: str, unbroken: dict[str, tuple[Progress, Weights]], name: str, kill_after: int
) -> None:
    victim = killed(model_folder, PLANS[name], kill_after)
    progress, weights = run(model_folder, PLANS[name], state=victim.state())
    assert_identical(weights, unbroken[name][1])
    assert facts(progress) == facts(unbroken[name][0])


def test_a_run_killed_between_evaluation_and_report_loses_no_epoch(
    model_folder: str, unbroken: dict[str, tuple[Progress, Weights]]
) -> None:
    victim = killed(model_folder, PLANS["dpfp"], 12, at_epoch=True)
    progress, weights = run(model_folder, PLANS["dpfp"], state=victim.state())
    assert_identical(weights, unbroken["dpfp"][1])
    assert facts(progress) == facts(unbroken["dpfp"][0])


@pytest.mark.slow
def test_a_run_killed_at_every_second_step_ends_the_same(
    model_folder: str, unbroken: dict[str, tuple[Progress, Weights]]
) -> None:
    state: State | None = None
    for kill_after in range(2, 18, 2):
        state = killed(model_folder, PLANS["dropout"], kill_after, state=state).state()
    progress, weights = run(model_folder, PLANS["dropout"], state=state)
    assert_identical(weights, unbroken["dropout"][1])
    assert facts(progress) == facts(unbroken["dropout"][0])


@pytest.mark.slow
def test_the_bit_identity_tests_can_fail(
    model_folder: str, unbroken: dict[str, tuple[Progress, Weights]]
) -> None:
    """Another seed, or dropout or noise of another size, does end elsewhere."""
    plain, found = (unbroken[name][1]["head.weight"] for name in ("non_private", "dpfp"))
    assert not torch.equal(plain, unbroken["dropout"][1]["head.weight"])
    assert not torch.equal(found, run(model_folder, PLANS["dpfp"], seed=1)[1]["head.weight"])
    assert not torch.equal(found, run(model_folder, PLANS["dpfp"], noise=0.6)[1]["head.weight"])


@pytest.mark.parametrize("kill_after", [3, 6, 17])
def test_a_checkpoint_says_what_was_spent(model_folder: str, kill_after: int) -> None:
    plan = PLANS["dpfp"]
    state = killed(model_folder, plan, kill_after).state()
    assert state["epsilon"] == Spending(plan, 0.5).spent(kill_after)
    assert (state["noise_multiplier"], state["plan_hash"]) == (0.5, plan.hash)


def test_a_checkpoint_holds_no_seed(model_folder: str) -> None:
    """Who stores it decides whether the seed goes with it."""
    victim = killed(model_folder, PLANS["dpfp"], 3)
    assert "seed" not in victim.state()
    assert SEED.to_bytes(12, "little") not in victim.saved


# Steps -------------------------------------------------------------------------------------------


def test_every_step_and_epoch_is_reported_once(model_folder: str) -> None:
    listener = Listener()
    progress, _ = run(model_folder, PLANS["dpfp"], listener)
    assert listener.steps == list(range(1, 19))
    assert [record["step"] for record in listener.records] == [6, 12, 18]
    assert [record["epoch"] for record in listener.records] == [1, 2, 3]
    assert listener.records == progress.history


def test_the_reported_loss_is_the_mean_over_the_rows_of_this_epoch(model_folder: str) -> None:
    """Against single steps: with a learning rate of almost 0 the weights stay as they are."""
    plan = tiny_plan("non_private", learning_rate=1e-30, weight_decay=0.0)
    listener = Listener()
    progress, _ = run(model_folder, plan, listener)
    model, data = tiny_classifier(model_folder, plan), tiny_data(model_folder)
    sampler = sampler_of(model_folder, plan, SEED)
    losses = []
    for step in range(6):
        rows = sampler.draw(step)
        with torch.no_grad():
            logits = model(data.train.collate(rows))
        labels = torch.from_numpy(data.train.labels[rows])
        losses.append(float(torch.nn.functional.cross_entropy(logits, labels)))
    assert listener.losses[2] == pytest.approx(sum(losses[:3]) / 3, rel=1e-5)
    # Every epoch has the same 24 rows, so what one leaves behind would show in the next.
    for record in progress.history:
        assert record["train_loss"] == pytest.approx(sum(losses) / 6, rel=1e-5)


def test_the_training_loss_of_a_private_run_is_shown_only_if_asked_for(model_folder: str) -> None:
    hidden = Listener()
    progress, _ = run(model_folder, PLANS["dpfp"], hidden, show_training_loss=False)
    assert [record["train_loss"] for record in progress.history] == [None] * 3
    assert hidden.losses == [None] * 18
    shown = killed(model_folder, PLANS["dpfp"], 17)
    assert all(record["train_loss"] > 0 for record in shown.records)
    assert shown.state()["loss_rows"] > 0


def test_a_state_keeps_no_loss_that_is_not_to_be_shown(model_folder: str) -> None:
    victim = killed(model_folder, PLANS["dpfp"], 5, show_training_loss=False)
    assert (victim.state()["loss_sum"], victim.state()["loss_rows"]) == (0.0, 0)


@pytest.fixture
def sparse(model_folder: str) -> tuple[Plan, int]:
    """A plan of one expected row a step and a seed whose first step is empty."""
    plan = tiny_plan(batch_size=1, micro_batches=1, epochs=1)
    seeds = (s for s in range(100) if not len(sampler_of(model_folder, plan, s).draw(0)))
    seed = next(seeds)
    return plan, seed


def test_empty_steps_are_steps(model_folder: str, sparse: tuple[Plan, int]) -> None:
    plan, seed = sparse
    sampler = sampler_of(model_folder, plan, seed)
    sizes = [len(sampler.draw(step)) for step in range(plan.steps)]
    assert sizes.count(0) > 3
    progress, weights = run(model_folder, plan, seed=seed)
    assert progress.step == plan.steps == 24
    assert progress.rows == sum(sizes)
    assert progress.history[-1]["epsilon"] == Spending(plan, 0.5).spent(24)
    assert all(weight.isfinite().all() for weight in weights.values())


def test_an_empty_first_step_changes_no_weight_but_by_decay(
    model_folder: str, sparse: tuple[Plan, int]
) -> None:
    plan, seed = sparse
    victim = killed(model_folder, plan, 1, seed=seed)
    before = {n: p.detach() for n, p in trainable_parameters(tiny_classifier(model_folder, plan))}
    decay = 1 - float(plan.learning_rate or 0) * float(plan.weight_decay or 0)
    for name, weight in victim.state()["model"].items():
        torch.testing.assert_close(weight, before[name] * decay)


def test_physical_batches_do_not_change_the_step(
    model_folder: str, unbroken: dict[str, tuple[Progress, Weights]]
) -> None:
    assert_close_runs(model_folder, PLANS["dpfp"], unbroken["split"], unbroken["dpfp"])


@pytest.mark.parametrize(("schedule", "fall"), [("linear", 1 / 18), ("constant", 0.0)])
def test_a_linear_schedule_falls_to_almost_zero_and_a_constant_one_stays(
    model_folder: str, schedule: str, fall: float
) -> None:
    listener = Listener(rates=True)
    run(model_folder, tiny_plan("non_private", schedule=schedule), listener)
    assert listener.rates == pytest.approx([1e-3 * (1 - step * fall) for step in range(18)])


# Several workers ---------------------------------------------------------------------------------


def assert_close_runs(
    model_folder: str, plan: Plan, one: tuple[Progress, Weights], other: tuple[Progress, Weights]
) -> None:
    """The same run up to rounding: apart by a small part of the way that training went.

    Attention's key bias has no gradient but rounding error, which Adam blows up; it is left out.
    """
    start = dict(trainable_parameters(tiny_classifier(model_folder, plan)))
    names = [name for name in one[1] if not name.endswith("key.bias")]
    apart = sum(float((one[1][name] - other[1][name]).square().sum()) for name in names)
    moved = sum(float((one[1][name] - start[name]).detach().square().sum()) for name in names)
    assert moved > 1e-3
    assert apart < 1e-6 * moved
    assert one[0].rows == other[0].rows
    for mine, theirs in zip(one[0].history, other[0].history, strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert mine["dev"]["dev"]["loss"] == pytest.approx(theirs["dev"]["dev"]["loss"], rel=1e-4)
        assert mine["epsilon"] == theirs["epsilon"]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["non_private", "dpfp"])
def test_the_number_of_workers_does_not_change_the_run(
    model_folder: str, unbroken: dict[str, tuple[Progress, Weights]], name: str, world_size: int
) -> None:
    workers = in_threads(world_size, lambda comm: run(model_folder, PLANS[name], comm=comm))
    for worker in workers:
        assert_close_runs(model_folder, PLANS[name], worker, unbroken[name])
        assert_identical(worker[1], workers[0][1])


@pytest.mark.slow
def test_a_killed_run_can_go_on_with_another_number_of_workers(
    model_folder: str, unbroken: dict[str, tuple[Progress, Weights]]
) -> None:
    victim = killed(model_folder, PLANS["dpfp"], 7)
    state = victim.saved
    workers = in_threads(2, lambda comm: resume(model_folder, state, comm))
    for worker in workers:
        assert_close_runs(model_folder, PLANS["dpfp"], worker, unbroken["dpfp"])


def resume(model_folder: str, saved: bytes, comm: Comm) -> tuple[Progress, Weights]:
    listener = Listener()
    listener.saved = saved
    return run(model_folder, PLANS["dpfp"], comm=comm, state=listener.state())


def gloo_run(model_folder: str, plan: Plan) -> tuple[dict[str, Any], Weights]:
    progress, weights = run(model_folder, plan, comm=TorchComm())
    return vars(progress), weights


@pytest.mark.slow
def test_real_processes_train_as_one(tmp_path: Path, model_folder: str) -> None:
    """Three workers and two expected rows, with gloo."""
    plan = tiny_plan(batch_size=2, micro_batches=2, epochs=1)
    alone = run(model_folder, plan)
    for progress, weights in run_workers(3, tmp_path, gloo_run, model_folder, plan):
        assert_close_runs(model_folder, plan, (Progress(**progress), weights), alone)


# Weights that cannot learn -----------------------------------------------------------------------


def test_a_weight_without_gradient_stops_the_run(model_folder: str) -> None:
    plan = tiny_plan()
    model = tiny_classifier(model_folder, plan)
    model.register_parameter("idle", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(UserError, match=r"1 trainable tensors got no gradient.*: idle;"):
        train_with(plan, 0.5, model, tiny_data(model_folder), seed=SEED)


def test_whether_weights_learn_is_asked_of_dev_rows_alone(model_folder: str) -> None:
    """The same answer, and the same text, whatever the private rows are: an empty run says it too.

    A zero gain lets no gradient through to what comes before it.
    """
    plan = tiny_plan("rgp", batch_size=1, epochs=1)
    model = tiny_classifier(model_folder, plan)
    weights = dict(model.named_parameters())
    last = "encoder.encoder.layer.0.output.LayerNorm"
    with torch.no_grad():
        weights[f"{last}.weight"].zero_()
        weights[f"{last}.bias"].fill_(1)
    data, listener = tiny_data(model_folder), Listener()
    messages = []
    for seed in range(4):
        with pytest.raises(UserError, match="6 trainable tensors got no gradient") as error:
            train_with(plan, 0.5, model, data, listener, seed=seed)
        messages.append(str(error.value))
    assert len(set(messages)) == 1
    assert listener.steps == []  # before the first private row


def test_unreached_weights_are_frozen_with_a_warning(model_folder: str) -> None:
    plan = tiny_plan()
    model = tiny_classifier(model_folder, plan)
    before = [name for name, _ in trainable_parameters(model)]
    model.register_parameter("idle", torch.nn.Parameter(torch.ones(3)))
    with pytest.warns(UserWarning, match="1 weights do not affect the output .*: idle"):
        freeze_unreached(model, tiny_data(model_folder))
    assert [name for name, _ in trainable_parameters(model)] == before
    assert all(p.grad is None for p in model.parameters())


# One step: which rows go through the model together.


PRESENT = 8  # records with tokens; the one after them has none, as an audit leaves it


class Drawn:
    """A sampler whose draws are known beforehand."""

    def __init__(self, *draws: list[int]) -> None:
        self.draws = draws

    def draw(self, step: int) -> Records:
        return np.array(self.draws[step], dtype=np.int64)


def test_only_a_step_with_an_absent_record_is_padded(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tiny_data(model_folder, train_rows=PRESENT).train
    table = stack(real, blank(real, np.zeros(1, np.int64), length=0))
    assert isinstance(table, TokenTable)
    plan = tiny_plan(records=len(table))
    method = DpFp(plan, hide_empty(tiny_classifier(model_folder, plan)), 0.5, seed=1)
    given: list[Rows] = []
    backward = method.backward

    def noted(rows: Rows) -> torch.Tensor:
        given.append(rows)
        return backward(rows)

    monkeypatch.setattr(method, "backward", noted)
    sampler = Drawn([0, 3, 5], [0, PRESENT, 5])
    optimizer = make_optimizer(plan, method)
    steps = Steps(plan, method, optimizer, table, sampler, SoloComm(), seed=1)
    steps.take(0)
    assert all(rows.packed_row is not None for rows in given)
    given.clear()
    steps.take(1)
    assert given
    assert all(rows.packed_row is None for rows in given)
    assert sum(len(rows.labels) for rows in given) == 3


# Scores against a loop over single rows.


@pytest.fixture
def model(model_folder: str) -> Classifier:
    """A head large enough for scores that differ between rows."""
    model = tiny_classifier(model_folder, tiny_plan(dropout=0.5))
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(model.head.weight, generator=generator)
    return model


@pytest.fixture
def table(model_folder: str) -> TokenTable:
    return tiny_data(model_folder, dev_rows=41).dev["dev"]


def naive(model: Classifier, table: TokenTable) -> dict[str, float]:
    model.eval()
    right, loss = 0, 0.0
    for row in range(len(table)):
        with torch.no_grad():
            logits = model(table.collate(np.array([row])))[0]
        label = int(table.labels[row])
        right += int(logits.argmax()) == label
        loss -= float(torch.log_softmax(logits, 0)[label])
    return {"accuracy": right / len(table), "loss": loss / len(table)}


@pytest.mark.parametrize("rows_at_once", [1, 7, 256])
def test_scores_are_those_of_a_naive_loop(
    model: Classifier, table: TokenTable, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVAL_ROWS", rows_at_once)
    expected = naive(model, table)
    assert 0 < expected["accuracy"] < 1
    scores = evaluate(model, table, SoloComm())
    assert scores["accuracy"] == expected["accuracy"]
    assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_is_put_back(
    model: Classifier, table: TokenTable, training: bool
) -> None:
    model.train(training)
    assert evaluate(model, table, SoloComm()) == evaluate(model, table, SoloComm())
    assert model.training is training


@pytest.mark.parametrize("world_size", [2, 3, 50])
def test_workers_share_the_rows_and_agree(
    model: Classifier, table: TokenTable, world_size: int
) -> None:
    expected = naive(model, table)
    for scores in in_threads(world_size, lambda comm: evaluate(model, table, comm)):
        assert scores["accuracy"] == expected["accuracy"]
        assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_bf16_scores_with_a_head_in_fp32(model: Classifier, table: TokenTable) -> None:
    """Eight bits would make ties of close scores, and a tie is class 0."""
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda *found: seen.append(found[2].dtype))
    scores = evaluate(model, table, SoloComm(), "bf16")
    assert set(seen) == {torch.float32}
    assert scores["loss"] == pytest.approx(naive(model, table)["loss"], rel=0.05)
    assert scores["loss"] != evaluate(model, table, SoloComm(), "fp32")["loss"]
