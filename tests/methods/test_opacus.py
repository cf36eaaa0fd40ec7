"""Opacus as a contestant: its steps against ours, its draws, its account, and its known faults."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import opacus.optimizers.optimizer
import opacus.utils.uniform_sampler
import pytest
import torch
from torch import Tensor

from dpfp_ray.methods.opacus import Opacus, batches_a_pass, own_epsilon
from dpfp_ray.methods.parts.base import make_method
from dpfp_ray.methods.parts.contestant import Start, installed
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.representations import HeadClassifier, RepresentationTable
from dpfp_ray.plan.plan import GRAD_SAMPLE_MODES, Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.prepare import Inputs, Prepared, Run
from dpfp_ray.training.step import take
from dpfp_ray.training.train import run_events
from tests.support.tiny_runs import (
    Killed,
    Listener,
    ThreadComm,
    in_threads,
    tiny_classifier,
    tiny_data,
    tiny_plan,
    tiny_world,
    train_with,
)

SEED = 5
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tiny_world(tmp_path_factory.mktemp("opacus")) as folder:
        yield folder


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield


def draws_of(contestant: Opacus) -> list[list[int]]:
    """What its loader really asks for, step by step, while it trains."""
    drawn: list[list[int]] = []
    collate = contestant.collate

    def note(places: list[tuple[int]]) -> Any:
        drawn.append([place for (place,) in places])
        return collate(places)

    contestant.collate = note  # type: ignore[method-assign]
    return drawn


def gradients(model: Classifier) -> dict[str, Tensor]:
    return {
        name: weight.grad.clone()
        for name, weight in trainable_parameters(model)
        if weight.grad is not None
    }


def head_table(rows: int, width: int = 6) -> RepresentationTable:
    rng = np.random.default_rng(3)
    h = rng.standard_normal((rows, width)).astype(np.float32)
    return RepresentationTable(h, np.arange(rows) % 2, "made up")


def head_plan(rows: int = 24, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"batch_size": 8, "epochs": 4, "scope": "head", "records": rows}
    return tiny_plan("opacus", **(settings | changes))


# --- the same gradients as ours -----------------------------------------------------------------


@pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
@pytest.mark.parametrize("scope", ["all", "head", "bias", "lora"])
def test_equal_draws_and_no_noise_give_the_gradient_of_dpsgd(
    model_folder: str, scope: str, mode: str
) -> None:
    words: dict[str, Any] = {"model": model_folder, "scope": scope, "clip": 0.05}
    plan = tiny_plan("opacus", grad_sample_mode=mode, batch_size=12, **words)
    ours = tiny_plan("dpsgd", batch_size=12, **words)
    table: Any = tiny_data(model_folder).train
    build: Any = tiny_classifier
    if scope == "head":
        table = head_table(24)
        build = lambda folder, plan: HeadClassifier(6, 2, "mean", 3)  # noqa: E731

    theirs = build(model_folder, plan)
    contestant = Opacus(Start(plan, theirs, table, 0.0, SEED))
    drawn = draws_of(contestant)
    next(contestant.train())
    (records,) = drawn
    assert records

    model = build(model_folder, ours).train()
    method = make_method(ours, model, 0.0, SEED)
    method.begin(0, len(records))
    method.backward(take(table, np.array(records), np.arange(len(records)), CPU))
    method.finish(0)
    found, expected = gradients(theirs), gradients(model)
    assert found.keys() == expected.keys()
    size = torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        # Of the whole gradient; min(1, C/‖g‖) has ‖g‖ + 1e-6 in Opacus, a part in 50,000 of C here.
        assert (found[name] - value).abs().max() <= 2.5e-5 * size, name


@pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
def test_unclipped_gradients_are_equal_to_a_millionth(model_folder: str, mode: str) -> None:
    """With C above every norm nothing is divided by ‖g‖ + 1e-6, and only rounding is left."""
    table = head_table(24)
    plan = head_plan(clip=100.0, grad_sample_mode=mode)
    theirs = HeadClassifier(6, 2, "mean", 3)
    contestant = Opacus(Start(plan, theirs, table, 0.0, SEED))
    drawn = draws_of(contestant)
    next(contestant.train())
    model = HeadClassifier(6, 2, "mean", 3)
    method = make_method(Plan(**ours_of(plan)), model, 0.0, SEED)
    records = np.array(drawn[0])
    method.begin(0, len(records))
    method.backward(take(table, records, np.arange(len(records)), CPU))
    method.finish(0)
    for name, value in gradients(model).items():
        torch.testing.assert_close(gradients(theirs)[name], value, rtol=1e-6, atol=1e-7)


def ours_of(plan: Plan) -> dict[str, Any]:
    return {**plan.to_dict(), "method": "dpsgd", "grad_sample_mode": "hooks"}


def test_a_step_that_is_split_for_memory_is_the_same_step() -> None:
    weights = []
    for most in (2, 256):
        plan, model = head_plan(max_physical_batch=most), HeadClassifier(6, 2, "mean", 3)
        training = Opacus(Start(plan, model, head_table(24), 1.0, SEED)).train()
        for _ in range(3):
            next(training)
        weights.append(model.head.weight.detach().clone())
    torch.testing.assert_close(*weights)


# --- its draws and its account ------------------------------------------------------------------


def test_the_rate_is_one_over_the_batches_of_a_pass() -> None:
    plan = head_plan(rows=1000, batch_size=333)
    assert batches_a_pass(plan) == 3
    assert plan.p == 1 / 3  # not 0.333, nor the 1/4 that Opacus makes of a batch size of 333
    model = HeadClassifier(6, 2, "mean", 3)
    contestant = Opacus(Start(plan, model, head_table(1000), 1.0, SEED))
    next(contestant.train())
    assert contestant.loader.sample_rate == plan.p


def test_our_accountant_is_asked_for_what_opacus_counts() -> None:
    plan, model = head_plan(), HeadClassifier(6, 2, "mean", 3)
    contestant = Opacus(Start(plan, model, head_table(24), 1.3, SEED))
    training = contestant.train()
    for _ in range(plan.steps):
        next(training)
    mech = accounting.mechanism(plan, 1.3)
    assert contestant.ledger() == [(mech.noise_multiplier, mech.p, mech.n)]


def test_both_accountants_of_opacus_agree_with_ours() -> None:
    history = [(1.1, 0.02, 400)]
    mech = accounting.Mechanism(0.02, 400, 1.1, "add_remove")
    pld = accounting.pld_epsilon(mech, 1e-5)
    assert own_epsilon("prv", history, 1e-5) == pytest.approx(pld, abs=0.02)
    assert own_epsilon("rdp", history, 1e-5) == pytest.approx(
        accounting.rdp_epsilon(mech, 1e-5), rel=0.01
    )


def test_a_run_records_what_opacus_claims() -> None:
    record = finished(head_plan(grad_sample_mode="ghost"))
    claim = record["privacy"]["claim"]
    assert record["privacy"]["guarantee"] == "claimed"
    assert (claim["library"], claim["changed_files"]) == ("opacus", [])
    assert set(claim["epsilon"]) == {"prv", "rdp"}
    assert claim["settings"]["grad_sample_mode"] == "ghost"
    assert claim["sampling_rate"] == record["privacy"]["p"] == 1 / 3
    assert record["statement"]["proved"]["epsilon"] is None


def finished(plan: Plan, noise: float = 1.0, **options: Any) -> Any:
    data = prepared_data(plan)
    inputs = Inputs(data, ("no", "yes"), "mean")
    run = Run(Prepared(plan, inputs, noise), SEED, **options)
    model = HeadClassifier(6, 2, "mean", 3)
    *_, last = run_events(run, model)
    return last.record  # type: ignore[union-attr]


def prepared_data(plan: Plan) -> Any:
    from dpfp_ray.training.prepare import Data

    return Data(head_table(plan.D), {"dev": head_table(10)})


# --- resume -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
@pytest.mark.parametrize("killed_after", [2, 3, 7])  # in a pass of three steps, and at its end
def test_a_resumed_run_ends_with_the_same_weights(mode: str, killed_after: int) -> None:
    plan = head_plan(grad_sample_mode=mode)
    data = prepared_data(plan)

    def model() -> HeadClassifier:
        return HeadClassifier(6, 2, "mean", 3)

    whole, resumed, listener = model(), model(), Listener(kill_after=killed_after)
    train_with(plan, 1.0, whole, data, seed=SEED)
    with pytest.raises(Killed):
        train_with(plan, 1.0, model(), data, listener, seed=SEED)
    progress = train_with(plan, 1.0, resumed, data, seed=SEED, state=listener.state())
    assert torch.equal(whole.head.weight, resumed.head.weight)
    assert progress.claim["releases"] == plan.steps


# --- faults and refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
@pytest.mark.parametrize("scope", ["all", "bias"])
def test_empty_draws_are_steps_with_noise_alone(model_folder: str, scope: str, mode: str) -> None:
    """With B = 1 a third of the steps is empty; the first is, too, with this seed."""
    plan = tiny_plan("opacus", batch_size=1, epochs=1, scope=scope, grad_sample_mode=mode)
    table = tiny_data(model_folder).train
    for seed in range(20):
        model = tiny_classifier(model_folder, plan)
        contestant = Opacus(Start(plan, model, table, 1.0, seed))
        training = contestant.train()
        if next(training).rows == 0:
            break
    found = torch.cat([value.flatten() for value in gradients(model).values()])
    deviation = plan.C / contestant.optimizer.expected_batch_size
    assert float(found.std()) == pytest.approx(deviation, rel=0.05)
    for _ in range(8):
        next(training)


@pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
def test_padding_gets_no_gradient_because_the_encoder_masks_it(
    model_folder: str, mode: str
) -> None:
    """Opacus's own rule for embeddings would give it one, which torch's does not."""
    plan = tiny_plan("opacus", batch_size=12, grad_sample_mode=mode)
    table: Any = tiny_data(model_folder).train
    model = tiny_classifier(model_folder, plan)
    next(Opacus(Start(plan, model, table, 0.0, SEED)).train())
    rows = gradients(model)["encoder.embeddings.word_embeddings.weight"]
    assert not rows[table.pad_token_id].any()


def test_a_sampler_with_another_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As opacus#813: draws at a rate that its accountant does not know of."""
    sampler = opacus.utils.uniform_sampler.UniformWithReplacementSampler
    plain = sampler.__init__

    def wrong(self: Any, *, sample_rate: float, **options: Any) -> None:
        plain(self, sample_rate=sample_rate, **options)
        self.sample_rate = min(1.0, 2 * sample_rate)

    monkeypatch.setattr(sampler, "__init__", wrong)
    with pytest.raises(UserError, match="its ε does not hold"):
        finished(head_plan(rows=600, batch_size=60))


