"""Training on a pretend CUDA device (`tests/support/pretend_cuda.py`), in a process of its own."""

import os
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertModel

from dpfp_ray.data.batches import ROW, first_tokens
from dpfp_ray.methods import dpfp
from dpfp_ray.methods.parts import carriers, ghost, per_example
from dpfp_ray.methods.parts.base import Method
from dpfp_ray.methods.parts.ghost import GhostClipping
from dpfp_ray.methods.parts.per_example import HooksClipping, clip_factors
from dpfp_ray.models import classifier
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.privacy import device_noise, sampling
from dpfp_ray.privacy.device_noise import normal_numbers
from dpfp_ray.training import step
from dpfp_ray.training.loop import Event, Step
from dpfp_ray.training.prepare import build_model, with_precision
from dpfp_ray.training.record import Record
from tests.support.pretend_process import COMPILER, Call, pretend_process
from tests.support.tiny_runs import (
    Listener,
    run_with,
    tiny_classifier,
    tiny_data,
    tiny_plan,
    train_with,
)
from tests.training.test_measured_noise import (
    STEPS,
    degrees,
    empty_steps,
    needed,
    prepared_run,
)
from tests.training.test_person_runs import RUNS
from tests.training.test_person_runs import prepared_run as run_on_persons

SEED = 2**90 + 1
METHODS: dict[str, dict[str, Any]] = {
    "non_private": {"method": "non_private"},
    "dpfp": {"method": "dpfp"},
    "ghost": {"method": "dpsgd", "clipping": "ghost"},
    "hooks": {"method": "dpsgd", "clipping": "hooks"},
    "rgp": {"method": "rgp", "rank": 2},
}
SCOPES = ("all", "bias", "lora", "top:1", "head")
CASES = [
    pytest.param(name, scope, precision, marks=() if scope == "all" else pytest.mark.nightly)
    for name in METHODS
    for scope in (SCOPES if name != "rgp" else ("all", "head"))
    for precision in ("fp32", "bf16")
]
# How far apart the weights may end, against how far they moved. In bf16 CPUs round elsewhere.
APART = {"fp32": 1e-4, "bf16": 0.2}
# Of one step of a BERT of one layer, whose first steps are left out: they check more.
LAUNCHES = {"non_private": 160, "dpfp": 190, "ghost": 980, "hooks": 830, "rgp": 1350}
WAITS = {"non_private": 0, "dpfp": 2, "ghost": 2, "hooks": 3, "rgp": 1}


@pytest.fixture(scope="module")
def on_cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """`on_cuda(function, *args)` calls the function where torch has a pretend CUDA device."""
    if COMPILER is None:
        pytest.skip("no g++ here to compile the pretend device")
    with pretend_process(tmp_path_factory.mktemp("guard")) as call:
        yield call


class Counting(Listener):
    """Launches and waits of the device, step by step."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen, self.counts = seen, [(0, 0)]

    def hear(self, event: Event) -> None:
        if isinstance(event, Step):
            self.counts.append((self.seen.launches, sum(self.seen.waits.values())))


def trained(
    folder: str, settings: dict[str, Any], device: str, listener: Listener
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after six steps."""
    plan = tiny_plan(**{"epochs": 1, **settings})
    model = tiny_classifier(folder, plan).to(device)
    ends = [{n: p.detach().cpu().clone() for n, p in trainable_parameters(model)}]
    train_with(plan, 0.5 if plan.private else 0.0, model, tiny_data(folder), listener, seed=SEED)
    return ends[0], {n: p.detach().cpu() for n, p in trainable_parameters(model)}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A CPU's own noise and carriers are others."""
    with (
        patch.object(sampling, "add_noise", device_noise.add_noise),
        patch.object(carriers, "renew_each", carriers.renew_together),
    ):
        yield


def compare(folder: str, name: str, scope: str, precision: str) -> tuple[float, int, int]:
    """How far apart the weights of the two devices end; launches and waits of a usual step."""
    from tests.support.pretend_cuda import pretend_cuda

    torch.set_num_threads(1)
    settings = {**METHODS[name], "scope": scope, "precision": precision}
    with pretend_cuda() as seen:
        listener = Counting(seen)
        _, there = trained(folder, settings, "cuda", listener)
        steps = np.diff(listener.counts[3:6], axis=0)  # the last one evaluates
    with as_on_a_gpu():
        start, here = trained(folder, settings, "cpu", Listener())
    apart = sum(float((there[n] - here[n]).square().sum()) for n in here)
    moved = sum(float((start[n] - here[n]).square().sum()) for n in here)
    launches, waits = steps.max(0)
    return (apart / moved) ** 0.5, int(launches), int(waits)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scope", "precision"), CASES)
