"""RGP against a twin that really splits every weight and asks autograd for one row at a time."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from dpfp_ray.data import Split
from dpfp_ray.data.tokens import TokenTable, tokenise
from dpfp_ray.methods.parts.base import Rows
from dpfp_ray.methods.parts.carriers import (
    Carried,
    Direct,
    orthonormal,
    renew_each,
    renew_together,
)
from dpfp_ray.methods.rgp import HEAD_SHARE, Rgp
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import Spending
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.prepare import Data
from dpfp_ray.training.step import take
from tests.support.tiny_models import ENCODERS, TEXTS, build_tiny
from tests.support.tiny_runs import Killed, Listener, train_with

LOOSE = 1e9  # a clip that no row reaches
SEED = 3**80
# The pooler is a linear layer of one vector a row, the others see all tokens.
REPRESENTATIONS = {"bert": "pooler", "roberta": "cls", "distilbert": "mean", "albert": "pooler"}


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rgp")
    for architecture in (*ENCODERS, "gpt2"):
        build_tiny(root / architecture, architecture, hidden=16)
    return root


def make_plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {"batch_size": 8, "epochs": 2, "clip": LOOSE, "records": 20}
    return Plan(method="rgp", **{**settings, **changes})


def make_model(zoo: Path, architecture: str = "bert", scope: str = "all") -> Classifier:
    """Weights far larger than a new model's, so that no layer's gradient drowns in rounding."""
    representation = REPRESENTATIONS.get(architecture, "mean")
    model = build_classifier(str(zoo / architecture), representation, 3, head_seed=5, scope=scope)
    generator = torch.Generator().manual_seed(11)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                module.weight.normal_(0, 0.3, generator=generator)
    return model


def make_rows(zoo: Path, architecture: str = "bert", count: int = 6) -> Rows:
    tokenizer = load_tokenizer(str(zoo / architecture))
    batch = dict(tokenizer(list(TEXTS[:count]), padding=True, return_tensors="pt"))
    return Rows(np.arange(count), batch, torch.arange(count) % 3)


def some(rows: Rows, chosen: slice) -> Rows:
    inputs = {name: tensor[chosen] for name, tensor in rows.inputs.items()}
    return Rows(rows.positions[chosen], inputs, rows.labels[chosen])


def carriers(method: Rgp) -> dict[str, Carried]:
    return {f"{layer.name}.weight": layer for layer in method.layers if isinstance(layer, Carried)}


def one_step(method: Rgp, *parts: Rows, step: int = 0) -> dict[str, Tensor]:
    method.begin(step, sum(len(part.labels) for part in parts))
    for part in parts:
        method.backward(part)
    method.finish(step)
    return gradients(method)


def gradients(method: Rgp) -> dict[str, Tensor]:
    found = {}
    for name, parameter in trainable_parameters(method.model):
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, name
        assert (found[name] - value).norm() <= tolerance * value.norm(), name


def naive_rows(method: Rgp, rows: Rows) -> list[dict[str, tuple[Tensor, ...]]]:
    """Each row's gradients of every L, R and head weight, by autograd on W = L R + constant."""
    frozen = {name: p.detach() for name, p in method.model.named_parameters()}
    result = []
    for index in range(len(rows.labels)):
        row = some(rows, slice(index, index + 1))
        leaves: dict[str, tuple[Tensor, ...]] = {
            name: (layer.L.clone().requires_grad_(), layer.R.clone().requires_grad_())
            for name, layer in carriers(method).items()
        }
        weights = dict(frozen)
        for name, (left, right) in leaves.items():
            weights[name] = left @ right + (frozen[name] - left @ right).detach()
        for name in ("head.weight", "head.bias"):
            weights[name] = frozen[name].clone().requires_grad_()
            leaves[name] = (weights[name],)
        logits = functional_call(method.model, weights, (row.inputs,))
        flat = [leaf for group in leaves.values() for leaf in group]
        found = iter(torch.autograd.grad(functional.cross_entropy(logits, row.labels), flat))
        result.append({name: tuple(next(found) for _ in group) for name, group in leaves.items()})
    return result


def naive_norm(row: dict[str, tuple[Tensor, ...]]) -> float:
    squares = 0.0
    for name, group in row.items():
        share = HEAD_SHARE if name.startswith("head") else 1.0
        squares += sum(share**2 * piece.double().square().sum().item() for piece in group)
    return squares**0.5


