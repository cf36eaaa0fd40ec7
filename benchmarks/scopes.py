"""Speed of DP-SGD's scopes against each other: their steps alternate in one process.

    .venv/bin/python benchmarks/scopes.py --task sst2 --data-dir GLUE --output benchmarks/scopes.md

Each contestant takes the same rows in the same round, so what else the machine does meets all of
them. Ratios are taken round by round, of CPU time: on a busy machine that is what a step costs,
while wall time is what others left of it. What `top:K` computes once (the outputs of its frozen
layers) is made before the first round and told apart.
"""

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from dpfp_ray.data.batches import split_rows
from dpfp_ray.methods.parts.base import make_method
from dpfp_ray.models.activations import with_activations
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.sampling import ShuffleSampler
from dpfp_ray.training.loop import take
from dpfp_ray.training.prepare import build_model, prepare

CONTESTANTS = "dpsgd,dpsgd:bias,dpsgd:lora,dpsgd:top:2,non_private"


class Contestant:
    def __init__(self, name: str, values: dict[str, Any]) -> None:
        method, _, scope = name.partition(":")
        prepared = prepare(make_plan({**values, "method": method, "scope": scope or "all"}))
        plan = self.plan = prepared.plan
        model = build_model(prepared, 0, torch.device("cpu"))
        started = time.process_time()
        self.table = with_activations(prepared.data.train, model, plan)
        self.once = time.process_time() - started
        self.method = make_method(plan, model, prepared.noise_multiplier * plan.C, seed=0)
        self.optimizer = torch.optim.AdamW(self.method.parameters, lr=1e-6, fused=True)
        model.train()

    def step(self, number: int) -> tuple[float, float]:
        """CPU and wall seconds of an ordinary step of the loop."""
        rows = ShuffleSampler(self.plan.D, self.plan.B, seed=1).draw(number)
        cpu, wall = time.process_time(), time.perf_counter()
        self.method.begin(number, len(rows))
        self.optimizer.zero_grad(set_to_none=True)
        for part in split_rows(self.table.lengths[rows], self.method.max_rows):
            self.method.backward(take(self.table, rows, np.asarray(part), self.method.device))
        self.method.gradients()
        self.method.finish(number)
        self.optimizer.step()
        return time.process_time() - cpu, time.perf_counter() - wall


def table_of(names: list[str], values: dict[str, Any], rounds: int) -> list[str]:
    contestants = [Contestant(name, values) for name in names]
    seconds = [[c.step(number) for c in contestants] for number in range(rounds + 1)][1:]
    lines = [
        f"| contestant | rows per CPU second | rows/s | ratio to {names[0]} | once, CPU seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for place, (name, contestant) in enumerate(zip(names, contestants, strict=True)):
        cpu, wall = (median(found[place][kind] for found in seconds) for kind in (0, 1))
        ratios = np.array([found[0][0] / found[place][0] for found in seconds])
        low, high = np.quantile(ratios, [0.1, 0.9])
        rows = contestant.plan.B
        lines.append(
            f"| {name} | {rows / cpu:.0f} | {rows / wall:.0f} | {np.median(ratios):.2f} "
            f"({low:.2f} to {high:.2f}) | {contestant.once:.0f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--contestants", default=CONTESTANTS)
    parser.add_argument("--task", default="demo")
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    values = {"task": given.task, "data_dir": given.data_dir, "model": given.model}
    values |= {"max_train": given.records, "batch_size": given.batch_size, "epochs": 10}
    values = {name: value for name, value in values.items() if value is not None}
    lines = table_of(given.contestants.split(","), values, given.rounds)
    load = os.getloadavg()[0]
    facts = (
        f"{given.model}, {given.task}, B = {given.batch_size}, {given.rounds} rounds, "
        f"{given.threads} threads on {os.cpu_count()} cores with a load of {load:.0f}."
    )
    text = "\n".join(["# Speed of scopes", "", facts, "", *lines, ""])
    print(text)
    if given.output:
        given.output.write_text(text)


if __name__ == "__main__":
    main()
