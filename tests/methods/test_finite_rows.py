"""Rows whose representation or gradient is infinite or undefined: they add nothing, and harm none.

Clipping divides by a norm. Of a row that has none it makes another undefined row, and one such row
in a sum is the whole sum. So what is asked of every method: with bad rows in between, the step is
what it is without them, to the bit or to rounding.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfp_ray.methods import moments, release_once
from dpfp_ray.methods.parts.base import Rows, make_method
from dpfp_ray.methods.parts.one_release import bounded
from dpfp_ray.models.classifier import Classifier, bound_rows, trainable_parameters
from dpfp_ray.plan.plan import Plan
from dpfp_ray.training.step import take
from tests.support.one_release import make_plan, make_table
from tests.support.tiny_runs import tiny_classifier, tiny_data, tiny_plan

BAD = [float("nan"), float("inf"), float("-inf")]
GOOD_ROWS, BAD_ROWS = [0, 1, 3, 4, 6], [2, 5]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("scaling", ["clip", "unit"])
def test_a_row_without_a_norm_is_bounded_to_zero(scaling: str, bad: float) -> None:
    h = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    spoilt = h.clone()
    spoilt[2, 1] = bad
    spoilt[5] = bad
    found, expected = bound_rows(spoilt, scaling, 0.5), bound_rows(h, scaling, 0.5)
    assert torch.equal(found[GOOD_ROWS], expected[GOOD_ROWS])
    assert not found[BAD_ROWS].any()
    assert found.norm(dim=1).max() <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mode", ["release_once", "moments"])
def test_a_release_with_bad_rows_is_that_of_zero_rows(mode: str, bad: float) -> None:
    """Noise is keyed by the table's key, so the two differ by what the rows add."""
    plan, table = make_plan(mode, 7), make_table(7)
    zero, spoilt = table.h.copy(), table.h.copy()
    zero[BAD_ROWS] = 0
    spoilt[BAD_ROWS[0], 3] = bad
    spoilt[BAD_ROWS[1]] = bad
    release: Callable[..., Any] = {"release_once": release_once, "moments": moments}[mode].release
    # Two keys, so that nothing is remembered from one to the other; no noise, so that they agree.
    found = release(plan, 0.0, replace(table, h=spoilt, key=f"spoilt {bad}"), 2, 1)
    expected = release(plan, 0.0, replace(table, h=zero, key=f"zero {bad}"), 2, 1)
    np.testing.assert_array_equal(found.sums, expected.sums)
    np.testing.assert_array_equal(found.second, expected.second)
    assert (np.linalg.norm(bounded(spoilt, plan), axis=1) <= 1 + 1e-6).all()


# Methods that train in steps ----------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "ghost": {"method": "dpsgd", "clipping": "ghost"},
    "hooks": {"method": "dpsgd", "clipping": "hooks"},
    "ghost, head": {"method": "dpsgd", "scope": "head"},
    "hooks, head": {"method": "dpsgd", "scope": "head", "clipping": "hooks"},
    "rgp": {"method": "rgp", "rank": 3},
    "rgp, head": {"method": "rgp", "scope": "head"},
    "dpfp": {"method": "dpfp"},
    "dpfp, head": {"method": "dpfp", "scope": "head"},
}


def plan_of(name: str) -> Plan:
    return tiny_plan(**{"clip": 0.5, **METHODS[name]})


def spoiling(model: Classifier, bad: float, where: str) -> None:
    """From now on rows with the id 0 (padding) in their first place have bad numbers in them.

    `word`: as their first word's embedding, so that all of the encoder's activations are bad.
    `layer`: only in the last hidden state.
    """
    module: Any = model.encoder
    embeddings = module.get_input_embeddings()
    spoilt: dict[str, Tensor] = {}

    def after_embeddings(_: Any, inputs: Any, output: Tensor) -> Tensor:
        spoilt["rows"] = inputs[0][:, 0] == 0
        factor = torch.where(spoilt["rows"], bad, 1.0)[:, None, None]
        return output * factor if where == "word" else output

    def after_layer(_: Any, inputs: Any, output: Tensor) -> Tensor:
        factor = torch.where(spoilt["rows"], bad, 1.0)[:, None, None]
        return output * factor if where == "layer" else output

    embeddings.register_forward_hook(after_embeddings)
    module.encoder.layer[-1].output.register_forward_hook(after_layer)


def some_rows(model_folder: str, chosen: list[int]) -> Rows:
    """Seven rows of one length, of which two are to be spoilt, or those chosen from them."""
    table = tiny_data(model_folder).train
    longest = np.argsort(-table.lengths, kind="stable")[:7]
    inputs = {name: tensor[:, :5].clone() for name, tensor in table.collate(longest).items()}
    inputs["input_ids"][BAD_ROWS, 0] = 0
    labels = torch.from_numpy(table.labels[longest])
    whole = Rows(np.arange(7), inputs, labels)
    return whole.only(torch.tensor([row in chosen for row in range(7)]))


