"""DP-FP against Algorithm 1 written out: one micro-batch, one row, one noise vector at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.methods.dpfp import DpFp, clip_rows
from dpfp_ray.methods.parts.base import CPU_ROWS, Rows, make_method
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import PoissonSampler, keyed_generator
from tests.support.tiny_runs import tiny_classifier, tiny_data, tiny_plan

SEED = 2**100 + 7
SIGMA = 0.7


@pytest.fixture(scope="module")
def table(model_folder: str) -> TokenTable:
    return tiny_data(model_folder).train


def middle_norm(model: Classifier, table: TokenTable) -> float:
    """Between two rows' norms: Clip has no derivative at a row of norm C."""
    with torch.no_grad():
        norms = model.represent(table.collate(np.arange(len(table)))).norm(dim=1).sort().values
    return float(norms[11:13].mean())


@pytest.fixture
def plan(model_folder: str, table: TokenTable) -> Plan:
    """B = 12 in M = 3 micro-batches; the clipping norm is one that half of the rows exceed."""
    plan = tiny_plan(batch_size=12, micro_batches=3)
    clip = middle_norm(tiny_classifier(model_folder, plan), table)
    return tiny_plan(batch_size=12, micro_batches=3, clip=clip)


def rows_of(table: TokenTable, records: np.ndarray, positions: np.ndarray | None = None) -> Rows:
    positions = np.arange(len(records)) if positions is None else positions
    chosen = records[positions]
    return Rows(positions, table.collate(chosen), torch.from_numpy(table.labels[chosen]))


