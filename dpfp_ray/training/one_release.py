"""The loop's counterpart for methods of one release: release, solve, evaluate."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpfp_ray.methods.parts.discriminant import (
    ClassStatistics,
    LinearHead,
    choose_ridge,
    discriminant,
)
from dpfp_ray.methods.parts.one_release import bounded_rows, release_id
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.privacy.spending import Spending
from dpfp_ray.training.evaluate import evaluate
from dpfp_ray.training.loop import KEYING, Data, Progress, Reporter, State
from dpfp_ray.training.machine import Comm


def fit(
    plan: Plan,
    noise_multiplier: float,
    model: Classifier,
    data: Data,
    *,
    seed: int,
    comm: Comm,
    reporter: Reporter,
    on_release: Callable[[Any], None] | None = None,
    before_draws: Callable[[], None] = lambda: None,
) -> Progress:
    """Release, solve, evaluate: what the training loop is to the other methods.

    Every worker makes the same release from the same seed; only evaluation is shared out.
    `on_release` is told the release from which the head is made: what an auditor may look at.
    `before_draws` is called before the release is made.
    """
    started = time.perf_counter()
    table = data.train
    assert isinstance(table, RepresentationTable), "these methods read cached representations"
    method = plan.spec.one_release
    assert method is not None, "methods that train in steps have a loop"
    before_draws()
    known = method.release(plan, noise_multiplier, table, model.classes, seed)
    if on_release is not None:
        on_release(known)
    ridge: float | None = None
    if method.head:
        head = method.head(known)
    else:
        name = release_id(plan, noise_multiplier, table, seed)
        head, ridge = solve(plan, known, data, keyed_generator(seed, f"ridge {name}", 0))
    put_head(model, head, plan.C)
    progress = Progress(
        step=1,
        rows=len(table),
        noise_coordinates=method.coordinates(model.width, model.classes),
        train_seconds=time.perf_counter() - started,
    )

    started = time.perf_counter()
    scores = {name: evaluate(model, dev, comm, plan.precision) for name, dev in data.dev.items()}
    progress.eval_seconds = time.perf_counter() - started
    record = {
        "epoch": 1,
        "step": 1,
        "train_loss": None,  # a loss on private rows would be a second, unpaid look at them
        "dev": scores,
        "epsilon": Spending(plan, noise_multiplier).spent(1),
        "train_seconds": progress.train_seconds,
    }
    if plan.ridge == "auto":
        record["ridge"] = ridge
    progress.history.append(record)

    def checkpoint() -> State:
        return {
            "plan_hash": plan.hash,
            "noise_multiplier": noise_multiplier,
            "epsilon": record["epsilon"],
            "keying": KEYING,
            "progress": vars(progress).copy(),
            "model": {name: p.detach() for name, p in model.head.named_parameters("head")},
        }

    reporter.epoch(record, checkpoint)
    reporter.step(1, lambda: None, checkpoint)
    return progress


def solve(
    plan: Plan, known: ClassStatistics, data: Data, rng: np.random.Generator
) -> tuple[LinearHead, float]:
    """The head that class statistics give, by the plan's shrinkage and prior, and its ridge.

    `rng` is for choosing one (`ridge: auto`); it has nothing to do with the records.
    """
    assert plan.shrinkage is not None
    public = public_covariance(data, plan) if plan.prior == "dev" else None
    if isinstance(plan.ridge, float):
        ridge = plan.ridge
    else:
        ridge = choose_ridge(known, plan.shrinkage, rng, public)
    return discriminant(known, ridge, plan.shrinkage, public), ridge


def public_covariance(data: Data, plan: Plan) -> NDArray[np.float64]:
    """Of the dev rows, without their labels; asked for by plans that count these rows as public."""
    tables = [table for table in data.dev.values() if isinstance(table, RepresentationTable)]
    rows = np.concatenate([u for table in tables for u, _ in bounded_rows(table, plan)])
    centred = rows - rows.mean(0)
    covariance: NDArray[np.float64] = centred.T @ centred / len(rows)
    return covariance


@torch.no_grad()
def put_head(model: Classifier, head: LinearHead, C: float) -> None:
    """The head for u = h/C as one for h bounded by C, which is what the model feeds it."""
    model.head.weight.copy_(torch.from_numpy(head.weight / C))
    model.head.bias.copy_(torch.from_numpy(head.bias))