def step_of(model_folder: str, name: str, bad: float, where: str, chosen: list[int]) -> Any:
    plan = plan_of(name)
    model = tiny_classifier(model_folder, plan)
    method = make_method(plan, model, 0.0, seed=5)
    spoiling(model, bad, where)
    method.begin(0, 7)
    loss = method.backward(some_rows(model_folder, chosen))
    method.gradients()
    method.finish(0)
    return loss, {n: p.grad.clone() for n, p in trainable_parameters(model) if p.grad is not None}


@pytest.mark.parametrize("where", ["word", "layer"])
@pytest.mark.parametrize("bad", BAD[:2])
@pytest.mark.parametrize("name", [name for name in METHODS if "dpfp" not in name])
def test_a_step_with_bad_rows_is_the_step_without_them(
    model_folder: str, name: str, bad: float, where: str
) -> None:
    loss, found = step_of(model_folder, name, bad, where, list(range(7)))
    other_loss, expected = step_of(model_folder, name, bad, where, GOOD_ROWS)
    assert any(gradient.any() for gradient in expected.values())
    for weight in expected:
        torch.testing.assert_close(found[weight], expected[weight], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(loss, other_loss)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_of_bad_rows_alone_is_finite(model_folder: str, name: str) -> None:
    loss, found = step_of(model_folder, name, float("nan"), "word", BAD_ROWS)
    assert torch.isfinite(loss)
    assert all(gradient.isfinite().all() for gradient in found.values())
    if "dpfp" not in name:
        assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("where", ["word", "layer"])
@pytest.mark.parametrize("bad", BAD[:2])
@pytest.mark.parametrize("name", ["dpfp", "dpfp, head"])
def test_a_bad_row_of_dpfp_has_the_representation_zero(
    model_folder: str, name: str, bad: float, where: str
) -> None:
    """As a text that is replaced by nothing has: its label, which is public, still counts."""
    given = list[Tensor]()

    def step(chosen: list[int], zeros: int) -> dict[str, Tensor]:
        plan = plan_of(name)
        model = tiny_classifier(model_folder, plan)
        method = make_method(plan, model, 0.0, seed=5)
        spoiling(model, bad, where)
        model.head.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].detach()))
        method.begin(0, 7)
        method.backward(some_rows(model_folder, chosen))
        if zeros:  # the slow twin: rows of zeros, put in by hand
            rows = some_rows(model_folder, BAD_ROWS)
            method.loss(model.head(torch.zeros(zeros, model.width)), rows).backward()
        weights = trainable_parameters(model)
        return {n: p.grad.clone() for n, p in weights if p.grad is not None}

    found, expected = step(list(range(7)), 0), step(GOOD_ROWS, len(BAD_ROWS))
    assert not given[0][BAD_ROWS].any()
    assert given[0].norm(dim=1).max() <= 0.5 * (1 + 1e-5)
    for weight in expected:
        torch.testing.assert_close(found[weight], expected[weight], rtol=1e-4, atol=1e-7)


def test_a_bad_row_of_dpfp_spoils_none_in_its_sequence(model_folder: str) -> None:
    plan = plan_of("dpfp")
    model = tiny_classifier(model_folder, plan)
    method: Any = make_method(plan, model, 0.0, seed=5)
    table: Any = tiny_data(model_folder).train
    seven = np.arange(7)
    plain, packed = (take(table, seven, seven, torch.device("cpu"), packs=p) for p in (False, True))
    expected = method.clipped(plain).detach()
    ids = plain.inputs["input_ids"]
    word, bad = next((w, r) for r in range(7) for w in ids[r].tolist() if (ids == w).sum() == 1)
    embeddings: Any = model.encoder
    with torch.no_grad():
        embeddings.get_input_embeddings().weight[word] = float("nan")
    found = method.clipped(packed).detach()
    others = [row for row in range(7) if row != bad]
    torch.testing.assert_close(found[others], expected[others], rtol=1e-4, atol=1e-6)
    assert not found[bad].any()


def test_a_method_that_drops_no_bad_row_would_be_noticed(model_folder: str) -> None:
    """The rows that the tests above call bad do spoil a plain sum."""
    plan = tiny_plan("non_private")
    model = tiny_classifier(model_folder, plan)
    spoiling(model, float("nan"), "word")
    method = make_method(plan, model, 0.0, seed=5)
    method.backward(some_rows(model_folder, list(range(7))))
    assert not all(p.grad.isfinite().all() for p in method.parameters if p.grad is not None)
