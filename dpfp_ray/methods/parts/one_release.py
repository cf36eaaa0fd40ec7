"""Methods that use the private records once: a release, and a head computed from it alone.

    release (private rows → noisy statistics)  →  discriminant (noisy statistics → head)

Only the left side sees private data, and it is a Gaussian mechanism whose cost `docs/privacy.md`
proves. The right side is post-processing: other ridges and other trials on a release cost nothing.

A release is named by `release_id`. Its noise is a pure function of the secret seed and of *all*
that the release depends on, the records included. So the same release made again is the same
numbers and costs nothing more; and two releases that differ in anything (C, σ, a record) have
independent noise, so that their costs compose. With noise keyed by the seed alone, the difference
of two releases would be free of noise.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dpfp_ray.models.representations import RepresentationTable
    from dpfp_ray.plan.plan import Plan

CHUNK = 8192  # rows in memory at once; part of what a seed means for a release of rows
KEPT = 4  # releases kept in memory, for the trials that follow

Rows = Iterator[tuple[NDArray[np.floating[Any]], NDArray[np.int64]]]


def bounded_rows(table: RepresentationTable, plan: Plan) -> Rows:
    """u = h/C of all records in order, ‖u‖ ≤ 1, with their labels, a chunk at a time."""
    for start in range(0, len(table), CHUNK):
        part = slice(start, start + CHUNK)
        yield bounded(table.h[part], plan), np.asarray(table.labels[part])


def bounded(h: NDArray[np.floating[Any]], plan: Plan) -> NDArray[np.float64]:
    """u = h/C of every row, ‖u‖ ≤ 1."""
    import torch

    from dpfp_ray.models.classifier import bound_rows

    rows = torch.from_numpy(np.asarray(h, dtype=np.float64))
    return np.asarray(bound_rows(rows, plan.scaling, plan.C).numpy() / plan.C)


def membership(
    labels: NDArray[np.int64], classes: int, kept: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """(K, rows): 1 where a row is of a class. Where its label y was kept with probability q =
    `kept[i]`, and each other one said with r, ([said = c] − r)/(q − r): [y = c] on average."""
    member = np.zeros((classes, len(labels)))
    member[labels, np.arange(len(labels))] = 1.0
    if kept is None:
        return member
    r = (1 - kept) / (classes - 1)
    return np.asarray((member - r) / (kept - r))


def add_up(
    rows: Rows,
    width: int,
    classes: int,
    weights: NDArray[np.float64] | None = None,
    kept: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Class counts (K,), class sums (K, k) and second moment (k, k) of `rows`; row i counts
    `weights[i]` times, and belongs to classes as `membership` says."""
    counts, sums = np.zeros(classes), np.zeros((classes, width))
    second = np.zeros((width, width))
    start = 0
    for u, labels in rows:
        part = slice(start, start + len(u))
        member = membership(labels, classes, None if kept is None else kept[part])
        member, scaled = member.astype(u.dtype, copy=False), u
        if weights is not None:
            own = weights[part]
            member, scaled = member * own, u * own[:, None]
        start += len(u)
        counts += member.sum(1)
        sums += member @ u
        second += scaled.T @ u
    return counts, sums, second


def rows_of_person(table: RepresentationTable) -> NDArray[np.float64] | None:
    """m for each row: how many rows its person has; None where every row is a unit of its own."""
    if table.persons is None:
        return None
    return np.bincount(table.persons)[table.persons].astype(np.float64)


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
    found = int(np.max(table.labels, initial=-1)) + 1
    if plan.classes and plan.classes != found:  # a class without records: other statistics
        facts["classes"] = plan.classes
    if table.persons is not None:  # other groups are another release
        persons = np.ascontiguousarray(table.persons, dtype=np.int64)
        facts["persons"] = hashlib.blake2b(persons.data).hexdigest()
    key = hashlib.blake2b(str(seed).encode(), digest_size=32).digest()
    return hashlib.blake2b(repr(facts).encode(), key=key, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Seen:
    """What an auditor has to guess from: all but the coins and the noise.

    Canary i is row i of `canaries` and stands at `places[i]` of `table`, from which the release was
    made, if its coin says so; if not, row i of `absent` stands there, or (None) nothing that adds.
    `others` are the records that are no canaries. `released` is what the method's `release` gave
    to the run, the very object that the head was made from; `noise_multiplier` is what is stated of
    it.
    """

    plan: Plan
    noise_multiplier: float
    classes: int
    released: Any
    table: RepresentationTable
    places: NDArray[np.int64]
    canaries: RepresentationTable
    absent: RepresentationTable | None
    others: RepresentationTable


class Recent:
    """The last few results of an expensive function, by key."""

    def __init__(self) -> None:
        self.known: OrderedDict[Any, Any] = OrderedDict()

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = compute()
            while len(self.known) > KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        return self.known[key]
