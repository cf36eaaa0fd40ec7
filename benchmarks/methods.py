"""Speed and memory of every method, measured in one run: the paper's Table "cmp" as numbers.

    .venv/bin/python benchmarks/methods.py --batch-sizes 32,128 --output benchmarks/methods.md

Each cell is a process of its own (so that peak memory is its own), runs the ordinary steps of the
loop on the same demo rows, and is compared with non-private training of the same model and batch
in the same run. Plain Opacus, driven as its documentation shows, stands beside our DP-SGD.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

CELLS = ("non_private", "dpfp", "dpsgd ghost", "dpsgd hooks", "rgp", "opacus ghost", "opacus hooks")


def measure(model_name: str, cell: str, batch_size: int, steps: int) -> dict[str, float]:
    """Median seconds of a step, and the process's peak memory, for one cell."""
    import torch

    from dpfp_ray.plan.values import make_plan
    from dpfp_ray.training import machine
    from dpfp_ray.training.prepare import build_model, prepare

    torch.set_num_threads(2)
    name, _, clipping = cell.partition(" ")
    method = "dpsgd" if name == "opacus" else name
    values: dict[str, Any] = {
        "task": "demo",
        "model": model_name,
        "method": method,
        "max_train": 4000,
    }
    values |= {"batch_size": batch_size, "epochs": 3}
    if clipping:
        values["clipping"] = clipping
    prepared = prepare(make_plan(values))
    device = torch.device("cpu")
    model = build_model(prepared, 0, device)
    machine.reset_peak_memory(device)
    step = plain_opacus(prepared, model, clipping) if name == "opacus" else ours(prepared, model)
    seconds = []
    for number in range(steps + 1):
        started = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - started)
    return {"seconds": median(seconds[1:]), "memory": machine.peak_memory(device)}


def rows_of(prepared: Any, number: int) -> Any:
    """The same fixed-size batch of demo rows for every method."""
    from dpfp_ray.privacy.sampling import ShuffleSampler

    return ShuffleSampler(prepared.plan.D, prepared.plan.B, seed=1).draw(number)


def ours(prepared: Any, model: Any) -> Any:
    import numpy as np
    import torch

    from dpfp_ray.data.batches import split_rows
    from dpfp_ray.methods.parts.base import make_method
    from dpfp_ray.training.loop import take

    plan, table, device = prepared.plan, prepared.data.train, torch.device("cpu")
    method = make_method(plan, model, prepared.noise_multiplier * plan.C, seed=0)
    optimizer = torch.optim.AdamW(method.parameters, lr=1e-6, fused=True)
    model.train()

    def step(number: int) -> None:
        records = rows_of(prepared, number)
        method.begin(number, len(records))
        optimizer.zero_grad(set_to_none=True)
        for part in split_rows(table.lengths[records], method.max_rows):
            method.backward(take(table, records, np.asarray(part), device))
        method.gradients()
        method.finish(number)
        optimizer.step()

    return step


def plain_opacus(prepared: Any, model: Any, clipping: str) -> Any:
    """Opacus by its own optimizer classes, one padded batch a step, as its tutorials do it."""
    import torch
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    plan, table = prepared.plan, prepared.data.train
    ghost = clipping == "ghost"
    base = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True
    )
    options: dict[str, Any] = {
        "noise_multiplier": prepared.noise_multiplier,
        "max_grad_norm": plan.C,
        "expected_batch_size": plan.B,
    }
    criterion = torch.nn.CrossEntropyLoss(reduction="mean")
    if ghost:
        wrapped: Any = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=plan.C, use_ghost_clipping=True
        )
        optimizer: Any = DPOptimizerFastGradientClipping(base, **options)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion, "mean")
    else:
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(base, **options)
    wrapped.train()
    # Per-example gradients of the whole model: 2 GiB at a time, as our own hooks allow themselves.
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    most = plan.B if ghost else max(1, 2 * 2**30 // (4 * size))

    def step(number: int) -> None:
        records = rows_of(prepared, number)
        parts = [records[start : start + most] for start in range(0, len(records), most)]
        optimizer.zero_grad()
        for index, part in enumerate(parts):
            batch = table.collate(part)
            labels = torch.from_numpy(table.labels[part])
            optimizer.signal_skip_step(index < len(parts) - 1)
            criterion(wrapped(batch), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="minilm")
    parser.add_argument("--batch-sizes", default="32,128")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", default=None)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "CELL", "B"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        model, cell, batch = arguments.one
        print(json.dumps(measure(model, cell, int(batch), arguments.steps)))
        return
    lines = [
        f"`python benchmarks/methods.py --models {arguments.models} "
        f"--batch-sizes {arguments.batch_sizes} --steps {arguments.steps}`, 2 CPU cores, demo task",
        "",
        "| model | B | method | examples/s | relative speed | peak memory, MiB | relative memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in arguments.models.split(","):
        for batch in arguments.batch_sizes.split(","):
            base: dict[str, float] = {}
            for cell in arguments.cells.split(","):
                command = [sys.executable, __file__, "--steps", str(arguments.steps)]
                done = subprocess.run(
                    [*command, "--one", model, cell, batch], capture_output=True, text=True
                )
                if done.returncode:
                    reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
                    lines.append(f"| {model} | {batch} | {cell} | failed: {reason} | | | |")
                else:
                    found = json.loads(done.stdout.splitlines()[-1])
                    base = base or found
                    speed = f"{int(batch) / found['seconds']:.1f} | "
                    speed += f"{base['seconds'] / found['seconds']:.2f}"
                    space = f"{found['memory'] / 2**20:,.0f} | "
                    space += f"{found['memory'] / base['memory']:.2f}"
                    lines.append(f"| {model} | {batch} | {cell} | {speed} | {space} |")
                print(lines[-1], flush=True)
    if arguments.output:
        Path(arguments.output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