def test_an_account_of_another_noise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = opacus.optimizers.optimizer.DPOptimizer
    plain = optimizer.__init__

    def wrong(self: Any, *args: Any, noise_multiplier: float, **options: Any) -> None:
        plain(self, *args, noise_multiplier=noise_multiplier / 2, **options)

    monkeypatch.setattr(optimizer, "__init__", wrong)
    with pytest.raises(UserError, match="nothing can be said of such a run"):
        finished(head_plan())


def test_a_file_that_is_not_as_published_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "made_up-1.0.dist-info"
    info.mkdir()
    (tmp_path / "made_up.py").write_text("noise = 0\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made_up\nVersion: 1.0\n")
    (info / "RECORD").write_text("made_up.py,sha256=of-other-text,10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("made_up")["changed_files"] == ["made_up.py"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "bf16"}, "trains in fp32"),
        ({"user_column": "author"}, "bounds each record by itself"),
        ({"micro_batches": 2}, "does not use it"),
        ({"scope": "top:1"}, "no scope top:1"),
    ],
)
def test_what_opacus_cannot_do_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        finished(head_plan(**changes))


def test_several_workers_are_refused() -> None:
    plan = head_plan()
    data = prepared_data(plan)

    def work(comm: ThreadComm) -> None:
        train_with(plan, 1.0, HeadClassifier(6, 2, "mean", 3), data, seed=SEED, comm=comm)

    with pytest.raises(UserError, match="trains in one process"):
        in_threads(2, work)


def test_the_model_is_free_of_hooks_when_training_ends(model_folder: str) -> None:
    plan = tiny_plan("opacus", epochs=1, scope="lora")
    model = tiny_classifier(model_folder, plan)
    train_with(plan, 1.0, model, tiny_data(model_folder), seed=SEED)
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert not any(hasattr(weight, "grad_sample") for weight in model.parameters())


def test_a_changed_library_is_said_when_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"library": "opacus", "version": "1.6.0", "changed_files": ["opacus/x.py"]}
    monkeypatch.setattr("dpfp_ray.training.contest.installed", lambda library: changed)
    with pytest.warns(UserWarning, match=r"opacus 1.6.0 is not as it was published: opacus/x.py"):
        record = finished(head_plan())
    assert record["privacy"]["claim"]["changed_files"] == ["opacus/x.py"]