def naive_step(method: Rgp, rows: Rows) -> dict[str, Tensor]:
    """Clip, add up and project as the paper writes it; no noise."""
    C, B = method.plan.C, method.plan.B
    sums: dict[str, list[Tensor]] = {}
    for row in naive_rows(method, rows):
        factor = min(1.0, C / naive_norm(row))
        for name, group in row.items():
            sums.setdefault(name, [torch.zeros_like(piece) for piece in group])
            for total, piece in zip(sums[name], group, strict=True):
                total += factor * piece / B
    result = {}
    for name, _ in trainable_parameters(method.model):
        if name.startswith("head"):
            result[name] = sums[name][0]
            continue
        (g_L, g_R), layer = sums[name], carriers(method)[name]
        result[name] = g_L @ layer.R + layer.L @ g_R - layer.L @ layer.L.T @ g_L @ layer.R
    return result


def typical_norm(method: Rgp, rows: Rows) -> float:
    """A clip that about half of the rows exceed."""
    method.begin(0, len(rows.labels))
    return float(np.median([naive_norm(row) for row in naive_rows(method, rows)]))


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "albert"])
@pytest.mark.parametrize(
    ("rank", "iterations", "source"),
    [(1, 1, "weight"), (2, 2, "weight"), (4, 1, "weight"), (1, 2, "history"), (4, 1, "history")],
)
def test_step_equals_the_naive_twin(
    zoo: Path, architecture: str, rank: int, iterations: int, source: str
) -> None:
    rows = make_rows(zoo, architecture)
    settings: dict[str, Any] = {"rank": rank, "power_iterations": iterations, "carriers": source}
    clip = typical_norm(Rgp(make_plan(**settings), make_model(zoo, architecture), 0, SEED), rows)
    method = Rgp(make_plan(clip=clip, **settings), make_model(zoo, architecture), 0.0, SEED)
    found = one_step(method, rows)
    assert_same(found, naive_step(method, rows), 1e-4)
    norms = [naive_norm(row) for row in naive_rows(method, rows)]
    assert min(norms) < clip < max(norms)


@pytest.mark.parametrize("architecture", ["mpnet", "electra", "xlm-roberta"])
def test_other_encoders_equal_the_naive_twin(zoo: Path, architecture: str) -> None:
    rows = make_rows(zoo, architecture)
    method = Rgp(make_plan(rank=2), make_model(zoo, architecture), 0.0, SEED)
    assert_same(one_step(method, rows), naive_step(method, rows), 1e-4)


def test_history_later_on_equals_the_naive_twin(zoo: Path) -> None:
    rows = make_rows(zoo)
    method = Rgp(make_plan(rank=2, carriers="history"), make_model(zoo), 0.0, SEED)
    optimizer = torch.optim.AdamW(method.parameters, lr=1e-2)
    for step in range(3):
        found = one_step(method, rows, step=step)
        assert_same(found, naive_step(method, rows), 1e-4)
        optimizer.step()


@pytest.mark.parametrize("architecture", ["bert", "albert"])
def test_full_rank_gives_the_true_gradient(zoo: Path, architecture: str) -> None:
    rows = make_rows(zoo, architecture)
    method = Rgp(make_plan(rank=1000), make_model(zoo, architecture), 0.0, SEED)
    found = one_step(method, rows)
    twin = make_model(zoo, architecture)
    loss = functional.cross_entropy(twin(rows.inputs), rows.labels, reduction="sum")
    (loss / method.plan.B).backward()
    every = dict(twin.named_parameters())
    expected = {name: every[name].grad for name in found}
    assert_same(found, {name: g for name, g in expected.items() if g is not None}, 1e-4)


@pytest.mark.parametrize("source", ["weight", "history"])
@pytest.mark.parametrize("rank", [1, 4, 1000])
def test_carriers_are_orthonormal(zoo: Path, rank: int, source: str) -> None:
    method = Rgp(make_plan(rank=rank, carriers=source), make_model(zoo), 0.0, SEED)
    for step in range(2):
        method.begin(step, 0)
        for layer in carriers(method).values():
            r = min(rank, *layer.module.weight.shape)
            assert layer.L.shape[1] == layer.R.shape[0] == r
            torch.testing.assert_close(layer.L.T @ layer.L, torch.eye(r), atol=1e-5, rtol=0)
            torch.testing.assert_close(layer.R @ layer.R.T, torch.eye(r), atol=1e-5, rtol=0)
        with torch.no_grad():  # so that the history of the second step is not zero
            for parameter in method.parameters:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


