"""DP-SGD against a naive twin: one row at a time, plain autograd, clip, add."""

import copy
import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.methods import dpsgd
from dpfp_ray.methods.dpsgd import DpSgd
from dpfp_ray.methods.parts.base import Rows
from dpfp_ray.methods.parts.ghost import unsplittable
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.models.scopes import Lora
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import ShuffleSampler, add_noise
from dpfp_ray.training.loop import State, evaluate
from dpfp_ray.training.machine import SoloComm
from dpfp_ray.training.prepare import Data
from dpfp_ray.training.step import Steps, take
from tests.support.tiny_models import ENCODERS, NO_POOLER, TEXTS
from tests.support.tiny_runs import Killed, Listener, train_with

CLIPPINGS = ("ghost", "hooks")
SHARED = ("mpnet", "deberta-v2")  # have weights that act on a whole batch at once
SEED, SIGMA, B = 11, 0.5, 10
RECORDS = np.array([0, 5, 7, 12, 3, 5, 19])  # of several lengths, one of them twice


@pytest.fixture(autouse=True)
def _quiet_about_frozen_weights() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no gradient per example")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield


def table(folder: str, texts: tuple[str, ...] = TEXTS) -> TokenTable:
    encoded = load_tokenizer(folder)(list(texts))
    columns = {
        name: np.concatenate([np.array(row) for row in encoded[name]])
        for name in ("input_ids", "token_type_ids")
        if name in encoded
    }
    offsets = np.cumsum([0, *(len(row) for row in encoded["input_ids"])])
    return TokenTable(columns, offsets, np.arange(len(texts)) % 2, encoder_padding(folder))


def encoder_padding(folder: str) -> int:
    padding = load_tokenizer(folder).pad_token_id
    assert isinstance(padding, int)
    return padding


def make_plan(folder: str, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "method": "dpsgd",
        "model": folder,
        "representation": "mean",
        "clip": 1.0,
        "batch_size": B,
        "epochs": 4,
        "learning_rate": 1e-3,
    }
    return Plan(**(settings | changes)).bind(records=len(TEXTS))


def build(plan: Plan) -> Classifier:
    lora = Lora.of(plan)
    model = build_classifier(plan.model, plan.representation, 2, scope=plan.scope, lora=lora)
    return model.train()


def make_dpsgd(folder: str, **changes: Any) -> DpSgd:
    plan = make_plan(folder, **changes)
    return DpSgd(plan, build(plan), SIGMA, SEED)


def make_rows(source: TokenTable, positions: list[int] | None = None, packs: bool = False) -> Rows:
    chosen = np.arange(len(RECORDS)) if positions is None else np.array(positions)
    return take(source, RECORDS, chosen, torch.device("cpu"), packs=packs)


def clipped_sum(method: DpSgd, *parts: Rows) -> dict[str, Tensor]:
    """`.grad` as the loop sees it before `finish`; the model is left as it was found."""
    method.model.zero_grad(set_to_none=True)
    method.begin(0, sum(len(part.labels) for part in parts))
    for part in parts:
        method.backward(part)
    found = {
        name: p.grad.clone() for name, p in trainable_parameters(method.model) if p.grad is not None
    }
    method.finish(0)
    method.model.zero_grad(set_to_none=True)
    return found


def row_gradients(model: Classifier, rows: Rows) -> list[dict[str, Tensor]]:
    """Each row by itself, at its own length: no hooks, no batch, no padding."""
    named = trainable_parameters(model)
    found = []
    for row, label in enumerate(rows.labels):
        length = int(rows.inputs["attention_mask"][row].sum())
        alone = {key: value[row : row + 1, :length] for key, value in rows.inputs.items()}
        loss = functional.cross_entropy(model(alone), label[None])
        gradients = torch.autograd.grad(loss, [p for _, p in named])
        found.append({name: g for (name, _), g in zip(named, gradients, strict=True)})
    return found


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([g.norm() for g in gradients.values()]).norm())


