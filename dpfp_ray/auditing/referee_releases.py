"""The referee for methods that release once: can two neighbouring data sets be told apart better
than ε allows?

A method of one release has no steps to look into, and its noise may enter in any way. But it takes
milliseconds on made-up data, so it is made thousands of times, with a record and without it. Half
of the releases say along which line the two clouds differ most; on the other half, for every event
"beyond this point of the line" and declared (ε, δ), P ≤ e^ε Q + δ must hold in both directions.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from dpfp_ray.auditing.referee import CHANCE, Finding, Floats, made_up, with_row
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import noise_multiplier

RELEASES = 3000  # of each data set
RECORDS = 4  # so few that one of them shows as much as the theorem allows
EPSILON = 4.0
DELTAS = (1e-5, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4)
POINTS = 40


def check_release(asked: Plan) -> Iterator[Finding]:
    plan = small_release(asked)
    table = made_up(RECORDS)
    noise = noise_multiplier(plan)
    mechanism = accounting.mechanism(plan, noise)
    curve = [(accounting.epsilon(mechanism, delta, "pld") or 0.0, delta) for delta in DELTAS]
    there = sample(plan, noise, table, 0)
    yield number_of_releases(plan, noise, table)
    for value in (1.0, 1e3, float("nan")):
        # Record 0 is the one that changes; in the other data set it is not there.
        changed = with_row(table, 0, value, 1)
        with_it = there if value == 1.0 else sample(plan, noise, changed, 1)
        without = sample(plan, noise, neighbour(plan, changed), 2)
        what = f"a record of norm {value:g} against {absent(plan)}"
        missing = int((~np.isfinite(with_it)).sum() + (~np.isfinite(without)).sum())
        if missing:
            fault = "releases are undefined, which shows that it is there"
            yield Finding(what, "finite releases", f"{missing} numbers are not", fault)
            continue
        excess, shown = told_apart(with_it, without, curve)
        fault = "the two are told apart better than ε allows" if excess else ""
        yield Finding(what, f"ε = {EPSILON:g} at δ = {plan.delta:g}", shown, fault)


def small_release(asked: Plan) -> Plan:
    plan = make_plan(
        {
            "method": asked.method,
            "mode": asked.mode,
            "adjacency": asked.adjacency,
            "epsilon": EPSILON,
            "delta": DELTAS[0],
            "representation": "mean",
        }
    )
    return plan.bind(records=RECORDS, classes=2)


def absent(plan: Plan) -> str:
    names = {"add_remove": "its absence", "zero_out": "nothing in its place"}
    return names.get(str(plan.adjacency), "another record")


def neighbour(plan: Plan, table: RepresentationTable) -> RepresentationTable:
    if plan.adjacency == "add_remove":
        key = f"{table.key} without 0"
        return RepresentationTable(table.h[1:], table.labels[1:], key, table.centre)
    value = 0.0 if plan.adjacency == "zero_out" else -1.0
    return with_row(table, 0, value, int(table.labels[0]))


def sample(plan: Plan, noise: float, table: RepresentationTable, start: int) -> Floats:
    method = plan.spec.one_release
    assert method is not None, "the caller has looked"
    seeds = range(start * RELEASES, (start + 1) * RELEASES)
    return np.array([numbers(method.release(plan, noise, table, 2, seed)) for seed in seeds])


def numbers(release: Any) -> Floats:
    """All numbers of a release, in one row; the noisy rows themselves, where it has them."""
    if callable(rows := getattr(release, "rows", None)):
        return np.concatenate([np.asarray(part, float).ravel() for part, _ in rows()])
    if isinstance(release, np.ndarray | Tensor):
        return np.asarray(release, float).ravel()
    if dataclasses.is_dataclass(release):
        parts = [numbers(getattr(release, field.name)) for field in dataclasses.fields(release)]
        return np.concatenate(parts) if parts else np.zeros(0)
    return np.zeros(0)


def number_of_releases(plan: Plan, noise: float, table: RepresentationTable) -> Finding:
    """As many numbers whatever the data, and the same again for the same seed."""
    sizes = {len(sample_one(plan, noise, data)) for data in (table, neighbour(plan, table))}
    same = np.array_equal(sample_one(plan, noise, table), sample_one(plan, noise, table))
    shapes = {plan.adjacency == "add_remove" or len(sizes) == 1}
    fault = "" if same and shapes == {True} else "the release depends on more than data and seed"
    return Finding("numbers of the release", "as many", f"{sorted(sizes)}", fault)


def sample_one(plan: Plan, noise: float, table: RepresentationTable) -> Floats:
    method = plan.spec.one_release
    assert method is not None, "the caller has looked"
    return numbers(method.release(plan, noise, table, 2, 1))


def told_apart(first: Floats, second: Floats, curve: list[tuple[float, float]]) -> tuple[bool, str]:
    """Whether an event is proved to break P ≤ e^ε Q + δ, and the one that comes nearest to it."""
    half = RELEASES // 2
    spread = np.sqrt((first[:half].var(0) + second[:half].var(0)) / 2)
    line = (first[:half].mean(0) - second[:half].mean(0)) / np.maximum(spread, 1e-12) ** 2
    a, b = first[half:] @ line, second[half:] @ line
    worst, nearest = False, -np.inf
    level = CHANCE / (2 * POINTS * len(curve) * 2)
    for point in np.quantile(np.concatenate([a, b]), np.linspace(0.01, 0.99, POINTS)):
        for p, q in ((a >= point, b >= point), (b < point, a < point)):
            low = bound(int(p.sum()), half, level, lower=True)
            high = bound(int(q.sum()), half, level, lower=False)
            for epsilon, delta in curve:
                nearest = max(nearest, float(p.mean() - np.exp(epsilon) * q.mean() - delta))
                worst = worst or low > np.exp(epsilon) * high + delta
    return worst, f"at most P − e^ε Q − δ = {nearest:+.3f}"


def bound(count: int, trials: int, level: float, *, lower: bool) -> float:
    """Clopper and Pearson's, one-sided."""
    if lower:
        return float(stats.beta.ppf(level, count, trials - count + 1)) if count else 0.0
    return float(stats.beta.isf(level, count + 1, trials - count)) if count < trials else 1.0