@pytest.mark.parametrize("source", ["weight", "history"])
def test_power_iterations_find_the_leading_direction(zoo: Path, source: str) -> None:
    plan = make_plan(carriers=source, power_iterations=100)
    model = make_model(zoo)
    method = Rgp(plan, model, 0.0, SEED)
    name, layer = next(iter(carriers(method).items()))
    before = layer.module.weight.detach().clone()
    with torch.no_grad():
        layer.module.weight += torch.outer(torch.arange(16.0), torch.ones(16)) / 100
    method.begin(7, 0)
    decomposed = layer.module.weight.detach() - (before if source == "history" else 0)
    left, _, right = torch.linalg.svd(decomposed)
    assert name.endswith("query.weight")
    assert abs((layer.L[:, 0] @ left[:, 0]).item()) == pytest.approx(1, abs=1e-4)
    assert abs((layer.R[0] @ right[0]).item()) == pytest.approx(1, abs=1e-4)


def test_history_carriers_are_random_while_nothing_has_moved(zoo: Path) -> None:
    model = make_model(zoo)
    first, again, other = (
        Rgp(make_plan(carriers="history", rank=2), model, 0.0, seed) for seed in (1, 1, 2)
    )
    for method in (first, again, other):
        method.begin(0, 0)
    for a, b, c in zip(first.carried, again.carried, other.carried, strict=True):
        assert torch.equal(a.L, b.L)
        assert torch.equal(a.R, b.R)
        assert not torch.allclose(a.L, c.L, atol=1e-2)
        assert not torch.allclose(a.R, c.R, atol=1e-2)


def test_orthonormal_is_gram_schmidt() -> None:
    matrix = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    q = orthonormal(matrix)
    upper = q.T @ matrix
    torch.testing.assert_close(q @ upper, matrix)
    assert (upper.diagonal() > 0).all()
    torch.testing.assert_close(upper.tril(-1), torch.zeros(3, 3), atol=1e-5, rtol=0)


def test_parts_do_not_change_the_step(zoo: Path) -> None:
    rows = make_rows(zoo)
    plan = make_plan(rank=2, clip=0.5)
    whole = one_step(Rgp(plan, make_model(zoo), 0.7, SEED), rows)
    parts = [some(rows, slice(0, 1)), some(rows, slice(1, 4)), some(rows, slice(4, 6))]
    assert_same(one_step(Rgp(plan, make_model(zoo), 0.7, SEED), *parts), whole, 1e-5)


def test_padding_does_not_change_the_step(zoo: Path) -> None:
    rows = make_rows(zoo)
    longer = {name: functional.pad(tensor, (0, 7)) for name, tensor in rows.inputs.items()}
    padded = Rows(rows.positions, longer, rows.labels)
    plan = make_plan(rank=2, clip=0.5)
    expected = one_step(Rgp(plan, make_model(zoo), 0.0, SEED), rows)
    assert_same(one_step(Rgp(plan, make_model(zoo), 0.0, SEED), padded), expected, 1e-4)


# Rows side by side in one sequence --------------------------------------------------------------


def packed_sum(zoo: Path, method: Rgp, chosen: list[int], packs: bool = True) -> Tensor:
    """The clipped sum of some texts' gradients, without noise."""
    folder = str(zoo / Path(method.model.encoder.config.name_or_path).name)
    labels = (np.arange(len(TEXTS)) % 3).astype(np.int64)
    table = tokenise(Split(list(TEXTS), None, labels), load_tokenizer(folder), 32)
    rows = take(table, np.arange(len(TEXTS)), np.array(chosen), torch.device("cpu"), packs=packs)
    if packs:  # some do lie beside another
        assert len(rows.inputs["input_ids"]) < len(chosen)
    method.begin(0, len(chosen))
    method.backward(rows)
    return method.sums.clone()