def test_weights_end_as_on_a_cpu(
    on_cuda: Call, model_folder: str, name: str, scope: str, precision: str
) -> None:
    assert_as_on_a_cpu(name, precision, on_cuda(compare, model_folder, name, scope, precision))


def assert_as_on_a_cpu(name: str, precision: str, found: tuple[float, int, int]) -> None:
    apart, launches, waits = found
    assert apart < APART[precision]
    assert launches <= LAUNCHES[name]
    assert waits <= WAITS[name]


def person_run(folder: str, name: str) -> float:
    """The same of a whole run on persons; methods of one release are among them."""
    from tests.support.pretend_cuda import pretend_cuda

    torch.set_num_threads(1)
    settings = {"precision": "fp32", **RUNS[name]}

    def end(device: str) -> tuple[Record, dict[str, Tensor]]:
        prepared = run_on_persons(folder, **settings)
        model = build_model(prepared, SEED, torch.device(device))
        record, _ = run_with(prepared, seed=SEED, model=model)
        return record, {n: p.detach().cpu() for n, p in trainable_parameters(model)}

    with pretend_cuda():
        record, there = end("cuda")
    with as_on_a_gpu():
        twin, here = end("cpu")
    assert record["environment"]["device"] == "cuda:0"
    assert record["metrics"]["accuracy"] == twin["metrics"]["accuracy"]
    apart = sum(float((there[n] - here[n]).square().sum()) for n in here)
    size = sum(float(p.square().sum()) for p in here.values())
    return (apart / (size or 1.0)) ** 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_runs_on_persons_end_as_on_a_cpu(on_cuda: Call, model_folder: str, name: str) -> None:
    assert on_cuda(person_run, model_folder, name) < 1e-4


# Bugs that only a GPU would show, each put where the code is right.


