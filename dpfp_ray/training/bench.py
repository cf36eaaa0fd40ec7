"""How fast and how large a step is on this machine, in the sizes that people train: one table.

Random weights and made-up rows of one length, so there is nothing to download and no padding; the
steps are those of the loop, noise and optimizer included. What this machine cannot measure stays in
the table, and says so.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.methods.parts.base import make_method
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.sampling import ShuffleSampler
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.training.machine import SoloComm, free_memory, peak_memory, reset_peak_memory
from dpfp_ray.training.step import Steps, make_optimizer

# Width, layers, heads: MiniLM-L12, and BERT's and RoBERTa's two.
SIZES = {"mini": (384, 12, 12), "base": (768, 12, 12), "large": (1024, 24, 16)}
METHODS = ("non_private", "dpfp", "dpsgd")
PRECISIONS = ("fp32", "bf16")
BATCHES = (32, 1024)
WARM = 2  # steps that allocate, and are not counted
WORDS = 30_522


@dataclass(frozen=True)
class Speed:
    """A cell of the table. None: nobody has measured it, for the reason in `note`."""

    model: str
    method: str
    precision: str
    batch_size: int
    length: int
    seconds_per_step: float | None = None
    examples_per_second: float | None = None
    of_non_private: float | None = None
    peak_memory_bytes: int | None = None
    note: str = ""


def bench(
    *,
    device: str = "",
    models: Sequence[str] = tuple(SIZES),
    methods: Sequence[str] = METHODS,
    precisions: Sequence[str] = PRECISIONS,
    batches: Sequence[int] = BATCHES,
    length: int = 128,
    seconds: float = 5.0,
) -> Iterator[Speed]:
    """Measure steps, one cell after the other.

    device     cuda or cpu (default: a GPU where torch sees one); without a GPU the cells of cuda
               are there and say that nobody has measured them
    models     of mini, base, large
    length     tokens of each made-up row
    seconds    of measured steps for each cell, at least; two steps at least
    """
    for kind, given, valid in (
        ("model", models, tuple(SIZES)),
        ("method", methods, METHODS),
        ("precision", precisions, PRECISIONS),
        ("device", [device] if device else [], ("cuda", "cpu")),
    ):
        for name in given:
            if name not in valid:
                raise UserError(unknown(kind, name, valid))
    seen = torch.cuda.is_available()
    place = torch.device(device or ("cuda" if seen else "cpu"))
    plain: dict[tuple[str, str, int], float] = {}
    for model, precision, rows, method in product(models, precisions, batches, methods):
        cell: dict[str, Any] = {
            "model": model,
            "method": method,
            "precision": precision,
            "batch_size": rows,
            "length": length,
        }
        if place.type == "cuda" and not seen:
            yield Speed(**cell, note="not measured: torch sees no GPU")
            continue
        try:
            step, peak = measured(**cell, device=place, seconds=seconds)
        except (UserError, torch.OutOfMemoryError) as error:
            free_memory(place)
            yield Speed(**cell, note=f"not measured: {str(error).splitlines()[0]}")
            continue
        if method == "non_private":
            plain[model, precision, rows] = step
        usual = plain.get((model, precision, rows))
        share = None if usual is None else usual / step
        yield Speed(**cell, seconds_per_step=step, examples_per_second=rows / step,
                    of_non_private=share, peak_memory_bytes=peak)  # fmt: skip


def measured(
    model: str,
    method: str,
    precision: str,
    batch_size: int,
    length: int,
    device: torch.device,
    seconds: float,
) -> tuple[float, int]:
    """Median seconds of a step, and the peak of memory in bytes."""
    reset_peak_memory(device)
    values = {"method": method, "precision": precision, "batch_size": batch_size, "epochs": 1}
    private = {} if method == "non_private" else {"accountant": "gdp", "epsilon": 3.0}
    plan = make_plan({**values, **private, "max_length": length, "representation": "mean"})
    plan = plan.bind(records=4 * batch_size, classes=2)
    classifier = random_encoder(model, length).to(device).train()
    made = make_method(plan, classifier, 1.0, seed=0)
    sampler = ShuffleSampler(plan.D, batch_size, seed=1)
    optimizer = make_optimizer(plan, made)
    table = made_up_rows(plan.D, length)
    steps = Steps(plan, made, optimizer, table, sampler, SoloComm(), seed=0)
    times: list[float] = []
    while len(times) < WARM + 2 or sum(times[WARM:]) < seconds:
        started = time.perf_counter()
        steps.take(len(times) % plan.steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return float(np.median(times[WARM:])), peak_memory(device)


def random_encoder(size: str, length: int) -> Classifier:
    from transformers import BertConfig, BertModel

    width, layers, heads = SIZES[size]
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max(512, length),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(BertModel(config, add_pooling_layer=False), "mean", 2)


def made_up_rows(count: int, length: int) -> TokenTable:
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, WORDS, count * length)
    columns = {"input_ids": ids.astype(np.int32)}
    offsets = np.arange(count + 1) * length
    return TokenTable(columns, offsets, np.arange(count) % 2, pad_token_id=0)
