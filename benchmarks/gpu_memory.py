"""The memory that a part of a step takes at full size, without a GPU: tensors without numbers.

    python benchmarks/gpu_memory.py                            # the table of docs/gpu.md
    python benchmarks/gpu_memory.py large dpsgd bf16 256 128   # one cell: rows, tokens a row

Every tensor of a second step (Adam has its two numbers then) is counted from its making to its
end, as torch's fake tensors go through forward pass, backward pass and clipping: nothing is
computed. Not counted: what kernels use for themselves, what the allocator cannot use, and CUDA's
own half GiB. The fake tensors say that they are on a GPU, the tests' pretended one.
"""

import itertools
import sys
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.pretend_process import build_guard, load_guard

load_guard(build_guard(Path(tempfile.mkdtemp())))

# ruff: noqa: E402 - torch must not be imported before the guard is there

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import RobertaConfig, RobertaModel, masking_utils

from dpfp_ray.methods.parts import ghost
from dpfp_ray.methods.parts.base import Rows, make_method
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.plan.plan import Plan
from dpfp_ray.training.machine import bytes_of_token
from dpfp_ray.training.step import make_optimizer
from tests.support import pretend_cuda

GIB = 2**30
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
SIZES: dict[str, dict[str, Any]] = {"base": {}, "large": LARGE}
METHODS = ("non_private", "dpfp", "dpsgd")
PARTS = ((32, 128), (64, 128), (256, 128))


class Tracker(TorchDispatchMode):
    """Bytes of all living storages, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, Any] = {}
        self.now = self.peak = 0

    def note(self, value: Any) -> None:
        if not isinstance(value, FakeTensor):
            return
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.living:
            return

        def ended(_: Any) -> None:
            if self.living.pop(key, None) is not None:
                self.now -= size

        self.living[key] = weakref.ref(storage, ended)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for value in tree_leaves(given):
            self.note(value)
        return given


def roberta(sizes: dict[str, Any]) -> RobertaModel:
    config = RobertaConfig(
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )
    config._attn_implementation = "sdpa"
    return RobertaModel(config, add_pooling_layer=False)


def peak(
    size: str, method: str, precision: str, rows: int, length: int, again: bool = False
) -> tuple[int, float]:
    """Bytes at the peak, and what `token_budget` takes a token's share of them to be."""
    budget: dict[str, Any] = {} if method == "non_private" else {"accountant": "gdp"}
    plan = Plan(
        method=method,
        precision=precision,
        records=67_349,
        representation="cls",
        gradient_checkpointing=again,
        **budget,
    )
    model = Classifier(roberta(SMALL), "cls", 2)  # probed with numbers, and then replaced
    with torch.device("meta"):
        model.encoder = roberta(SIZES[size])
        model.width = model.encoder.config.hidden_size
        model.head = torch.nn.Linear(model.width, 2)
    # Both ask the model for numbers; RoBERTa's rows are told apart (tests/methods).
    with patched(), FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker:
        model = model.to_empty(device="cuda").train()
        for weight in model.parameters():
            tracker.note(weight)
        if again:
            model.recompute_layers()
        made = make_method(plan, model, 1.0, seed=1)
        optimizer = make_optimizer(plan, made)
        batch = {
            "input_ids": torch.ones(rows, length, dtype=torch.long, device="cuda"),
            "attention_mask": torch.ones(rows, length, dtype=torch.long, device="cuda"),
        }
        part = Rows(np.arange(rows), batch, torch.zeros(rows, dtype=torch.long, device="cuda"))
        for step in range(2):
            tracker.peak = tracker.now
            optimizer.zero_grad(set_to_none=True)
            made.begin(step, rows)
            if method == "dpfp":
                made.noise = torch.zeros(rows, model.width, device="cuda")  # type: ignore[attr-defined]
            made.backward(part)
            if step == 0:
                made.gradients()
                optimizer.step()
        return tracker.peak, bytes_of_token(model, plan)


class patched:
    """What asks for the value of a number gets True: all rows are finite."""

    def __enter__(self) -> None:
        self.kept = ghost.freeze_unsplittable, ghost.splits_packed
        ghost.freeze_unsplittable = lambda model: None
        ghost.splits_packed = lambda model: False
        FakeTensor.__bool__ = lambda self: True  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        ghost.freeze_unsplittable, ghost.splits_packed = self.kept
        del FakeTensor.__bool__


def main() -> None:
    warnings.simplefilter("ignore")
    pretend_cuda.install()
    # It asks whether a mask is full, for which it would need its numbers.
    masking_utils._ignore_bidirectional_mask_sdpa = lambda *_, **__: False
    if len(sys.argv) > 1:
        size, method, precision, rows, length = sys.argv[1:6]
        again = "--gradient-checkpointing" in sys.argv
        found, token = peak(size, method, precision, int(rows), int(length), again)
        budget = token * int(rows) * int(length)
        print(f"{found / GIB:.1f} GiB at the peak, {budget / GIB:.1f} GiB by the tokens' budget")
        return
    heads = [f"{rows} × {length}" for rows, length in PARTS]
    print(f"| model | method | precision | {' | '.join(heads)} | 256 × 128, layers again |")
    print("| --- " * (4 + len(heads)) + "|")
    for size, method, precision in itertools.product(SIZES, METHODS, ("fp32", "bf16")):
        cells = [peak(size, method, precision, *part)[0] for part in PARTS]
        cells.append(peak(size, method, precision, 256, 128, again=True)[0])
        shown = " | ".join(f"{cell / GIB:.1f}" for cell in cells)
        print(f"| {size} | {method} | {precision} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
