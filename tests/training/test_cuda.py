"""Training on a pretend CUDA device (`tests/support/pretend_cuda.py`), in a process of its own."""

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfp_ray.models.classifier import trainable_parameters
from dpfp_ray.privacy import device_noise, sampling
from dpfp_ray.training.loop import Event, Step
from dpfp_ray.training.prepare import build_model
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
LAUNCHES = dict.fromkeys(METHODS, 1000)
WAITS = dict.fromkeys(METHODS, 40)


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


def compare(folder: str, name: str, scope: str, precision: str) -> tuple[float, int, int]:
    """How far apart the weights of the two devices end; launches and waits of a usual step."""
    from tests.support.pretend_cuda import pretend_cuda

    torch.set_num_threads(1)
    settings = {**METHODS[name], "scope": scope, "precision": precision}
    with pretend_cuda() as seen:
        listener = Counting(seen)
        _, there = trained(folder, settings, "cuda", listener)
        steps = np.diff(listener.counts[4:], axis=0)  # without the last, which evaluates
    with patch.object(sampling, "add_noise", device_noise.add_noise):  # a CPU's own is another one
        start, here = trained(folder, settings, "cpu", Listener())
    apart = sum(float((there[n] - here[n]).square().sum()) for n in here)
    moved = sum(float((start[n] - here[n]).square().sum()) for n in here)
    launches, waits = np.median(steps, axis=0)
    return (apart / moved) ** 0.5, int(launches), int(waits)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scope", "precision"), CASES)
def test_weights_end_as_on_a_cpu(
    on_cuda: Call, model_folder: str, name: str, scope: str, precision: str
) -> None:
    apart, launches, waits = on_cuda(compare, model_folder, name, scope, precision)
    print(apart, launches, waits)
    assert apart < APART[precision]
    assert launches <= LAUNCHES[name]
    assert waits <= WAITS[name]


def noise_of_run(folder: str, name: str) -> tuple[float, float]:
    """The deviation of the noise in a run's empty steps, and what its budget needs."""
    from tests.support.pretend_cuda import pretend_cuda

    torch.set_num_threads(1)
    with chdir(folder), pretend_cuda():
        settings = {"batch_size": 1, "epsilon": 2.0, "epochs": 2, **STEPS[name]}
        prepared, _ = prepared_run("./model", **settings)
        model = build_model(prepared, SEED, torch.device("cuda"))
        with empty_steps(model) as found:
            run_with(prepared, seed=SEED, model=model)
    noise = [(name, value) for step in found for name, value in step.items()]
    assert len(found) >= 10
    assert all(value.device.type == "cuda" for _, value in noise)
    squares = sum(float(value.double().square().sum()) for _, value in noise)
    total = sum(degrees(prepared.plan, name, value.shape) for name, value in noise)
    return (squares / total) ** 0.5 * prepared.plan.B, needed(prepared)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ghost", "rgp"])
def test_noise_of_a_run_is_the_planned_one(on_cuda: Call, model_folder: str, name: str) -> None:
    measured, planned = on_cuda(noise_of_run, str(Path(model_folder).parent), name)
    assert measured == pytest.approx(planned, rel=0.05)
