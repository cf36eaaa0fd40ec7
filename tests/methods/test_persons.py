"""Persons as units: a naive twin that goes person by person, and neighbours that differ in one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dpfp_ray.data.split import Units
from dpfp_ray.methods.dpsgd import DpSgd
from dpfp_ray.methods.parts.base import Method, Rows, make_method
from dpfp_ray.methods.rgp import HEAD_SHARE, Rgp
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.pretrained import build_classifier
from dpfp_ray.models.scopes import Lora
from dpfp_ray.plan.plan import Plan
from dpfp_ray.training.step import take
from tests.methods.test_dpsgd import table
from tests.methods.test_rgp import carriers, naive_rows
from tests.support.tiny_models import TEXTS

SIZES = (1, 2, 5, 2, 7)  # of five persons, whose rows lie in disorder
PERSONS = np.random.default_rng(3).permutation(np.repeat(np.arange(5), SIZES))
STEPS: dict[str, dict[str, Any]] = {
    **{
        f"{clipping} {scope}": {"method": "dpsgd", "clipping": clipping, "scope": scope}
        for clipping in ("ghost", "hooks")
        for scope in ("all", "head", "bias", "lora", "top:1")
    },
    "ghost automatic": {"method": "dpsgd", "clip_style": "automatic"},
    "rgp all": {"method": "rgp", "rank": 2},
    "rgp head": {"method": "rgp", "scope": "head"},
}


def person_table(folder: str, persons: np.ndarray[Any, Any] = PERSONS) -> Any:
    texts = tuple(TEXTS[i % len(TEXTS)] for i in range(len(persons)))
    return replace(table(folder, texts), persons=persons)


def make(folder: str, clip: float, **changes: Any) -> tuple[Plan, Classifier, Method]:
    settings: dict[str, Any] = {"model": folder, "representation": "mean", "batch_size": 2}
    settings |= {"clip": clip, "epochs": 2, "user_column": "author", **changes}
    plan = Plan(**settings).bind(records=5)
    model = build_classifier(folder, "mean", 2, scope=plan.scope, lora=Lora.of(plan))
    for parameter in model.parameters():  # LoRA's B is 0 at first, and would hide A's gradients
        if parameter.requires_grad and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(5))
    return plan, model, make_method(plan, model, 0.0, seed=1)


def rows_for(source: Any, drawn: list[int]) -> Rows:
    rows, owners = Units(source).expand(np.array(drawn, dtype=np.int64))
    return take(source, rows, np.arange(len(rows)), torch.device("cpu"), owners)


def clipped(method: Method, *parts: Rows) -> list[Tensor]:
    """The sum over the step's persons, as it is before the noise (there is none here)."""
    method.model.zero_grad(set_to_none=True)
    method.begin(0, sum(len(part.labels) for part in parts))
    for part in parts:
        method.backward(part)
    found = [value.clone() for value in method.gradients()]
    if isinstance(method, DpSgd) and method.clipping is not None:
        method.clipping.remove()
        method.clipping = None
    return found


def size(values: list[Tensor]) -> float:
    return float(torch.stack([value.norm() for value in values]).norm())


def person_gradients(model: Classifier, source: Any, drawn: list[int]) -> list[list[Tensor]]:
    """The gradient of each person's mean loss, one person and one row at a time."""
    weights = [parameter for _, parameter in trainable_parameters(model)]
    found = []
    for person in drawn:
        rows = np.flatnonzero(source.persons == person)
        total = [torch.zeros_like(weight) for weight in weights]
        for row in rows:
            labels = torch.tensor([source.labels[row]])
            loss = functional.cross_entropy(model(source.collate(np.array([row]))), labels)
            for sum_, value in zip(total, torch.autograd.grad(loss, weights), strict=True):
                sum_ += value / len(rows)
        found.append(total)
    return found