def labels_left_behind(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if tensor.ndim == 1 else tensor.to(device)


def one_buffer(tensor: Tensor, device: torch.device, kept: dict[Any, Tensor] = {}) -> Tensor:  # noqa: B006
    """Pinned once and written to again, while the device may still have to read it."""
    if device.type == "cpu":
        return tensor
    buffer = kept.setdefault((tensor.shape, tensor.dtype), tensor.pin_memory())
    return buffer.copy_(tensor).to(device, non_blocking=True)


def noise_elsewhere(key: bytes, block: int, count: int, _: torch.device) -> Tensor:
    return normal_numbers(key, block, count, torch.device("cpu"))


def no_noise(method: Method, *_: int) -> None:
    method.noised = method.device.type == "cuda"


def read_too_early(norms: Tensor, *args: Any) -> Tensor:
    return clip_factors(norms.to("cpu", non_blocking=True), *args).to(norms.device)


def asked_one_by_one(norms: Tensor, *args: Any) -> Tensor:
    return clip_factors(norms.clamp(max=max(norm.item() for norm in norms)), *args)


def through_numpy(h: Tensor, C: float) -> Tensor:
    norms = np.linalg.norm(h.detach().numpy(), axis=1, keepdims=True)
    return h * torch.from_numpy(np.minimum(1, C / norms))


def index_from_the_cpu(batch: dict[str, Tensor]) -> Tensor:
    return first_tokens(batch).cpu()


BUGS: dict[Any, tuple[str, Any, str]] = {
    labels_left_behind: ("ghost", step, "move"),
    one_buffer: ("dpfp", step, "move"),
    noise_elsewhere: ("ghost", device_noise, "normal_numbers"),
    no_noise: ("hooks", Method, "add_noise_share"),
    read_too_early: ("ghost", ghost, "clip_factors"),
    asked_one_by_one: ("hooks", per_example, "clip_factors"),
    through_numpy: ("dpfp", dpfp, "clip_rows"),
    index_from_the_cpu: ("non_private", classifier, "first_tokens"),
}


def compare_with(bug: Callable[..., Any], folder: str) -> None:
    name, place, attribute = BUGS[bug]
    with patch.object(place, attribute, bug):
        found = compare(folder, name, "all", "fp32")
    assert_as_on_a_cpu(name, "fp32", found)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_devices_is_seen(
    on_cuda: Call, model_folder: str, bug: Callable[..., Any]
) -> None:
    with pytest.raises((AssertionError, RuntimeError, TypeError)) as caught:
        on_cuda(compare_with, bug, model_folder)
    assert "INTERNAL" not in str(caught.value)


def noise_of_run(folder: str, name: str) -> tuple[float, float]:
    """The deviation of the noise in a run's empty steps, and what its budget needs."""
    from tests.support.pretend_cuda import pretend_cuda

    torch.set_num_threads(1)
    with chdir(folder), pretend_cuda():
        settings = {"batch_size": 1, "epsilon": 2.0, "epochs": 1, **STEPS[name]}
        prepared, _ = prepared_run("./model", **settings)
        model = build_model(prepared, SEED, torch.device("cuda"))
        with empty_steps(model) as found:
            run_with(prepared, seed=SEED, model=model)
    noise = [(name, value) for step in found for name, value in step.items()]
    assert len(found) >= 6
    assert all(value.device.type == "cuda" for _, value in noise)
    squares = sum(float(value.double().square().sum()) for _, value in noise)
    total = sum(degrees(prepared.plan, name, value.shape) for name, value in noise)
    return (squares / total) ** 0.5 * prepared.plan.B, needed(prepared)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ghost", "rgp"])
def test_noise_of_a_run_is_the_planned_one(on_cuda: Call, model_folder: str, name: str) -> None:
    measured, planned = on_cuda(noise_of_run, str(Path(model_folder).parent), name)
    assert measured == pytest.approx(planned, rel=0.05)


def filled(folder: str, name: str) -> tuple[float, int]:
    """The share of real tokens in what a GPU is given at B = 32; all places for tokens."""
    from tests.support.pretend_cuda import pretend_cuda

    real, places = 0, 0

    def count(inputs: dict[str, Tensor]) -> None:
        nonlocal real, places
        real += int((inputs[ROW] >= 0).sum())
        places += inputs[ROW].numel()

    plan = tiny_plan(records=200, batch_size=32, epochs=1, **METHODS[name])
    with pretend_cuda():
        model = tiny_classifier(folder, plan).to("cuda")
        plain = model._packed_vector
        with patch.object(model, "_packed_vector", lambda batch: [count(batch), plain(batch)][1]):
            train_with(plan, 0.5, model, tiny_data(folder, train_rows=200), seed=SEED)
    return real / places, places


@pytest.mark.slow
@pytest.mark.parametrize("name", ["non_private", "dpfp", "ghost"])
def test_little_is_padding(on_cuda: Call, model_folder: str, name: str) -> None:
    share, places = on_cuda(filled, model_folder, name)
    assert share > 0.95
    assert places > 1000


# bf16: products of halves, added up in fp32 --------------------------------------------------


def clipped_part(kind: str, precision: str) -> dict[str, Any]:
    """24 rows of 64 tokens through a BERT of 4 layers, 128 wide: what clipping found and cost."""
    from tests.support.pretend_cuda import pretend_cuda

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=300, num_attention_heads=4, **sizes, **without)
    model = Classifier(BertModel(config, add_pooling_layer=False), "mean", 2)
    ids = torch.randint(5, 300, (24, 64))
    with pretend_cuda() as seen:
        model.to("cuda")
        batch = {"input_ids": ids.cuda(), "attention_mask": torch.ones_like(ids).cuda()}
        clipping = {"ghost": GhostClipping, "hooks": HooksClipping}[kind](model)
        seen.flops.clear()
        seen.peak = seen.memory
        with torch.autocast("cuda", torch.bfloat16, precision == "bf16"):
            h = model.represent(batch).float()
        losses = functional.cross_entropy(model.head(h), ids[:, 0].cuda() % 2, reduction="none")
        with patch.object(module_of[kind], "clip_factors", wraps=clip_factors) as asked:
            clipping.add_clipped(losses, 0.1)
        clipping.remove()
        return {
            "norms": asked.call_args.args[0].cpu(),
            "gradients": {n: p.grad.cpu() for n, p in trainable_parameters(model)},
            "peak": seen.peak,
            "flops": dict(seen.flops),
        }


