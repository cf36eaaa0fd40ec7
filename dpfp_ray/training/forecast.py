"""How long runs will take, how much memory and disk they need: from a few measured steps.

The steps are real ones, of the plan's own method on this machine, but on dev rows, which are
public, repeated as often as needed; no private record is drawn and nothing is released. The time
of a step is taken to be a + b·B: two batch sizes are measured for each kind of run, and remembered.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpfp_ray.data import Table, Task
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.models.classifier import trainable_parameters
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.cache import cached_number, version
from dpfp_ray.training.loop import Step, evaluate, make_release, train_steps
from dpfp_ray.training.machine import SoloComm, peak_memory, use_threads
from dpfp_ray.training.prepare import (
    Data,
    Inputs,
    Prepared,
    Run,
    build_model,
    default_device,
    load_inputs,
)

ROWS = 256  # dev rows that are tokenised, encoded and evaluated
SECONDS = 1.0  # of measured steps for each batch size, at least
MOST_STEPS = 6
BATCHES = (16, 128)  # the two sizes; heads take larger ones too
HEAD_BATCHES = (32, 512)
RELEASED_ROWS = 4096
STATE_BYTES = 12  # a weight in a saved state: itself and the optimizer's two numbers
# Plan fields that decide how long a step takes, besides B.
KIND = (
    *("method", "mode", "scope", "model", "max_length", "precision", "representation"),
    *("clipping", "clip_style", "lora_rank", "rank", "max_physical_batch", "user_column"),
    "gradient_checkpointing",
)


@dataclass(frozen=True)
class Rates:
    """Seconds of parts of a run on this machine, and bytes."""

    step: float  # of a step besides its rows
    row: float  # of one more row in a step
    dev_row: float
    encode_row: float  # of the one pass of a frozen encoder; 0 for runs that train it
    memory: float  # of the whole process
    state: float  # of what a run saves to go on from

    def seconds(self, plan: Plan, dev_rows: int) -> float:
        """Of a run of this bound plan, its encoding apart."""
        if plan.one_release:
            return self.step + self.row * plan.D + self.dev_row * dev_rows
        training = plan.steps * (self.step + self.row * plan.B)
        return training + len(plan.epoch_ends()) * self.dev_row * dev_rows

    def encoding(self, records: int, dev_rows: int) -> float:
        return self.encode_row * (records + dev_rows)


def rates(plan: Plan, task: Task, threads: int) -> Rates:
    """Measured once for each kind of run on this machine, then remembered."""
    facts = [getattr(plan, name, None) for name in KIND]
    machine = (platform.machine(), platform.processor(), threads, str(default_device()))
    text = task.train.texts
    letters = int(np.mean([len(text[i]) for i in range(0, len(text), 1 + len(text) // 500)]))
    key = f"rates 4 {machine} torch {version('torch')} {facts} {letters // 20}"
    measured: list[Rates] = []

    def part(name: str) -> Callable[[], float]:
        def number() -> float:
            if not measured:
                measured.append(measure(plan, task, threads))
            return float(getattr(measured[0], name))

        return number

    names = ("step", "row", "dev_row", "encode_row", "memory", "state")
    return Rates(**{name: cached_number(f"{key} {name}", part(name)) for name in names})


def measure(plan: Plan, task: Task, threads: int) -> Rates:
    use_threads(threads)
    dev = next(iter(task.dev.values()))
    rows = dev.take(np.resize(np.arange(len(dev)), ROWS))
    # A mark at the end of each, so that no cache has encoded these rows before.
    mark = f" {time.time_ns() % 46_656:x}" if plan.scope == "head" else ""
    split = replace(rows, users=None, texts=[text + mark for text in rows.texts])
    small = Task(f"{task.name} forecast", task.label_names, split, {"dev": split})
    plain = replace(plan, user_column=None, max_train=None, max_dev=None)
    inputs = load_inputs(plain, small)
    frozen = isinstance(inputs.data.train, RepresentationTable)
    encode = inputs.seconds / ROWS if frozen else 0.0  # train and dev are the same rows
    if plan.one_release:
        release_time(plain, inputs, ROWS)  # the first one imports and allocates
        times = [release_time(plain, inputs, rows) for rows in (ROWS, RELEASED_ROWS)]
        sizes: tuple[int, int] = (ROWS, RELEASED_ROWS)
    else:
        sizes = HEAD_BATCHES if frozen else BATCHES
        times = [step_time(plain, inputs, B) for B in sizes]
    row = max(0.0, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    model = build_model(prepared(plain, inputs, 1, inputs.data.train), 0)
    evaluate(model, inputs.data.train, SoloComm(), plan.precision)  # the first one imports
    clock = clock_of(threads)
    started = clock()
    evaluate(model, inputs.data.train, SoloComm(), plan.precision)
    dev_row = (clock() - started) / ROWS
    weights = sum(p.numel() for _, p in trainable_parameters(model))
    memory = peak_memory(default_device())
    return Rates(
        max(0.0, times[0] - row * sizes[0]), row, dev_row, encode, memory, weights * STATE_BYTES
    )


def clock_of(threads: int) -> Callable[[], float]:
    """Of one thread on a CPU the processor's time: other programs do not count, as they may have
    ended when the sweep runs."""
    alone = threads == 1 and default_device().type == "cpu"
    return time.process_time if alone else time.perf_counter


def prepared(plan: Plan, inputs: Inputs, B: int, table: Table) -> Prepared:
    """The plan at this batch size, on this table; its noise is of no matter for time."""
    sized = plan
    if not plan.one_release:
        M = max(1, min(plan.micro_batches or 1, B))
        sized = replace(plan, batch_size=B, micro_batches=M, epochs=1.0)
    bound = sized.bind(
        records=len(table), representation=inputs.representation, classes=len(inputs.label_names)
    )
    shared = replace(inputs, data=Data(table, inputs.data.dev))
    return Prepared(bound, shared, 1.0)


def step_time(plan: Plan, inputs: Inputs, B: int) -> float:
    """The median time of a few steps, the first one apart."""
    table = repeated(inputs.data.train, 2 * MOST_STEPS * B)
    run = Run(prepared(plan, inputs, B, table), seed=0)
    model = build_model(run.prepared, 0)
    times: list[float] = []
    clock = clock_of(torch.get_num_threads())
    last = clock()
    for event in train_steps(run, model, run.prepared.data, SoloComm()):
        now = clock()
        if isinstance(event, Step):
            times.append(now - last)
            if len(times) > MOST_STEPS or (len(times) > 2 and sum(times[1:]) > SECONDS):
                break
        last = clock()
    return float(np.median(times[1:] or times))


def release_time(plan: Plan, inputs: Inputs, rows: int) -> float:
    run = Run(prepared(plan, inputs, rows, repeated(inputs.data.train, rows)), seed=0)
    model = build_model(run.prepared, 0)
    clock = clock_of(torch.get_num_threads())
    started = clock()
    for _ in make_release(run, model, replace(run.prepared.data, dev={}), SoloComm()):
        pass
    return clock() - started


def repeated(table: Table, count: int) -> Table:
    rows = np.resize(np.arange(len(table)), count)
    if isinstance(table, TokenTable):
        return table.take(rows)
    assert isinstance(table, RepresentationTable)
    h: Any = np.asarray(table.h)[rows]
    return replace(table, h=h, labels=np.asarray(table.labels)[rows])
