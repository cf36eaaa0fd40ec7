"""A step that does not fit the memory: smaller parts, the same draws, the same noise."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfp_ray.data.batches import ROW
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.training import step
from dpfp_ray.training.loop import Progress
from dpfp_ray.training.machine import SoloComm, token_budget
from dpfp_ray.training.step import Steps
from tests.support.tiny_runs import (
    Killed,
    Listener,
    ThreadComm,
    in_threads,
    tiny_classifier,
    tiny_data,
    tiny_plan,
    train_with,
)

FITS = 2  # rows of the pretended memory; a step has 4, expected
Patch = pytest.MonkeyPatch
SPILLS = ("to", "forward", "backward", "sum")


def no_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fit(rows: int) -> None:
    if rows > FITS:
        raise no_memory()


class Full(SoloComm):
    """Has no room for what it sends when that is first something."""

    full = False

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        if not self.full and torch.is_grad_enabled() and any(map(torch.any, tensors)):
            self.full = True
            raise no_memory()


def small_memory(patch: Patch, where: str) -> SoloComm:
    """From now on steps find room for `FITS` rows only, and notice at the place called `where`."""
    take, represent, sum_parts = step.take, Classifier.represent, Steps.sum_parts
    inside: list[bool] = []  # a step; models are probed, and evaluated, with larger batches

    def in_step(steps: Steps, *arguments: Any) -> Tensor:
        inside.append(True)
        try:
            return sum_parts(steps, *arguments)
        finally:
            inside.pop()

    def to_device(table: Any, records: Any, positions: Any, *rest: Any) -> Any:
        fit(len(positions))
        return take(table, records, positions, *rest)

    def rows_of(batch: Any) -> int:
        return int(batch[ROW].max()) + 1 if ROW in batch else len(batch["input_ids"])

    def forward(model: Classifier, batch: Any) -> Tensor:
        if inside and where == "forward":
            fit(rows_of(batch))
        h = represent(model, batch)
        if inside and where == "backward":
            h.register_hook(lambda _: fit(rows_of(batch)))
        return h

    if where == "to":
        patch.setattr(step, "take", to_device)
    patch.setattr(Classifier, "represent", forward)
    patch.setattr(Steps, "sum_parts", in_step)
    return Full() if where == "sum" else SoloComm()


def run(
    folder: str, plan: Plan, comm: Any = None, listener: Listener | None = None, **options: Any
) -> tuple[Progress, dict[str, Tensor]]:
    model = tiny_classifier(folder, plan)
    data = tiny_data(folder, train_rows=plan.D)
    noise = 0.5 if plan.private else 0.0
    progress = train_with(plan, noise, model, data, listener, seed=7, comm=comm, **options)
    return progress, {name: p.detach() for name, p in trainable_parameters(model)}


def plan_of(method: str) -> Plan:
    private = {} if method == "non_private" else {"accountant": "gdp"}
    return tiny_plan(method, epochs=1, **private)


@pytest.mark.parametrize("where", SPILLS)
@pytest.mark.parametrize("method", ["non_private", "dpfp", "dpsgd", "rgp"])
def test_a_step_that_does_not_fit_is_done_in_smaller_parts(
    model_folder: str, monkeypatch: Patch, method: str, where: str
) -> None:
    plan = plan_of(method)
    usual, wanted = run(model_folder, plan)
    assert usual.fits == {}
    with warnings.catch_warnings():  # what it says is tested below
        warnings.simplefilter("ignore")
        progress, found = run(model_folder, plan, small_memory(monkeypatch, where))
    assert 1 <= progress.fits["rows"] <= 4
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    assert (progress.step, progress.rows) == (usual.step, usual.rows)


def test_the_size_that_fits_is_kept_also_by_a_run_that_goes_on(
    model_folder: str, monkeypatch: Patch
) -> None:
    plan = plan_of("dpsgd")
    comm = small_memory(monkeypatch, "forward")
    victim = Listener(kill_after=4)
    with pytest.warns(UserWarning, match="out of memory") as told, pytest.raises(Killed):
        run(model_folder, plan, comm, victim)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        progress, _ = run(model_folder, plan, comm, state=victim.state())
    assert progress.fits == {"rows": 2}


def test_one_row_that_does_not_fit_ends_the_run_in_a_line(
    model_folder: str, monkeypatch: Patch
) -> None:
    comm = small_memory(monkeypatch, "backward")
    monkeypatch.setattr("tests.training.test_memory.FITS", 0)
    with (
        pytest.warns(UserWarning, match="out of memory"),
        pytest.raises(UserError, match=r"one row does not fit the memory of cpu .*2\.00 GiB"),
    ):
        run(model_folder, plan_of("dpfp"), comm)


def test_a_worker_without_memory_keeps_the_others_waiting_and_all_agree(
    model_folder: str, monkeypatch: Patch
) -> None:
    """Only the second worker is short of memory, and only it takes smaller parts."""
    plan = plan_of("dpsgd")
    _, wanted = run(model_folder, plan)
    take = step.take

    def work(comm: ThreadComm) -> tuple[Progress, dict[str, Tensor]]:
        return run(model_folder, plan, comm)

    def to_device(table: Any, records: Any, positions: Any, *rest: Any) -> Any:
        if positions[-1] == len(records) - 1 and len(positions) > 1:
            raise no_memory()
        return take(table, records, positions, *rest)

    monkeypatch.setattr(step, "take", to_device)
    with pytest.warns(UserWarning, match="out of memory"):
        (first, ours), (second, theirs) = in_threads(2, work)
    assert (first.fits, second.fits) == ({}, {"rows": 1})
    for found in (ours, theirs):
        assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


class Card:
    """What `token_budget` asks of a GPU: this many bytes are free."""

    def __init__(self, patch: Patch, free: int) -> None:
        gpu = "dpfp_ray.training.machine.torch.cuda"
        patch.setattr(f"{gpu}.mem_get_info", lambda device: (free, 2 * free))
        patch.setattr(f"{gpu}.memory_reserved", lambda device: 0)
        patch.setattr(f"{gpu}.memory_allocated", lambda device: 0)


def test_a_gpus_free_memory_is_a_budget_of_tokens(model_folder: str, monkeypatch: Patch) -> None:
    plan = plan_of("non_private")
    model = tiny_classifier(model_folder, plan)
    assert token_budget(model, plan) is None
    on_gpu: Any = model.to("meta")
    monkeypatch.setattr(type(on_gpu), "parameters", lambda self: iter(pretended(self)))
    budgets = []
    for free in (2**28, 2**29, 2**29 + 2**20):
        Card(monkeypatch, free)
        budgets.append(token_budget(on_gpu, plan))
    assert budgets[0] < budgets[1] == budgets[2]
    assert budgets[1] == pytest.approx(2 * budgets[0], rel=0.3)


def pretended(model: Classifier) -> list[Any]:
    class OnGpu:
        requires_grad = True
        device = torch.device("cuda", 0)

        def __init__(self, count: int) -> None:
            self.numel: Callable[[], int] = partial(int, count)

    return [OnGpu(p.numel()) for _, p in model.named_parameters()]


def test_the_tokens_of_a_part_that_does_not_fit_are_halved(
    model_folder: str, monkeypatch: Patch
) -> None:
    plan = plan_of("non_private")
    monkeypatch.setattr(step, "token_budget", lambda model, plan: 10**6)
    comm = small_memory(monkeypatch, "to")
    with pytest.warns(UserWarning, match="out of memory at step 1"):
        progress, found = run(model_folder, plan, comm)
    assert set(progress.fits) == {"tokens"}
    assert progress.fits["tokens"] < 100
    monkeypatch.undo()
    _, wanted = run(model_folder, plan)
    assert all(np.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


# Gradient checkpointing ---------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "non_private"},
        {"method": "dpfp", "accountant": "gdp"},
        {"method": "dpsgd", "accountant": "gdp"},
        {"method": "dpsgd", "accountant": "gdp", "clipping": "hooks"},
        {"method": "dpsgd", "accountant": "gdp", "scope": "lora"},
    ],
)
def test_layers_that_are_computed_again_leave_the_same_weights(
    zoo: Any, monkeypatch: Patch, architecture: str, changes: dict[str, Any]
) -> None:
    folder = str(zoo / architecture)
    kept, calls = {}, {}
    for again in (False, True):
        plan = tiny_plan(epochs=1, gradient_checkpointing=again, **changes)
        calls[again] = 0
        layer = type(
            next(m for m in tiny_classifier(folder, plan).encoder.modules() if is_layer(m))
        )
        forward = layer.forward

        def counted(
            self: Any, *given: Any, count: bool = again, f: Any = forward, **rest: Any
        ) -> Any:
            calls[count] += 1
            return f(self, *given, **rest)

        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", counted)
            _, kept[again] = run(folder, plan)
    assert [n for n in kept[False] if not torch.equal(kept[True][n], kept[False][n])] == []
    assert calls[True] >= calls[False] + 2 * 5  # two layers; of six steps one may be empty


def is_layer(module: Any) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def test_what_has_no_layers_to_compute_again_says_so() -> None:
    from dpfp_ray.models.representations import HeadClassifier

    with pytest.raises(UserError, match="has no layers that could be computed again"):
        HeadClassifier(4, 2, "mean", 1).recompute_layers()