def naive_sum(model: Classifier, rows: Rows, clip: float) -> dict[str, Tensor]:
    rows_gradients = row_gradients(model, rows)
    factors = [min(1.0, clip / norm(gradients)) for gradients in rows_gradients]
    return {
        name: torch.stack([f * g[name] for f, g in zip(factors, rows_gradients, strict=True)]).sum(
            0
        )
        for name, _ in trainable_parameters(model)
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal up to rounding, which for a gradient near zero is rounding of the whole gradient."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        atol = 1e-5 * norm(expected) / value.numel() ** 0.5
        torch.testing.assert_close(found[name], value, rtol=2e-3, atol=atol, msg=name)


# --- the clipped sum ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("representation", ["mean", "cls", "pooler"])
@pytest.mark.parametrize("architecture", ENCODERS)
def test_ghost_hooks_and_naive_loop_agree(
    tiny: Callable[[str], str], architecture: str, representation: str
) -> None:
    folder = tiny(architecture)
    if representation == "pooler" and architecture in NO_POOLER:
        pytest.skip("has no pooler")
    plan = make_plan(folder, representation=representation)
    model = build(plan)
    method = DpSgd(plan, model, SIGMA, SEED)
    rows = make_rows(table(folder))
    norms = sorted(norm(gradients) for gradients in row_gradients(model, rows))
    clips = (norms[0] / 10, norms[len(norms) // 2])  # all clipped; some clipped
    for clip in clips:
        expected = naive_sum(model, rows, clip)
        for clipping in CLIPPINGS:
            method.plan = dataclasses.replace(plan, clip=clip, clipping=clipping)
            assert_same(clipped_sum(method, rows), expected)


def test_hooks_take_as_many_rows_as_half_of_a_gpus_free_memory_holds(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tiny("bert"), clipping="hooks")
    method = DpSgd(plan, build(plan), SIGMA, SEED)
    row = 4 * method.noise_coordinates
    monkeypatch.setattr(dpsgd, "HOOKS_BYTES", 3 * row)
    assert method.max_rows == 3
    method.device = torch.device("cuda", 0)
    for free, most in ((2 * row, 3), (2 * 50 * row + row, 48)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 80 * 2**30))
        assert method.max_rows == most


@pytest.mark.slow
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_the_last_token_of_a_decoder_has_a_clipped_sum_like_any_other(
    tiny: Callable[[str], str], clipping: str
) -> None:
    plan = make_plan(tiny("gpt2"), representation="last", clipping=clipping)
    model = build(plan)
    rows = make_rows(table(tiny("gpt2")))
    assert_same(clipped_sum(DpSgd(plan, model, SIGMA, SEED), rows), naive_sum(model, rows, plan.C))


@pytest.mark.slow
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("scope", ["all", "bias", "lora"])
@pytest.mark.parametrize("architecture", ENCODERS)
def test_packed_rows_have_the_clipped_sum_of_padded_ones(
    tiny: Callable[[str], str], architecture: str, scope: str, clipping: str
) -> None:
    plan = make_plan(tiny(architecture), scope=scope, clipping=clipping)
    method = DpSgd(plan, build(plan), SIGMA, SEED)
    if not method.takes_packed:
        assert architecture not in ("bert", "roberta")
        return
    source = table(plan.model)
    padded, packed = make_rows(source), make_rows(source, packs=True)
    assert packed.packed_row is not None
    norms = sorted(norm(gradients) for gradients in row_gradients(method.model, padded))
    for clip in (norms[0] / 10, norms[len(norms) // 2]):
        method.plan = dataclasses.replace(plan, clip=clip)
        assert_same(clipped_sum(method, packed), clipped_sum(method, padded))


def test_a_padding_token_within_a_packed_text_gets_no_gradient(tiny: Callable[[str], str]) -> None:
    folder = tiny("bert")
    method = make_dpsgd(folder, clipping="hooks")
    source = table(folder, ("a fine [PAD] film", "a dull one", *TEXTS))
    found = clipped_sum(method, make_rows(source, packs=True))
    assert encoder_padding(folder) in make_rows(source).inputs["input_ids"][0, :-1]
    words = found["encoder.embeddings.word_embeddings.weight"]
    assert words.any()
    assert not words[encoder_padding(folder)].any()


@pytest.mark.parametrize(("clipping", "packs"), [("ghost", False), ("hooks", True)])
def test_rows_that_may_be_long_have_no_packed_ghost(
    tiny: Callable[[str], str], clipping: str, packs: bool
) -> None:
    plan = make_plan(tiny("bert"), max_length=512, clipping=clipping)
    assert DpSgd(plan, build(plan), SIGMA, SEED).takes_packed is packs


def test_hooks_are_given_packed_rows_by_the_loop(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Parts of very few rows: memory allows hooks no more.
    monkeypatch.setattr(DpSgd, "max_rows", 3)
    folder = tiny("bert")
    method = make_dpsgd(folder, clipping="hooks")
    given: list[Rows] = []
    backward = method.backward

    def noted(rows: Rows) -> Tensor:
        given.append(rows)
        return backward(rows)

    monkeypatch.setattr(method, "backward", noted)
    sampler = ShuffleSampler(len(TEXTS), B, SEED)
    optimizer = torch.optim.AdamW(method.parameters)
    steps = Steps(method.plan, method, optimizer, table(folder), sampler, SoloComm(), SEED)
    steps.take(0)
    assert len(given) > 1
    assert all(rows.packed_row is not None and len(rows.labels) <= 3 for rows in given)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_neighbour_in_the_same_sequence_moves_the_sum_by_at_most_C(
    tiny: Callable[[str], str], clipping: str
) -> None:
    method = make_dpsgd(tiny("bert"), clip=0.01, clipping=clipping)
    source, everyone = table(method.plan.model), list(range(len(RECORDS)))
    whole = clipped_sum(method, make_rows(source, everyone, packs=True))
    for left_out in everyone:
        rest = [position for position in everyone if position != left_out]
        without = clipped_sum(method, make_rows(source, rest, packs=True))
        moved = norm({name: whole[name] - without[name] for name in whole})
        assert moved == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_an_undefined_row_takes_none_of_its_neighbours_with_it(
    tiny: Callable[[str], str], clipping: str
) -> None:
    method = make_dpsgd(tiny("bert"), clipping=clipping)
    source = table(method.plan.model)
    ids = [set(source.collate(RECORDS[[i]])["input_ids"][0].tolist()) for i in range(len(RECORDS))]
    bad = next(i for i in range(len(RECORDS)) if ids[i] - set().union(*ids[:i], *ids[i + 1 :]))
    (word, *_) = ids[bad] - set().union(*ids[:bad], *ids[bad + 1 :])
    with torch.no_grad():
        method.model.encoder.get_input_embeddings().weight[word] = float("nan")
    rest = [position for position in range(len(RECORDS)) if position != bad]
    found = clipped_sum(method, make_rows(source, packs=True))
    assert_same(found, clipped_sum(method, make_rows(source, rest)))


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_a_padding_token_within_the_text_gets_no_gradient(
    tiny: Callable[[str], str], architecture: str, clipping: str
) -> None:
    # Tokenizers turn a literal "[PAD]" in a text into the padding's id; torch's embedding skips it.
    folder = tiny(architecture)
    pad = load_tokenizer(folder).pad_token
    source = table(folder, tuple(f"{text} {pad} the the" for text in TEXTS))
    method = make_dpsgd(folder, clip=1e-3, clipping=clipping)
    rows = make_rows(source)
    found = clipped_sum(method, rows)
    assert_same(found, naive_sum(method.model, rows, 1e-3))
    words = next(value for name, value in found.items() if "word_embeddings" in name)
    assert not words[encoder_padding(folder)].any()


# --- rows, parts, workers -----------------------------------------------------------------------


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_how_rows_are_cut_does_not_matter(tiny: Callable[[str], str], clipping: str) -> None:
    method = make_dpsgd(tiny("bert"), clipping=clipping)
    source = table(method.plan.model)
    whole = clipped_sum(method, make_rows(source))
    parts = clipped_sum(
        method, make_rows(source, [6, 2]), make_rows(source, [0]), make_rows(source, [1, 3, 4, 5])
    )
    assert_same(parts, whole)
    worker_0 = clipped_sum(method, make_rows(source, [0, 1, 2]))
    worker_1 = clipped_sum(method, make_rows(source, [3, 4, 5, 6]))
    assert_same({name: worker_0[name] + worker_1[name] for name in whole}, whole)


def test_backward_returns_the_sum_of_the_rows_losses(tiny: Callable[[str], str]) -> None:
    method = make_dpsgd(tiny("bert"))
    rows = make_rows(table(method.plan.model))
    method.begin(0, len(RECORDS))
    loss = method.backward(rows)
    assert not loss.requires_grad
    expected = functional.cross_entropy(method.model(rows.inputs), rows.labels, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_hooks_take_fewer_rows_at_once_the_larger_the_model(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tiny("bert"), max_physical_batch=64)
    method = DpSgd(plan, build(plan), SIGMA, SEED)
    assert method.max_rows == 64
    method.plan = dataclasses.replace(plan, clipping="hooks")
    assert method.max_rows == 64
    monkeypatch.setattr(dpsgd, "HOOKS_BYTES", 4 * 6 * method.noise_coordinates)
    assert method.max_rows == 6
    monkeypatch.setattr(dpsgd, "HOOKS_BYTES", 1)
    assert method.max_rows == 1


def test_ghost_norms_do_not_depend_on_the_way_they_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dpfp_ray.methods.parts import ghost

    generator = torch.Generator().manual_seed(0)
    for length, width in [(3, 40), (40, 3)]:  # Gram matrices; the gradient itself
        a = torch.randn(7, length, width, generator=generator)
        g = torch.randn(7, length, width + 1, generator=generator)
        expected = torch.einsum("nti,nto->noi", a, g).flatten(1).square().sum(1)
        for chunk in (1, 2**25):
            monkeypatch.setattr(ghost, "CHUNK", chunk)
            torch.testing.assert_close(ghost._linear_squares(a, g), expected, rtol=1e-4, atol=0)


# --- bf16 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_clipping_is_exact_under_bf16(tiny: Callable[[str], str], clipping: str) -> None:
    method = make_dpsgd(tiny("bert"), clip=0.1, clipping=clipping, precision="bf16")
    found = clipped_sum(method, make_rows(table(method.plan.model), [2]))
    assert all(value.dtype == torch.float32 for value in found.values())
    assert norm(found) == pytest.approx(0.1, rel=1e-4)


# --- noise --------------------------------------------------------------------------------------


def finished(method: DpSgd, step: int, rows: Rows | None) -> list[Tensor]:
    method.model.zero_grad(set_to_none=True)
    method.begin(step, 0 if rows is None else len(rows.labels))
    if rows is not None:
        method.backward(rows)
    method.finish(step)
    return [p.grad.clone() for p in method.parameters if p.grad is not None]


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_an_empty_step_is_noise_over_B(tiny: Callable[[str], str], clipping: str) -> None:
    method = make_dpsgd(tiny("bert"), clipping=clipping)
    found = finished(method, 4, None)
    assert len(found) == len(method.parameters)
    values = torch.cat([value.flatten() for value in found])
    assert values.std().item() == pytest.approx(SIGMA / B, rel=0.02)
    assert abs(values.mean().item()) < 4 * SIGMA / B / values.numel() ** 0.5


def test_finish_adds_the_keyed_noise_once_and_divides_by_B_not_by_rows(
    tiny: Callable[[str], str],
) -> None:
    method = make_dpsgd(tiny("bert"))
    rows = make_rows(table(method.plan.model))
    assert len(rows.labels) != B
    expected = list(clipped_sum(method, rows).values())
    add_noise(expected, SIGMA, SEED, 3)
    for found, value in zip(finished(method, 3, rows), expected, strict=True):
        torch.testing.assert_close(found, value / B)


def test_noise_depends_on_step_and_seed_and_on_nothing_else(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tiny("bert"))
    model = build(plan)
    first = finished(DpSgd(plan, model, SIGMA, SEED), 3, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    again = finished(DpSgd(plan, model, SIGMA, SEED), 3, None)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    for other in (
        finished(DpSgd(plan, model, SIGMA, SEED), 4, None),
        finished(DpSgd(plan, model, SIGMA, SEED + 1), 3, None),
    ):
        assert not any(torch.equal(one, two) for one, two in zip(first, other, strict=True))


# --- what cannot be split by row ----------------------------------------------------------------


@pytest.mark.parametrize("architecture", [name for name in ENCODERS if name not in SHARED])
def test_everything_trains_in_ordinary_encoders(
    tiny: Callable[[str], str], architecture: str
) -> None:
    model = build(make_plan(tiny(architecture)))
    assert unsplittable(model) == []


def test_mpnets_relative_positions_are_frozen_with_one_warning(tiny: Callable[[str], str]) -> None:
    plan = make_plan(tiny("mpnet"))
    model = build(plan)
    shared = "encoder.encoder.relative_attention_bias.weight"
    count = sum(p.numel() for _, p in trainable_parameters(model))
    with pytest.warns(UserWarning, match=shared) as caught:
        method = DpSgd(plan, model, SIGMA, SEED)
    assert len(caught) == 1
    frozen = dict(model.named_parameters())[shared]
    assert not frozen.requires_grad
    assert all(frozen is not parameter for parameter in method.parameters)
    assert method.noise_coordinates == count - frozen.numel()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DpSgd(plan, model, SIGMA, SEED)  # nothing left to freeze, nothing to say


def test_debertas_relative_positions_are_found(tiny: Callable[[str], str]) -> None:
    # Its keys and queries also project the table of relative positions, once for all rows.
    found = unsplittable(build(make_plan(tiny("deberta-v2"))))
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in found} == {
        "rel_embeddings",
        "LayerNorm",
        "query_proj",
        "key_proj",
    }
    layer_norms = [name for name in found if "LayerNorm" in name]
    assert layer_norms == ["encoder.encoder.LayerNorm.weight", "encoder.encoder.LayerNorm.bias"]


def test_the_probe_is_not_disturbed_by_dropout_and_leaves_no_trace(
    tiny: Callable[[str], str],
) -> None:
    model = build_classifier(tiny("bert"), "mean", 2, dropout=0.4).train()
    state = torch.get_rng_state()
    assert unsplittable(model) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


# --- the model stays a plain model --------------------------------------------------------------


def traces(model: Classifier) -> list[str]:
    """Anything of Opacus's that hangs on the model."""
    on_modules = ("activations", "max_batch_len", "autograd_grad_sample_hooks")
    on_weights = ("grad_sample", "_forward_counter", "_current_grad_sample", "_norm_sample")
    return [
        *(n for m in model.modules() for n in on_modules if hasattr(m, n)),
        *(n for p in model.parameters() for n in on_weights if hasattr(p, n)),
        *("hook" for m in model.modules() if m._forward_hooks or m._backward_hooks),
    ]


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_after_a_step_nothing_hangs_on_the_model(tiny: Callable[[str], str], clipping: str) -> None:
    plan = make_plan(tiny("albert"), clipping=clipping)
    model = build(plan)
    names = [name for name, _ in model.named_parameters()]
    method = DpSgd(plan, model, SIGMA, SEED)
    assert traces(model) == []
    clipped_sum(method, make_rows(table(plan.model)))
    assert traces(model) == []
    assert [name for name, _ in model.named_parameters()] == names
    copied = DpSgd(plan, copy.deepcopy(model), SIGMA, SEED)
    expected = clipped_sum(method, make_rows(table(plan.model)))
    assert_same(clipped_sum(copied, make_rows(table(plan.model))), expected)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_step_that_was_broken_off_does_not_spoil_the_next_method(
    tiny: Callable[[str], str], clipping: str
) -> None:
    plan = make_plan(tiny("bert"), clipping=clipping)
    model = build(plan)
    rows = make_rows(table(plan.model))
    expected = clipped_sum(DpSgd(plan, model, SIGMA, SEED), rows)
    broken = DpSgd(plan, model, SIGMA, SEED)
    broken.begin(0, len(RECORDS))
    broken.represent(rows.inputs)  # activations are noted, no backward ever comes
    assert_same(clipped_sum(DpSgd(plan, model, SIGMA, SEED), rows), expected)
    assert traces(model) == []


@pytest.mark.slow
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_steps_and_evaluations_leave_no_tensors_behind(
    tiny: Callable[[str], str], clipping: str
) -> None:
    method = make_dpsgd(tiny("bert"), clipping=clipping)
    source = table(method.plan.model)
    counts = []
    for step in range(3):
        finished(method, step, make_rows(source))
        evaluate(method.model, source, SoloComm())
        method.begin(step, 0)
        evaluate(method.model, source, SoloComm())  # even with hooks on
        gc.collect()
        counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    assert counts[1] == counts[2]


# --- whole runs ---------------------------------------------------------------------------------


def trained(plan: Plan, listener: Listener | None = None, state: State | None = None) -> Classifier:
    model = build(plan)
    source = table(plan.model)
    train_with(plan, 1.0, model, Data(source, {"dev": source}), listener, seed=SEED, state=state)
    return model


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFP_CACHE", str(Path(tmp_path_factory.getbasetemp()) / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "clipping", "scope"),
    [
        ("bert", "ghost", "all"),
        ("mpnet", "hooks", "all"),
        ("albert", "ghost", "head"),
        *(("bert", "ghost", scope) for scope in ("bias", "lora", "top:1")),
    ],
)
def test_a_resumed_run_ends_with_the_same_weights(
    tiny: Callable[[str], str], architecture: str, clipping: str, scope: str
) -> None:
    plan = make_plan(tiny(architecture), clipping=clipping, scope=scope)
    unbroken, victim = trained(plan), Listener(3)
    with pytest.raises(Killed):
        trained(plan, victim)
    resumed = trained(plan, state=victim.state())
    start = build(plan)
    method = DpSgd(plan, start, SIGMA, SEED)
    moving = {name for name, _ in trainable_parameters(start)}
    assert method.parameters
    for (name, one), two, initial in zip(
        unbroken.named_parameters(), resumed.parameters(), start.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
        assert torch.equal(one, initial) == (name not in moving), name
