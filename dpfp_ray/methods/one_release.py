"""Modes that use the private records once: a release, and a head that is computed from it alone.

    release (private rows → noisy statistics)  →  discriminant (noisy statistics → head)

Only the left side sees private data, and it is a Gaussian mechanism whose cost `docs/privacy.md`
proves. The right side is post-processing: other ridges and other trials on a release cost nothing.

A release is named by `release_id`. Its noise is a pure function of the secret seed and of *all*
that the release depends on, the records included. So the same release made again is the same
numbers and costs nothing more; and two releases that differ in anything (C, σ, a record) have
independent noise, so that their costs compose. With noise keyed by the seed alone, the difference
of two releases would be free of noise.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpfp_ray.comm import Comm
from dpfp_ray.evaluate import evaluate
from dpfp_ray.methods.discriminant import ClassStatistics, LinearHead, discriminant
from dpfp_ray.model import Classifier, bound_rows
from dpfp_ray.plan import Plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.representations import RepresentationTable
from dpfp_ray.train import Data, Progress, Reporter, State

CHUNK = 8192  # rows in memory at once; part of what a seed means for `release_once`
KEPT = 4  # releases kept in memory, for the trials that follow

Rows = Iterator[tuple[NDArray[np.floating[Any]], NDArray[np.int64]]]


def fit(
    plan: Plan,
    noise_multiplier: float,
    model: Classifier,
    data: Data,
    *,
    seed: int,
    comm: Comm,
    reporter: Reporter,
) -> Progress:
    """Release, solve, evaluate: what the training loop is to the other methods.

    Every worker makes the same release from the same seed; only evaluation is shared out.
    """
    started = time.perf_counter()
    table = data.train
    assert isinstance(table, RepresentationTable), "these modes train on cached representations"
    mode = import_module(f"dpfp_ray.methods.{plan.mode}")
    known: ClassStatistics = mode.release(plan, noise_multiplier, table, model.classes, seed)
    assert plan.ridge is not None
    assert plan.shrinkage is not None
    public = public_covariance(data, plan) if plan.prior == "dev" else None
    put_head(model, discriminant(known, plan.ridge, plan.shrinkage, public), plan.C)
    progress = Progress(
        step=1,
        rows=len(table),
        noise_coordinates=noise_coordinates(plan, model),
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
        "epsilon": Ledger(plan, noise_multiplier).spent(1),
        "train_seconds": progress.train_seconds,
    }
    progress.history.append(record)

    def checkpoint() -> State:
        return {
            "plan_hash": plan.hash,
            "noise_multiplier": noise_multiplier,
            "epsilon": record["epsilon"],
            "progress": vars(progress).copy(),
            "model": {name: p.detach() for name, p in model.head.named_parameters("head")},
        }

    reporter.epoch(record, checkpoint)
    reporter.step(1, lambda: float("nan"), checkpoint)
    return progress


def public_covariance(data: Data, plan: Plan) -> NDArray[np.float64]:
    """Of the dev rows, without their labels; asked for by plans that count these rows as public."""
    tables = [table for table in data.dev.values() if isinstance(table, RepresentationTable)]
    rows = np.concatenate([u for table in tables for u, _ in bounded_rows(table, plan)])
    centred = rows - rows.mean(0)
    covariance: NDArray[np.float64] = centred.T @ centred / len(rows)
    return covariance


def noise_coordinates(plan: Plan, model: Classifier) -> int:
    """How many coordinates of the release get noise: of one record's row, or of the moments."""
    count: int = import_module(f"dpfp_ray.methods.{plan.mode}").coordinates(
        model.width, model.classes
    )
    return count


@torch.no_grad()
def put_head(model: Classifier, head: LinearHead, C: float) -> None:
    """The head for u = h/C as one for h bounded by C, which is what the model feeds it."""
    model.head.weight.copy_(torch.from_numpy(head.weight / C))
    model.head.bias.copy_(torch.from_numpy(head.bias))


def bounded_rows(table: RepresentationTable, plan: Plan) -> Rows:
    """u = h/C of all records in order, ‖u‖ ≤ 1, with their labels, a chunk at a time."""
    for start in range(0, len(table), CHUNK):
        h = torch.from_numpy(np.asarray(table.h[start : start + CHUNK], dtype=np.float64))
        yield (
            bound_rows(h, plan.scaling, plan.C).numpy() / plan.C,
            np.asarray(table.labels[start : start + CHUNK]),
        )


def add_up(
    rows: Rows, width: int, classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Class counts (K,), class sums (K, k) and second moment (k, k) of `rows`."""
    counts, sums = np.zeros(classes), np.zeros((classes, width))
    second = np.zeros((width, width))
    for u, labels in rows:
        member = np.zeros((classes, len(u)), u.dtype)
        member[labels, np.arange(len(u))] = 1.0
        counts += member.sum(1)
        sums += member @ u
        second += u.T @ u
    return counts, sums, second


def release_id(plan: Plan, noise_multiplier: float, table: RepresentationTable, seed: int) -> str:
    """32 hex digits; equal for equal releases, and without the seed they tell nothing.

    The records are part of it, so an unkeyed hash could confirm a guess of them.
    """
    labels = hashlib.blake2b(np.ascontiguousarray(table.labels, dtype=np.int64).data).hexdigest()
    facts: dict[str, Any] = {
        "mode": plan.mode,
        "representations": table.key,
        "labels": labels,
        "scaling": plan.scaling,
        "clip": plan.C,
        "noise_multiplier": noise_multiplier,
        "label_epsilon": plan.label_epsilon,
    }
    key = hashlib.blake2b(str(seed).encode(), digest_size=32).digest()
    return hashlib.blake2b(repr(facts).encode(), key=key, digest_size=16).hexdigest()


class Recent:
    """The last few results of an expensive function, by key."""

    def __init__(self, size: int = KEPT) -> None:
        self.size = size
        self.known: OrderedDict[Any, Any] = OrderedDict()

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = compute()
            while len(self.known) > self.size:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        return self.known[key]