def gradients(model: Classifier) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in trainable_parameters(model)}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal up to rounding, relative to the largest number of all gradients."""
    assert ours.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    assert largest > 1e-3
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6 * largest, msg=name)


def fused(
    model: Classifier, plan: Plan, table: TokenTable, step: int, parts: int = 1
) -> dict[str, Tensor]:
    """What the loop does in one step, in `parts` passes."""
    method = make_method(plan, model, SIGMA, SEED)
    records = PoissonSampler(plan.D, plan.M, plan.p, SEED).draw(step)
    model.zero_grad(set_to_none=True)
    method.begin(step, len(records))
    for positions in np.array_split(np.arange(len(records)), parts):
        method.backward(rows_of(table, records, positions))
    method.finish(step)
    return gradients(model)


def algorithm_1(model: Classifier, plan: Plan, table: TokenTable, step: int) -> dict[str, Tensor]:
    """The twin: M micro-batches one after the other, row by row, gradients accumulated."""
    cells = PoissonSampler(plan.D, plan.M, plan.p, SEED).draw_cells(step)
    rng = keyed_generator(SEED, "noise", step)
    noise = SIGMA * torch.from_numpy(rng.standard_normal((len(cells), model.width), "float32"))
    model.zero_grad(set_to_none=True)
    sizes = []
    for micro_batch in range(plan.M):
        members = [row for row, cell in enumerate(cells) if cell // plan.D == micro_batch]
        sizes.append(len(members))
        for row in members:
            record = int(cells[row]) % plan.D
            h = model.represent(table.collate(np.array([record])))[0]
            norm = float(h.detach().norm())
            if norm > plan.C:
                h = h / h.norm() * plan.C
            logits = model.head(h + noise[row])
            loss = torch.logsumexp(logits, 0) - logits[int(table.labels[record])]
            (loss / plan.B).backward()
    assert sum(sizes) > 3
    return gradients(model)


@pytest.mark.parametrize("step", [0, 1, 17])
def test_the_fused_gradient_is_that_of_accumulated_micro_batches(
    model_folder: str, plan: Plan, table: TokenTable, step: int
) -> None:
    model = tiny_classifier(model_folder, plan)
    assert_same(fused(model, plan, table, step), algorithm_1(model, plan, table, step))


def test_a_record_drawn_twice_has_two_noises(
    model_folder: str, plan: Plan, table: TokenTable
) -> None:
    model = tiny_classifier(model_folder, plan)
    method = DpFp(plan, model, SIGMA, SEED)
    method.begin(0, 2)
    released = captured_release(method, rows_of(table, np.array([5, 5])))
    assert not torch.allclose(released[0], released[1], atol=0.01)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_parts_add_up_to_one_pass(
    model_folder: str, plan: Plan, table: TokenTable, parts: int
) -> None:
    model = tiny_classifier(model_folder, plan)
    assert_same(fused(model, plan, table, 0, parts), fused(model, plan, table, 0))


def test_the_loss_is_divided_by_the_public_batch_size(model_folder: str, table: TokenTable) -> None:
    """The same seven rows under B = 4 and B = 8: half the gradient, whatever was realised."""
    found = []
    for batch_size in (4, 8):
        plan = tiny_plan(batch_size=batch_size)
        model = tiny_classifier(model_folder, plan)
        method = DpFp(plan, model, SIGMA, SEED)
        method.begin(0, 7)
        method.backward(rows_of(table, np.arange(7)))
        found.append(gradients(model))
    assert_same({name: 2 * grad for name, grad in found[1].items()}, found[0])


def test_backward_gives_the_sum_of_the_rows_losses(
    model_folder: str, plan: Plan, table: TokenTable
) -> None:
    model = tiny_classifier(model_folder, plan)
    method = DpFp(plan, model, sigma=0.0, seed=SEED)
    rows = rows_of(table, np.arange(9))
    method.begin(0, 9)
    loss = method.backward(rows)
    logits = model.head(naive_clip(model.represent(rows.inputs).detach(), plan.C))
    expected = -functional.log_softmax(logits, 1)[torch.arange(9), rows.labels].sum()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())


def captured_release(method: DpFp, rows: Rows) -> Tensor:
    """What the head gets to see."""
    seen: list[Tensor] = []
    hook = method.model.head.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].detach())
    )
    method.backward(rows)
    hook.remove()
    return seen[0]


def pure_noise(method: DpFp, table: TokenTable, step: int, count: int = 300) -> Tensor:
    """Noise alone: representations are clipped to almost nothing."""
    records = np.arange(count) % len(table)
    method.begin(step, count)
    return captured_release(method, rows_of(table, records))


@pytest.fixture
def noise_only(model_folder: str) -> DpFp:
    plan = tiny_plan(clip=1e-9)
    return DpFp(plan, tiny_classifier(model_folder, plan), SIGMA, SEED)


def test_noise_has_the_standard_deviation_asked_for(noise_only: DpFp, table: TokenTable) -> None:
    noise = pure_noise(noise_only, table, step=0)
    n = noise.numel()
    assert abs(float(noise.mean())) < 4 * SIGMA / n**0.5
    assert abs(float(noise.std()) / SIGMA - 1) < 4 / (2 * n) ** 0.5


def test_noise_is_independent_between_rows_and_coordinates(
    noise_only: DpFp, table: TokenTable
) -> None:
    noise = pure_noise(noise_only, table, step=0)
    for matrix, size in ((noise.T, len(noise)), (noise, noise.shape[1])):
        correlation = np.corrcoef(matrix.numpy()) - np.eye(len(matrix))
        assert np.abs(correlation).max() < 6 / size**0.5


def test_noise_differs_between_steps(noise_only: DpFp, table: TokenTable) -> None:
    one, other = pure_noise(noise_only, table, 0), pure_noise(noise_only, table, 1)
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 6 / one.numel() ** 0.5


def test_a_repeated_step_repeats_its_noise(noise_only: DpFp, table: TokenTable) -> None:
    first = pure_noise(noise_only, table, 3)
    pure_noise(noise_only, table, 4)
    assert torch.equal(pure_noise(noise_only, table, 3), first)


def test_other_seeds_make_other_noise(
    model_folder: str, noise_only: DpFp, table: TokenTable
) -> None:
    other = DpFp(noise_only.plan, noise_only.model, SIGMA, SEED + 1)
    assert not torch.allclose(pure_noise(noise_only, table, 0), pure_noise(other, table, 0))


def test_a_rows_noise_does_not_depend_on_the_worker_that_has_it(
    noise_only: DpFp, table: TokenTable
) -> None:
    whole = pure_noise(noise_only, table, 0, count=10)
    noise_only.begin(0, 10)
    last = captured_release(noise_only, rows_of(table, np.arange(10), np.array([9, 4])))
    torch.testing.assert_close(last, whole[[9, 4]], rtol=0, atol=1e-7)


def test_bf16_clips_and_adds_noise_in_fp32(
    model_folder: str, plan: Plan, table: TokenTable
) -> None:
    half = tiny_plan(batch_size=12, micro_batches=3, clip=plan.C, precision="bf16")
    method = DpFp(half, tiny_classifier(model_folder, half), SIGMA, SEED)
    method.begin(0, 12)
    released = captured_release(method, rows_of(table, np.arange(12)))
    norms = (released - method.noise).norm(dim=1)
    assert released.dtype == torch.float32
    assert (norms > half.C * (1 - 1e-5)).any()  # some rows were clipped; bf16 would miss by 1e-3
    assert (norms < half.C * (1 + 1e-5)).all()


def test_bf16_really_runs_the_encoder_in_bf16(
    model_folder: str, plan: Plan, table: TokenTable
) -> None:
    seen: list[torch.dtype] = []
    half = tiny_plan(batch_size=12, precision="bf16")
    model = tiny_classifier(model_folder, half)
    layer = next(m for m in model.encoder.modules() if isinstance(m, torch.nn.Linear))
    layer.register_forward_hook(lambda *found: seen.append(found[2].dtype))
    DpFp(half, model, SIGMA, SEED).represent(table.collate(np.arange(2)))
    assert seen == [torch.bfloat16]


def test_an_empty_step_gives_zero_gradients(model_folder: str, plan: Plan) -> None:
    model = tiny_classifier(model_folder, plan)
    method = DpFp(plan, model, SIGMA, SEED)
    method.begin(0, 0)
    assert not any(grad.any() for grad in method.gradients())
    assert len(method.gradients()) == len(trainable_parameters(model))


def test_one_noisy_row_has_as_many_coordinates_as_the_representation(
    model_folder: str, plan: Plan
) -> None:
    assert DpFp(plan, tiny_classifier(model_folder, plan), SIGMA, SEED).noise_coordinates == 32


def test_head_only_training_noises_the_same_rows(model_folder: str, table: TokenTable) -> None:
    plan = tiny_plan(batch_size=12, scope="head")
    model = tiny_classifier(model_folder, plan)
    found = fused(model, plan, table, 0)
    assert set(found) == {"head.weight", "head.bias"}
    whole = tiny_plan(batch_size=12)
    expected = fused(tiny_classifier(model_folder, whole), whole, table, 0)
    assert_same(found, {name: expected[name] for name in found})


# clip_rows ---------------------------------------------------------------------------------------


def naive_clip(h: Tensor, C: float) -> Tensor:
    return torch.stack([row * min(1.0, C / float(row.norm())) if row.any() else row for row in h])


@pytest.mark.parametrize("C", [1e-6, 0.5, 1.0, 3.0, 1e6])
def test_clipping_is_row_by_row(C: float) -> None:
    h = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(clip_rows(h, C), naive_clip(h, C))


@pytest.mark.parametrize(
    ("rows", "C"),
    [([[0.3, 0.4], [0.1, -0.2]], 1.0), ([[3.0, 4.0]], 5.0)],
    ids=["short", "of norm C"],
)
def test_rows_no_longer_than_C_keep_every_bit(rows: list[list[float]], C: float) -> None:
    assert torch.equal(clip_rows(torch.tensor(rows), C), torch.tensor(rows))


def test_a_zero_row_stays_zero_and_has_a_gradient() -> None:
    h = torch.zeros(1, 3, requires_grad=True)
    clip_rows(h, 0.5).sum().backward()
    assert h.grad is not None
    assert h.grad.tolist() == [[1.0, 1.0, 1.0]]


def test_a_clipped_rows_gradient_is_that_of_the_projection() -> None:
    h = torch.tensor([[3.0, 4.0, 12.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: clip_rows(x, 2.0), (h,))


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e15, 1e25])
def test_no_finite_row_is_longer_than_c_afterwards(size: float) -> None:
    h = size * torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    clipped = clip_rows(h, 0.1)
    assert clipped.isfinite().all()
    assert float(clipped.double().norm(dim=1).max()) <= 0.1 * (1 + 1e-6)


# Ordinary training: the gradient that any textbook loop would have.


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_gradient_is_that_of_the_mean_loss(
    model_folder: str, table: TokenTable, parts: int
) -> None:
    plan = tiny_plan("non_private")
    records = np.array([3, 0, 7, 12])
    model = tiny_classifier(model_folder, plan)
    method = make_method(plan, model, 0.0, seed=1)
    method.begin(0, 4)
    total = torch.zeros(())
    for positions in np.array_split(np.arange(4), parts):
        total += method.backward(rows_of(table, records, positions))
    method.finish(0)

    twin = tiny_classifier(model_folder, plan)
    labels = torch.from_numpy(table.labels[records])
    loss = functional.cross_entropy(twin(table.collate(records)), labels)
    loss.backward()
    assert_same(gradients(model), gradients(twin))
    torch.testing.assert_close(total, 4 * loss.detach())


def test_nothing_is_noised(model_folder: str) -> None:
    plan = tiny_plan("non_private")
    method = make_method(plan, tiny_classifier(model_folder, plan), 0.0, seed=1)
    assert method.noise_coordinates == 0
    assert method.max_rows == CPU_ROWS
