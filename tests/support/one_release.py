"""Made-up representations, plans and a naive twin, for tests of the modes that release once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpfp_ray.methods.parts.one_release import ClassStatistics
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.plan.plan import Plan

Floats = NDArray[np.float64]


def make_table(
    rows: int, width: int = 6, classes: int = 2, seed: int = 0, apart: float = 1.0
) -> RepresentationTable:
    """Gaussian classes of one covariance, around means that are `apart` from 0."""
    rng = np.random.default_rng(seed)
    means = apart * np.random.default_rng(99).standard_normal((classes, width))
    mix = np.random.default_rng(98).standard_normal((width, width)) / np.sqrt(width)
    mix = np.eye(width) + 0.3 * mix
    labels = rng.integers(0, classes, rows)
    h = means[labels] + rng.standard_normal((rows, width)) @ mix
    return RepresentationTable(h.astype(np.float32), labels, f"{rows} {width} {classes} {seed}")


def make_plan(mode: str, records: int, **changes: Any) -> Plan:
    return Plan(method="dpfp", mode=mode, representation="mean", **changes).bind(records=records)


def measured_epsilon(p: Floats, q: Floats, delta: float) -> float:
    """A lower bound, at 99%, on the ε of a mechanism, from scores in two neighbouring worlds.

    (ε, δ)-DP means P[S] ≤ e^ε Q[S] + δ for every event S. The threshold of S = {score > t} is
    chosen on one half of the runs; on the other half P[S] is bounded from below and Q[S] from above
    (Clopper-Pearson, 99.5% each).
    """
    half = len(p) // 2
    best, threshold = -np.inf, 0.0
    for t in np.quantile(np.concatenate([p[:half], q[:half]]), np.linspace(0.5, 0.999, 60)):
        bound = _bound(p[:half], q[:half], t, delta)
        best, threshold = max((best, threshold), (bound, t))
    return _bound(p[half:], q[half:], threshold, delta)


def _bound(p: Floats, q: Floats, threshold: float, delta: float) -> float:
    hits, misses = int((p > threshold).sum()), int((q > threshold).sum())
    low = stats.beta.ppf(0.005, hits, len(p) - hits + 1) if hits else 0.0
    high = stats.beta.ppf(0.995, misses + 1, len(q) - misses)
    return float(np.log(max(low - delta, 1e-12) / high))


def naive_statistics(u: Floats, labels: NDArray[np.int64], classes: int) -> ClassStatistics:
    """Without noise, by the definitions."""
    width = u.shape[1]
    counts, sums, second = np.zeros(classes), np.zeros((classes, width)), np.zeros((width, width))
    for row, label in zip(u, labels, strict=True):
        counts[label] += 1
        sums[label] += row
        second += np.outer(row, row)
    return ClassStatistics(counts, sums, second, 0.0, np.zeros(classes), 0.0)