module_of = {"ghost": ghost, "hooks": per_example}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ghost", "hooks"])
def test_bf16_takes_products_of_halves(on_cuda: Call, kind: str) -> None:
    exact, found = (on_cuda(clipped_part, kind, precision) for precision in ("fp32", "bf16"))
    assert found["flops"][torch.float32] < 0.1 * sum(found["flops"].values())
    assert sum(found["flops"].values()) == pytest.approx(sum(exact["flops"].values()), rel=0.01)
    assert found["peak"] < exact["peak"] * (0.8 if kind == "ghost" else 1.0)
    torch.testing.assert_close(found["norms"], exact["norms"], rtol=0.01, atol=0)
    for name, gradient in exact["gradients"].items():
        if not name.endswith("key.bias"):  # zero, but for rounding
            apart = (found["gradients"][name] - gradient).norm() / gradient.norm()
            assert apart < 0.1, name


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_that_is_rounded_is_still_bounded(packed: bool) -> None:
    """Tokens that cancel but for a trace, so that what rounding adds is most of their sum."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(6, 5)
    a = torch.randn(8, 1, 6).expand(8, 32, 6).bfloat16()
    g = torch.randn(8, 32, 5).bfloat16()
    g[:, 16:] = -g[:, :16]
    g[:, 0] *= 1.05
    clipping = GhostClipping(layer)
    if packed:
        clipping.rows[layer] = torch.arange(8)[:, None].expand(8, 32)
    longest = {}
    for counted in (True, False):
        longest[counted] = 0.0
        for row in range(8):
            layer.zero_grad()
            clipping.uses = {layer: [(a, g.where(torch.arange(8)[:, None, None] == row, 0))]}
            if packed:
                clipping.rows[layer] = torch.arange(8)[:, None].expand(8, 32)
            with (
                patch.object(clipping, "run_hooks"),
                patch.object(ghost, "ROUNDING", ghost.ROUNDING * counted),
            ):
                clipping.add_clipped(torch.zeros(8), 0.01)
            norm = torch.cat([layer.weight.grad.flatten(), layer.bias.grad]).norm()
            longest[counted] = max(longest[counted], float(norm))
    assert longest[True] <= 0.01 < 0.99 * longest[False]


def whole_run(folder: str, settings: dict[str, Any]) -> Any:
    from tests.support.pretend_cuda import pretend_cuda

    torch.set_num_threads(1)
    with pretend_cuda() as seen:
        prepared, _ = prepared_run(folder, **{"batch_size": 8, "epsilon": 3.0, **settings})
        model = build_model(prepared, SEED)
        record, _ = run_with(prepared, seed=SEED, model=model)
        assert not torch.are_deterministic_algorithms_enabled()  # once more
        assert bool(seen.atomic) != prepared.plan.private
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    return record["plan"]["precision"], record["environment"]["device"], seen.flops[torch.bfloat16]


@pytest.mark.slow
def test_a_gpu_trains_an_encoder_in_bf16_by_default(on_cuda: Call, model_folder: str) -> None:
    device = "cuda:0"
    precision, found, halves = on_cuda(whole_run, model_folder, {"method": "dpsgd"})
    assert (precision, found, halves > 1e6) == ("bf16", device, True)
    exact = {"method": "dpsgd", "precision": "fp32"}
    assert on_cuda(whole_run, model_folder, exact) == ("fp32", device, 0)
    head = {"method": "dpsgd", "scope": "head"}
    assert on_cuda(whole_run, model_folder, head) == ("fp32", device, 0)


@pytest.mark.slow
def test_a_private_run_adds_up_in_a_fixed_order(on_cuda: Call, model_folder: str) -> None:
    """`whole_run` asserts it; that kernels of other runs need not is what shows that it looks."""
    for settings in ({"method": "non_private", "epsilon": None, "delta": None}, {"method": "rgp"}):
        on_cuda(whole_run, model_folder, settings)


def test_a_cpu_trains_in_fp32_by_default() -> None:
    plan = tiny_plan("dpsgd")
    assert plan.precision == "auto"
    assert with_precision(plan).precision == "fp32"
    assert with_precision(plan).hash == plan.hash
    assert with_precision(tiny_plan("dpsgd", precision="bf16")).hash != plan.hash