@pytest.mark.parametrize("clip", [LOOSE, 0.05])
@pytest.mark.parametrize("architecture", [name for name in ENCODERS if name != "deberta-v2"])
def test_packed_rows_have_the_clipped_sum_of_padded_ones(
    zoo: Path, architecture: str, clip: float
) -> None:
    model = make_model(zoo, architecture)
    method = Rgp(make_plan(rank=3, clip=clip), model, 0.0, SEED)
    # What the pooler is given is one token a row; ModernBERT's masks are its own.
    assert method.takes_packed == (
        model.representation != "pooler" and architecture != "modernbert"
    )
    if method.takes_packed:
        everyone = list(range(len(TEXTS)))
        found, expected = (packed_sum(zoo, method, everyone, packs) for packs in (True, False))
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_a_neighbour_in_the_same_sequence_moves_the_sum_by_at_most_C(zoo: Path) -> None:
    method = Rgp(make_plan(rank=3, clip=0.01), make_model(zoo, "roberta"), 0.0, SEED)
    everyone = list(range(7))
    whole = packed_sum(zoo, method, everyone)
    for left_out in everyone:
        without = packed_sum(zoo, method, [row for row in everyone if row != left_out])
        assert (whole - without).norm() == pytest.approx(0.01, rel=1e-3)


def test_an_undefined_row_takes_none_of_its_neighbours_with_it(zoo: Path) -> None:
    method = Rgp(make_plan(rank=3, clip=0.5), make_model(zoo, "roberta"), 0.0, SEED)
    words = [set(ids) for ids in load_tokenizer(str(zoo / "roberta"))(list(TEXTS[:7])).input_ids]
    rare = [own.difference(*words[:row], *words[row + 1 :]) for row, own in enumerate(words)]
    bad = next(row for row in range(7) if rare[row])
    rest = [row for row in range(7) if row != bad]
    expected = packed_sum(zoo, method, rest, packs=False)
    encoder: Any = method.model.encoder
    with torch.no_grad():
        encoder.get_input_embeddings().weight[next(iter(rare[bad]))] = float("nan")
    found = packed_sum(zoo, method, list(range(7)))
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_an_encoder_that_mixes_tokens_of_packed_rows_is_given_padded_ones(zoo: Path) -> None:
    model = make_model(zoo, "roberta")
    assert Rgp(make_plan(rank=3), model, 0.0, SEED).takes_packed
    # Turns the tokens of one long sequence around for a layer, and back: the same answers.
    layer: Any = model.encoder.get_submodule("encoder.layer.0.output.dense")
    layer.register_forward_pre_hook(lambda _, x: (x[0].flip(1),) if len(x[0]) == 1 else x)
    layer.register_forward_hook(lambda _, x, y: y.flip(1) if len(y) == 1 else y)
    assert model.packs
    assert not Rgp(make_plan(rank=3), model, 0.0, SEED).takes_packed


def test_two_workers_equal_one(zoo: Path) -> None:
    rows = make_rows(zoo)
    plan = make_plan(rank=2, clip=0.5)
    alone = one_step(Rgp(plan, make_model(zoo), 0.7, SEED), rows)
    workers = [Rgp(plan, make_model(zoo), 0.7, SEED) for _ in range(2)]
    for worker, part in zip(workers, (slice(0, 2), slice(2, 6)), strict=True):
        worker.begin(0, 6)
        worker.backward(some(rows, part))
    for tensors in zip(*(worker.gradients() for worker in workers), strict=True):
        total = sum(tensor.clone() for tensor in tensors)
        for tensor in tensors:
            tensor.copy_(total)
    for worker in workers:
        worker.finish(0)
    first, second = (gradients(worker) for worker in workers)
    assert_same(first, alone, 1e-5)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_empty_step_is_pure_noise(zoo: Path) -> None:
    plan = make_plan(rank=2, clip=0.5)
    quiet = one_step(Rgp(plan, make_model(zoo), 0.0, SEED))
    assert not any(gradient.any() for gradient in quiet.values())
    method = Rgp(plan, make_model(zoo), 0.7, SEED)
    method.begin(0, 0)
    assert method.backward(some(make_rows(zoo), slice(0, 0))) == 0
    assert not method.sums.any()
    method.finish(0)
    assert all(gradient.any() for gradient in gradients(method).values())