@pytest.mark.parametrize("architecture", ["bert", "albert", "modernbert"])
@pytest.mark.parametrize("clipping", ["ghost", "hooks"])
def test_a_person_is_one_example(
    tiny: Callable[[str], str], clipping: str, architecture: str
) -> None:
    """ALBERT uses its layers twice; ModernBERT has LayerNorms without a bias."""
    source = person_table(tiny(architecture))
    drawn = [4, 0, 2, 1, 4]  # one of them twice, in different micro-batches
    plan, model, method = make(tiny(architecture), 1.0, method="dpsgd", clipping=clipping)
    each = person_gradients(model, source, drawn)
    sizes = sorted(size(one) for one in each)
    for clip in (sizes[0] / 10, sizes[2]):
        method.plan = replace(plan, clip=clip)
        expected = expected_sum(each, [min(1.0, clip / size(one)) for one in each])
        found = clipped(method, rows_for(source, drawn))
        whole = size(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5 * whole)


def expected_sum(each: list[list[Tensor]], factors: list[float]) -> list[Tensor]:
    return [
        sum((f * g for f, g in zip(factors, values, strict=True)), torch.zeros(()))
        for values in zip(*each, strict=True)
    ]


@pytest.mark.parametrize("name", [name for name in STEPS if not name.startswith("rgp")])
def test_every_scope_equals_the_loop_over_persons(tiny: Callable[[str], str], name: str) -> None:
    source, drawn = person_table(tiny("bert")), [4, 0, 2, 1, 4]
    plan, model, method = make(tiny("bert"), 1.0, **STEPS[name])
    each = person_gradients(model, source, drawn)
    sizes = sorted(size(one) for one in each)
    method.plan = replace(plan, clip=sizes[2])  # cuts some and not others
    expected = expected_sum(
        each,
        [
            sizes[2] / (size(one) + 0.01)
            if plan.clip_style == "automatic"
            else min(1.0, sizes[2] / size(one))
            for one in each
        ],
    )
    for one, other in zip(clipped(method, rows_for(source, drawn)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5 * size(expected))


def test_rgp_equals_the_loop_over_persons(tiny: Callable[[str], str]) -> None:
    """Autograd's gradients of the carriers, one row at a time, by the twin of records."""
    source, drawn = person_table(tiny("bert")), [4, 0, 2, 1, 4]
    plan, _, method = make(tiny("bert"), 1.0, **STEPS["rgp all"])
    assert isinstance(method, Rgp)
    method.begin(0, 1)  # chooses the carriers, as it will for the step

    def flat(row: dict[str, tuple[Tensor, ...]]) -> Tensor:
        share = {"head.weight": HEAD_SHARE, "head.bias": HEAD_SHARE}
        names = [*carriers(method), *share]
        return torch.cat([share.get(name, 1.0) * g.flatten() for name in names for g in row[name]])

    each = []
    for person in drawn:
        own = np.flatnonzero(source.persons == person)
        rows = take(source, own, np.arange(len(own)), torch.device("cpu"))
        each.append([torch.stack([flat(row) for row in naive_rows(method, rows)]).mean(0)])
    clip = sorted(size(one) for one in each)[2]
    expected = expected_sum(each, [min(1.0, clip / size(one)) for one in each])
    method.plan = replace(plan, clip=clip)
    (found,) = clipped(method, rows_for(source, drawn))
    torch.testing.assert_close(found, expected[0], rtol=2e-3, atol=1e-5 * size(expected))


@pytest.mark.parametrize("name", STEPS)
def test_no_person_moves_a_step_by_more_than_C(tiny: Callable[[str], str], name: str) -> None:
    """Neighbours: the person with 7 rows, whatever they are, is there or not."""
    source = person_table(tiny("bert"))
    _, _, method = make(tiny("bert"), 0.02, **STEPS[name])
    without, with_all = clipped(method, rows_for(source, [0, 2])), None
    with_all = clipped(method, rows_for(source, [0, 4, 2]))
    moved = size([one - other for one, other in zip(with_all, without, strict=True)])
    assert 0.9 * 0.02 < moved < 0.02 * (1 + 1e-3)  # and C is reached: no more is given away


@pytest.mark.parametrize("name", [name for name in STEPS if not name.startswith("hooks")])
def test_fifty_rows_that_all_say_the_same_move_a_step_by_no_more_than_one_row(
    tiny: Callable[[str], str], name: str
) -> None:
    """Nothing cancels and nothing is averaged out: the worst that a person can bring."""
    persons = np.repeat(np.arange(3), (1, 50, 1))
    source = replace(
        table(tiny("bert"), (TEXTS[0], *[TEXTS[1]] * 50, TEXTS[1])),
        labels=np.array([0, *[1] * 50, 1]),
        persons=persons,
    )
    _, _, method = make(tiny("bert"), 0.02, **STEPS[name])
    without = clipped(method, rows_for(source, [0]))
    for person in (1, 2):  # with 50 such rows, and with one
        with_them = clipped(method, rows_for(source, [0, person]))
        moved = size([one - other for one, other in zip(with_them, without, strict=True)])
        assert 0.9 * 0.02 < moved < 0.02 * (1 + 1e-3)


@pytest.mark.parametrize("name", ["ghost all", "hooks all", "rgp all", "ghost head"])
def test_persons_may_be_cut_into_parts_and_come_in_any_order(
    tiny: Callable[[str], str], name: str
) -> None:
    source = person_table(tiny("bert"))
    _, _, method = make(tiny("bert"), 0.5, **STEPS[name])
    whole = clipped(method, rows_for(source, [3, 1, 4, 0]))
    parts = clipped(method, rows_for(source, [4]), rows_for(source, [0, 1, 3]))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["ghost all", "hooks all", "rgp all", "ghost bias"])
