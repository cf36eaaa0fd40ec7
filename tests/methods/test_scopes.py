"""Every scope in every encoder family: the clipped sum against a loop over rows, and whole runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from dpfp_ray.methods.dpsgd import DpSgd
from dpfp_ray.methods.parts.base import make_method
from dpfp_ray.methods.parts.ghost import unsplittable
from dpfp_ray.methods.parts.per_example import clip_factors
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.pretrained import build_classifier
from dpfp_ray.models.scopes import Lora, _lora_pairs
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.loop import evaluate
from dpfp_ray.training.machine import Comm, SoloComm
from dpfp_ray.training.prepare import Data
from dpfp_ray.training.step import check_all_learn, take
from tests.methods.test_dpsgd import (
    CLIPPINGS,
    SEED,
    SIGMA,
    assert_same,
    clipped_sum,
    make_plan,
    make_rows,
    naive_sum,
    norm,
    row_gradients,
    table,
)
from tests.support.tiny_models import ENCODERS
from tests.support.tiny_runs import Listener, train_with

SCOPES = ("bias", "lora", "top:1", "top:2")
METHODS = ("dpsgd", "dpfp", "non_private")
NO_LABEL = -100  # a row that is there but says nothing: torch's loss and its gradient are 0
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*no gradient per example", "ignore:Full backward hook is firing"
)


def build(plan: Plan, *, awake: bool = False) -> Classifier:
    model = build_classifier(
        plan.model, plan.representation, 2, scope=plan.scope, lora=Lora.of(plan), head_seed=3
    )
    if awake:  # LoRA after a step: B is not zero any more, and A gets a gradient
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for name, parameter in trainable_parameters(model):
                if "lora_B" in name:
                    parameter.normal_(0, 0.3, generator=generator)
    return model.train()


def needs_own_layers(architecture: str, scope: str) -> None:
    if architecture == "albert" and scope.startswith("top"):
        pytest.skip("its layers are one layer, used again and again")


# --- the clipped sum ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("architecture", ENCODERS)
def test_ghost_hooks_and_naive_loop_agree(
    tiny: Callable[[str], str], architecture: str, scope: str
) -> None:
    needs_own_layers(architecture, scope)
    plan = make_plan(tiny(architecture), scope=scope)
    model = build(plan, awake=True)
    method = DpSgd(plan, model, SIGMA, SEED)
    rows = make_rows(table(plan.model))
    norms = sorted(norm(gradients) for gradients in row_gradients(model, rows))
    for clip in (norms[0] / 10, norms[len(norms) // 2]):  # all clipped; some clipped
        expected = naive_sum(model, rows, clip)
        for clipping in CLIPPINGS:
            method.plan = dataclasses.replace(plan, clip=clip, clipping=clipping)
            assert_same(clipped_sum(method, rows), expected)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("architecture", ["bert", "albert", "modernbert"])
def test_lora_with_a_fixed_a_trains_b_and_the_head(
    tiny: Callable[[str], str], architecture: str, clipping: str
) -> None:
    plan = make_plan(tiny(architecture), scope="lora", lora_freeze_a=True, clipping=clipping)
    method = DpSgd(plan, build(plan), SIGMA, SEED)
    rows = make_rows(table(plan.model))
    expected = naive_sum(method.model, rows, plan.C)
    assert {name.split(".")[-3] for name in expected if "lora" in name} == {"lora_B"}
    assert_same(clipped_sum(method, rows), expected)


def test_a_weight_that_is_zero_hides_no_weight_that_cannot_be_split(
    tiny: Callable[[str], str],
) -> None:
    # DeBERTa's queries also project relative positions, once for all rows. While B is zero, A gets
    # no gradient at all, and would pass for splittable.
    plan = make_plan(tiny("deberta-v2"), scope="lora")
    model = build(plan)
    found = unsplittable(model)
    assert {name.split(".lora_")[1][0] for name in found} == {"A", "B"}
    assert all("query_proj" in name for name in found)
    assert not any(b.any() for _, _, b in _lora_pairs(model))  # as it was


# --- AUTO-S -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_automatic_clipping_is_the_naive_sum_with_its_factor(
    tiny: Callable[[str], str], clipping: str
) -> None:
    plan = make_plan(tiny("bert"), clip=0.7, clipping=clipping, clip_style="automatic")
    method = DpSgd(plan, build(plan), SIGMA, SEED)
    rows = make_rows(table(plan.model))
    alone = row_gradients(method.model, rows)
    expected = {
        name: torch.stack([g[name] * 0.7 / (norm(g) + 0.01) for g in alone]).sum(0)
        for name, _ in trainable_parameters(method.model)
    }
    assert_same(clipped_sum(method, rows), expected)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["all", "bias"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_rows_without_a_gradient_add_nothing_to_the_automatic_sum(
    tiny: Callable[[str], str], clipping: str, scope: str
) -> None:
    # Rows of class 1 are so sure that their gradient is 0 to the bit, and ⊥ has no label.
    plan = make_plan(tiny("bert"), scope=scope, clipping=clipping, clip_style="automatic")
    method = DpSgd(plan, build(plan), SIGMA, SEED)
    with torch.no_grad():
        method.model.head.bias.copy_(torch.tensor([-1e4, 1e4]))
    rows = make_rows(table(plan.model))
    rows.labels[0] = NO_LABEL
    alone = [g for g in row_gradients(method.model, rows) if norm(g) > 0]
    assert 0 < len(alone) < (rows.labels != NO_LABEL).sum()
    expected = {
        name: torch.stack([g[name] / (norm(g) + 0.01) for g in alone]).sum(0)
        for name, _ in trainable_parameters(method.model)
    }
    found = clipped_sum(method, rows)
    assert_same(found, expected)
    assert norm(found) <= len(alone)


@pytest.mark.parametrize("clip", [1e-3, 1.0, 50.0])
def test_no_row_is_longer_than_C_after_automatic_clipping(clip: float) -> None:
    # Beyond the root of the largest float, a norm comes as infinite and the row is dropped.
    norms = torch.tensor([0.0, 1e-38, 1e-12, 1e-4, 0.01, 1.0, 1e6, 1e18])
    lengths = norms * clip_factors(norms, clip, "automatic")
    assert lengths.isfinite().all()
    assert (lengths <= clip * (1 + 1e-6)).all()
    assert lengths[0] == 0
    assert clip_factors(torch.tensor(torch.inf), clip, "automatic") == 0


@pytest.mark.parametrize("method", ["dpsgd", "rgp"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rows_made_to_be_long_or_short_add_at_most_C(
    tiny: Callable[[str], str], method: str, size: float
) -> None:
    plan = make_plan(tiny("bert"), method=method, clip=0.3, clip_style="automatic")
    model = build(plan)
    with torch.no_grad():
        model.head.weight.mul_(size)  # what flows back into the encoder is as much longer
    trained = make_method(plan, model, 0.0, SEED)
    rows = make_rows(table(plan.model), [2])
    trained.begin(0, 1)
    trained.backward(rows)
    sums = torch.cat([g.flatten() for g in trained.gradients()])
    assert 0 < sums.norm() <= 0.3 * (1 + 1e-5)


# --- whole runs ---------------------------------------------------------------------------------


def trained(
    plan: Plan,
    listener: Listener | None = None,
    state: dict[str, Any] | None = None,
    comm: Comm | None = None,
) -> Classifier:
    model = build(plan)
    source = table(plan.model)
    data = Data(source, {"dev": source})
    train_with(plan, 1.0, model, data, listener, seed=SEED, comm=comm, state=state)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scope", SCOPES[:3])
@pytest.mark.parametrize("architecture", ENCODERS)
def test_all_that_should_move_moves_and_nothing_else(
    tiny: Callable[[str], str], architecture: str, scope: str, method: str
) -> None:
    needs_own_layers(architecture, scope)
    changes = {} if method != "dpfp" else {"micro_batches": 2}
    plan = make_plan(tiny(architecture), scope=scope, method=method, **changes)
    start, end = build(plan), trained(plan)
    moving = {name for name, _ in trainable_parameters(end)}  # what cannot be split is frozen
    assert any(not name.startswith("head") for name in moving)
    for (name, before), after in zip(start.named_parameters(), end.parameters(), strict=True):
        assert torch.equal(before, after) == (name not in moving), name


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["all", *SCOPES[:3]])
def test_with_hardly_any_noise_it_learns(tiny: Callable[[str], str], scope: str) -> None:
    plan = make_plan(
        tiny("bert"), scope=scope, batch_size=20, epochs=60, learning_rate=2e-2, clip=1.0
    )
    model = build(plan)
    source = table(plan.model)
    train_with(plan, 0.01, model, Data(source, {"dev": source}), seed=SEED)
    assert evaluate(model, source, SoloComm())["accuracy"] > 0.8


def test_lora_whose_a_never_wakes_is_refused(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What opacus#820 looked like: the adapter is there, but nothing of it reaches the output.
    plan = make_plan(tiny("bert"), scope="lora")
    model = build(plan)
    for _, a, b in _lora_pairs(model):
        a.register_hook(torch.zeros_like)
        b.register_hook(torch.zeros_like)
    method = make_method(
        dataclasses.replace(plan, method="non_private", epsilon=None, delta=None, adjacency=None),
        model,
        0.0,
        SEED,
    )
    eight = numpy.arange(8)
    probe = take(table(plan.model), eight, eight, method.device)
    with pytest.raises(UserError, match=r"lora_A.*lora_B|lora_B.*lora_A"):
        check_all_learn(method, probe)


def test_a_weight_that_never_moves_ends_the_run(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The gradient is there, but the optimizer was not given the weight (or a copy of it).
    plan = make_plan(tiny("bert"), scope="lora")

    class Forgetful(torch.optim.AdamW):
        def __init__(self, parameters: list[Any], **options: Any) -> None:
            super().__init__(parameters[1:], **options)

    monkeypatch.setattr(torch.optim, "AdamW", Forgetful)
    with pytest.raises(UserError, match=r"1 trainable tensors have not moved in 3 steps: .*lora_A"):
        trained(plan)