def test_the_same_key_gives_the_same_step_and_another_does_not(zoo: Path) -> None:
    rows = make_rows(zoo)
    plan = make_plan(rank=2, clip=0.5)
    first = one_step(Rgp(plan, make_model(zoo), 0.7, SEED), rows, step=4)
    torch.manual_seed(99)  # the global state plays no part
    again = one_step(Rgp(plan, make_model(zoo), 0.7, SEED), rows, step=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for seed, step in ((SEED, 5), (SEED + 1, 4)):
        other = one_step(Rgp(plan, make_model(zoo), 0.7, seed), rows, step=step)
        assert not any(torch.equal(first[name], other[name]) for name in first)


def test_noise_is_sigma_on_every_coordinate_and_over_B(zoo: Path) -> None:
    plan = make_plan(rank=4, batch_size=8)
    method = Rgp(plan, make_model(zoo), 2.5, SEED)
    drawn = []
    for step in range(20):
        method.begin(step, 0)
        method.finish(step)
        drawn.append(method.sums.clone() * plan.B)
    noise = torch.stack(drawn)
    assert noise.shape == (20, method.noise_coordinates)
    assert noise.std().item() == pytest.approx(2.5, rel=0.02)
    assert noise.mean().abs() < 0.05
    spread = torch.stack([drawn[0], drawn[1]]) @ noise[2]
    assert spread.abs().max() < 6 * 2.5**2 * method.noise_coordinates**0.5
    # The head's share is taken off again, so its noise is larger by as much.
    method.finish(0)
    head = method.model.head.weight.grad
    assert head is not None
    assert head.std().item() * plan.B == pytest.approx(2.5 / HEAD_SHARE, rel=0.25)


def test_noise_coordinates_count_carriers_and_head(zoo: Path) -> None:
    method = Rgp(make_plan(rank=2), make_model(zoo), 1.0, SEED)
    linears = {n: p for n, p in trainable_parameters(method.model) if not n.startswith("head")}
    assert len(linears) == 2 * 6 + 1  # six a layer, and the pooler
    expected = sum(2 * (p.shape[0] + p.shape[1]) for p in linears.values()) + 3 * 16 + 3
    assert method.noise_coordinates == expected


def test_rows_at_once_are_bounded_by_memory(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Rgp(make_plan(max_physical_batch=64), make_model(zoo), 1.0, SEED)
    assert method.max_rows == 64
    monkeypatch.setattr("dpfp_ray.methods.rgp.ROWS_MEMORY", 10 * method.noise_coordinates)
    assert method.max_rows == 10
    monkeypatch.setattr("dpfp_ray.methods.rgp.ROWS_MEMORY", 1)
    assert method.max_rows == 1


def test_only_linear_weights_and_the_head_train(zoo: Path) -> None:
    model = make_model(zoo)
    before = copy.deepcopy(model.state_dict())
    method = Rgp(make_plan(clip=1.0), model, 0.5, SEED)
    optimizer = torch.optim.AdamW(method.parameters, lr=1e-2)
    one_step(method, make_rows(zoo))
    optimizer.step()
    trained = {name for name, _ in trainable_parameters(model)}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in trained), name
    # As in the authors' code: no embedding, no LayerNorm, no bias of the encoder.
    modules = dict(model.named_modules())
    for name in trained - {"head.weight", "head.bias"}:
        module, _, kind = name.rpartition(".")
        assert kind == "weight"
        assert isinstance(modules[module], torch.nn.Linear)


def test_nothing_of_a_weights_size_is_computed_in_the_pass(zoo: Path) -> None:
    method = Rgp(make_plan(), make_model(zoo), 0.0, SEED)
    method.begin(0, 6)
    method.backward(make_rows(zoo))
    assert all(parameter.grad is None for parameter in method.parameters)
    assert all(parameter.requires_grad for parameter in method.parameters)


def test_a_failing_pass_leaves_no_hook_and_no_frozen_weight(zoo: Path) -> None:
    method = Rgp(make_plan(), make_model(zoo), 0.0, SEED)
    method.begin(0, 6)
    rows = make_rows(zoo)
    with pytest.raises(IndexError):
        method.backward(Rows(rows.positions, rows.inputs, rows.labels + 100))
    assert all(parameter.requires_grad for parameter in method.parameters)
    assert not any(module._forward_hooks for module in method.model.modules())
    method.begin(0, 6)
    method.backward(rows)
    assert all(method.sums[place].any() for places in method.places for place in places)


def test_scope_head_is_dpsgd_on_the_head(zoo: Path) -> None:
    rows = make_rows(zoo)
    model = make_model(zoo, scope="head")
    method = Rgp(make_plan(scope="head", clip=0.5), model, 0.0, SEED)
    assert [type(layer) for layer in method.layers] == [Direct]
    assert method.noise_coordinates == 3 * 16 + 3
    found = one_step(method, rows)
    expected = {name: torch.zeros_like(p) for name, p in trainable_parameters(model)}
    for index in range(6):
        row = some(rows, slice(index, index + 1))
        loss = functional.cross_entropy(model(row.inputs), row.labels)
        pieces = torch.autograd.grad(loss, [model.head.weight, model.head.bias])
        norm = torch.cat([piece.flatten() for piece in pieces]).norm().item()
        for total, piece in zip(expected.values(), pieces, strict=True):
            total += piece * min(1, 0.5 / norm) / method.plan.B
    assert_same(found, expected, 1e-5)


def test_bf16_is_near_fp32(zoo: Path) -> None:
    rows = make_rows(zoo)
    exact = one_step(Rgp(make_plan(clip=0.5), make_model(zoo), 0.0, SEED), rows)
    plan = make_plan(clip=0.5, precision="bf16")
    rounded = one_step(Rgp(plan, make_model(zoo), 0.0, SEED), rows)
    assert all(gradient.dtype == torch.float32 for gradient in rounded.values())
    whole, other = (torch.cat([g.flatten() for g in d.values()]) for d in (exact, rounded))
    assert functional.cosine_similarity(whole, other, dim=0) > 0.98


@pytest.mark.parametrize(
    ("architecture", "words"), [("gpt2", "Conv1D"), ("deberta-v2", "cannot tell rows apart")]
)
def test_encoders_it_cannot_train_are_refused(zoo: Path, architecture: str, words: str) -> None:
    model = build_classifier(str(zoo / architecture), "mean", 2)
    with pytest.raises(UserError, match=words):
        Rgp(make_plan(), model, 1.0, SEED)


@pytest.fixture
def data(zoo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Data:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path))
    # What a step costs is others' to test; accountants would take most of the time here.
    monkeypatch.setattr(Spending, "spent", lambda self, steps: {"pld": float(steps)})
    labels = (np.arange(len(TEXTS)) % 3).astype(np.int64)
    table: TokenTable = tokenise(
        Split(list(TEXTS), None, labels), load_tokenizer(str(zoo / "bert")), 32
    )
    return Data(table, {"dev": table})