def test_persons_of_one_row_are_records(tiny: Callable[[str], str], name: str) -> None:
    source = person_table(tiny("bert"), np.arange(6))
    _, _, method = make(tiny("bert"), 0.5, **STEPS[name])
    as_persons = clipped(method, rows_for(source, [3, 1, 5]))
    as_records = clipped(method, rows_for(replace(source, persons=None), [3, 1, 5]))
    for one, other in zip(as_persons, as_records, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["ghost all", "hooks all", "rgp all"])
def test_a_person_with_an_undefined_row_adds_nothing(tiny: Callable[[str], str], name: str) -> None:
    source = person_table(tiny("bert"))
    _, model, method = make(tiny("bert"), 0.5, **STEPS[name])
    expected = clipped(method, rows_for(source, [0, 2]))
    rows = rows_for(source, [0, 4, 2])
    spoilt = torch.zeros(len(rows.labels), dtype=torch.bool)
    spoilt[1] = True  # the first of person 4's rows

    def after_embeddings(_: Any, inputs: Any, output: Tensor) -> Tensor:
        bad = spoilt if len(output) == len(spoilt) else torch.zeros(len(output), dtype=torch.bool)
        return output * torch.where(bad, float("nan"), 1.0)[:, None, None]

    encoder: Any = model.encoder
    handle = encoder.get_input_embeddings().register_forward_hook(after_embeddings)
    found = clipped(method, rows)
    handle.remove()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_paper_gives_a_persons_rows_the_noise_of_one_release(tiny: Callable[[str], str]) -> None:
    """m rows with noise of √m σ each: what all of them move, in units of their noise, is C/σ."""
    source = person_table(tiny("bert"))
    _, model, method = make(tiny("bert"), 1.0, method="dpfp", micro_batches=1, scope="head")
    method.sigma = 2.0
    given: list[Tensor] = []
    model.head.register_forward_hook(lambda _, inputs, __: given.append(inputs[0].detach()))
    drawn = [4] * 300 + [0] * 300
    rows = rows_for(source, drawn)
    method.begin(0, len(rows.labels))
    method.backward(rows)
    noise = given[0] - method.clipped(rows)  # type: ignore[attr-defined]
    assert rows.example is not None
    seven = rows.example < 300
    # Half of it would be far outside.
    assert noise[seven].std().item() == pytest.approx(2.0 * np.sqrt(7), rel=0.03)
    assert noise[~seven].std().item() == pytest.approx(2.0, rel=0.03)
    # Zero-out of the person: 7 rows of norm at most C, each in units of its noise.
    own = method.clipped(rows)[rows.example == 0]  # type: ignore[attr-defined]
    assert (own.square().sum() / (7 * 2.0**2)).sqrt() <= 1.0 / 2.0 * (1 + 1e-5)
