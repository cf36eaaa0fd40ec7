"""Methods whose true accuracy is known, answering the same dev rows with several seeds.

A run has a row right when  μ + difficulty of the row (shared by all methods) + the method's own
view of the row + the seed's luck + noise  is above 0; all terms are normal. A method's accuracy
over rows and seeds is then Φ(μ / total deviation), whatever the shares of the terms.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats


@dataclass(frozen=True)
class World:
    """Standard deviations of the latent terms; the noise of one run on one row has 1."""

    difficulty: float = 3.0
    view: float = 1.0
    seed: float = 0.05

    @property
    def total(self) -> float:
        return float(np.sqrt(self.difficulty**2 + self.view**2 + self.seed**2 + 1))


def simulate(
    rng: np.random.Generator,
    world: World,
    accuracies: tuple[float, ...],
    *,
    tables: int,
    seeds: int,
    rows: int,
) -> list[NDArray[np.bool_]]:
    """For each method, right answers (tables, seeds, rows)."""

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32)

    difficulty = world.difficulty * normal(tables, 1, rows)
    methods = []
    for accuracy in accuracies:
        latent = normal(tables, seeds, rows) + difficulty
        latent += world.view * normal(tables, 1, rows) + world.seed * normal(tables, seeds, 1)
        methods.append(latent > -world.total * stats.norm.ppf(accuracy))
    return methods