@pytest.mark.parametrize("source", ["weight", "history"])
def test_resume_repeats_the_unbroken_run_bit_by_bit(zoo: Path, data: Data, source: str) -> None:
    plan = make_plan(carriers=source, rank=2, clip=0.5, learning_rate=1e-2)
    assert plan.steps == 5

    def run(listener: Listener | None = None, state: Any = None) -> Classifier:
        model = make_model(zoo)
        train_with(plan, 0.8, model, data, listener, seed=SEED, state=state)
        return model

    unbroken, victim = run(), Listener(2)
    with pytest.raises(Killed):
        run(victim)
    resumed = run(state=victim.state())
    start, end, again = (m.state_dict() for m in (make_model(zoo), unbroken, resumed))
    assert all(torch.equal(end[name], again[name]) for name in end)
    assert any(not torch.equal(end[name], start[name]) for name in end)
    frozen = set(end) - set(victim.state()["model"])
    assert all(torch.equal(end[name], start[name]) for name in frozen)


def test_layers_of_one_shape_are_renewed_at_once(zoo: Path) -> None:
    """As one by one, from another random start, which is no matter after many iterations."""
    method = Rgp(make_plan(rank=2), make_model(zoo), 0.0, SEED)
    zero = method.carried[1]
    with torch.no_grad():
        for layer in method.carried:
            u, _, v = torch.linalg.svd(layer.module.weight, full_matrices=False)
            layer.module.weight.copy_((u * 0.5 ** torch.arange(u.shape[1])) @ v)
        zero.module.weight.zero_()
    found = []
    for renew in (renew_each, renew_together):
        renew(method.carried, SEED, 3, 30)
        for layer in method.carried:
            torch.testing.assert_close(layer.L.T @ layer.L, torch.eye(2), rtol=0, atol=1e-5)
            torch.testing.assert_close(layer.R @ layer.R.T, torch.eye(2), rtol=0, atol=1e-5)
        found.append([(layer.L @ layer.L.T, layer.R.T @ layer.R) for layer in method.carried])
    for layer, one, other in zip(method.carried, *found, strict=True):
        if layer is not zero:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
