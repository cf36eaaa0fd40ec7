"""Before anything runs: the smallest difference that the planned seeds and dev rows can show.

"Show" means: the test of `paired`, corrected for all pairs of the table, calls it in 80 of 100
repetitions. Holm's first and hardest step is the one counted (level ÷ pairs); when several pairs
of a table differ, the later steps are easier and the power is a little higher than announced.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

from dpfp_ray.results.paired import Parts, half_width
from dpfp_ray.results.statistics import LEVEL, Scope
from dpfp_ray.system.errors import UserError

POWER = 0.8
MAX_SEEDS = 100
POINTS = 400  # of the distribution of the seeds' estimated variance


@dataclass(frozen=True)
class Spread:
    """How much answers vary; the defaults serve until runs of one's own have been observed.

    disagreement        share of dev rows that exactly one of two methods' runs has right
    seed_disagreement   the same for two runs of one method
    seed_sd             standard deviation over seeds of the accuracy on endlessly many rows

    The defaults are those of heads and small encoders with some ten points between good and bad
    settings. On 872 rows they make a method's observed deviation over seeds 0.0057; benchmarks/
    frozen.md has 0.001 to 0.005 for most settings there and up to 0.03 for the noisiest.
    """

    disagreement: float = 0.12
    seed_disagreement: float = 0.04
    seed_sd: float = 0.003

    def __post_init__(self) -> None:
        if not 0 <= self.seed_disagreement <= self.disagreement <= 1 or self.seed_sd < 0:
            raise UserError(
                f"spread {self}: shares must be 0 ≤ seed_disagreement ≤ disagreement ≤ 1, "
                "and seed_sd at least 0"
            )


@dataclass(frozen=True)
class Sensitivity:
    """What a planned table can show; `scope` is that of `Pair`."""

    rows: int
    seeds: int
    methods: int
    smallest_difference: float | None  # None: not even a difference of 100 points
    scope: Scope
    power: float
    level: float
    spread: Spread

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def power_of(
    difference: float,
    *,
    rows: int,
    seeds: int,
    methods: int = 2,
    spread: Spread | None = None,
    level: float = LEVEL,
) -> float:
    """Probability that a true difference between two of the methods is called.

    With one seed it is the probability that two trained models are told apart, for models that
    differ by so much; nothing is then said of the methods.
    """
    _check(rows, seeds, methods)
    spread = spread or Spread()
    pairs = methods * (methods - 1) // 2
    # Two methods that differ by so much also disagree on at least so many rows.
    between = max(spread.disagreement, abs(difference))
    within = min(spread.seed_disagreement, between)
    mean_square = between - within * (1 - 1 / seeds)
    row_spread = max(mean_square - difference**2, 0.0)
    drift = spread.seed_sd**2 if seeds > 1 else 0.0  # true variance of a method over its seeds
    seen = (drift + within / 2 / rows) / seeds  # what the runs' accuracies show of a method's mean
    deviation = math.sqrt(row_spread / rows + 2 * drift / seeds)
    # The two methods' estimated seed variances add up to a χ² of this many degrees of freedom.
    freedom = 2 * (seeds - 1)
    quantiles = (np.arange(POINTS) + 0.5) / POINTS
    estimated = (
        2 * seen * stats.chi2.ppf(quantiles, freedom) / freedom if freedom else np.zeros(POINTS)
    )
    test = Parts(
        difference=np.full(POINTS, difference),
        step=np.full(POINTS, 1 / (seeds * rows)),
        spread=np.full(POINTS, row_spread),
        rows=rows,
        rows_df=np.full(POINTS, max(rows * between - 1, 1.0)),
        seed_variances=((estimated, seeds - 1),) if freedom else (),
    )
    needed = half_width(test, level / pairs)
    if deviation == 0:
        return float((abs(difference) > needed).mean())
    called = stats.norm.sf((needed - difference) / deviation)
    return float((called + stats.norm.sf((needed + difference) / deviation)).mean())


def smallest_difference(
    *,
    rows: int,
    seeds: int,
    methods: int = 2,
    spread: Spread | None = None,
    level: float = LEVEL,
    power: float = POWER,
) -> Sensitivity:
    """The smallest true difference that is called with the given power."""
    spread = spread or Spread()

    def missing(difference: float) -> float:
        return power - power_of(
            difference, rows=rows, seeds=seeds, methods=methods, spread=spread, level=level
        )

    # From below: power rises with the difference, as long as it is not the whole disagreement.
    grid = np.linspace(0.0, 1.0, 201)
    first = next((index for index in range(1, 201) if missing(float(grid[index])) <= 0), None)
    smallest = (
        None
        if first is None
        else float(optimize.brentq(missing, grid[first - 1], grid[first], xtol=1e-6))
    )
    scope: Scope = "methods" if seeds > 1 else "these models"
    return Sensitivity(rows, seeds, methods, smallest, scope, power, level, spread)


def seeds_needed(
    difference: float,
    *,
    rows: int,
    methods: int = 2,
    spread: Spread | None = None,
    level: float = LEVEL,
    power: float = POWER,
) -> int | None:
    """The fewest seeds a method that show the difference, or None: then only more rows help."""
    if not 0 < difference <= 1:
        raise UserError(f"difference {difference} is not a share above 0; 0.01 is one point")
    for seeds in range(2, MAX_SEEDS + 1):
        reached = power_of(
            difference, rows=rows, seeds=seeds, methods=methods, spread=spread, level=level
        )
        if reached >= power:
            return seeds
    return None


def _check(rows: int, seeds: int, methods: int) -> None:
    if rows < 2 or seeds < 1 or methods < 2:
        raise UserError(
            f"{methods} methods, {seeds} seeds, {rows} dev rows: "
            "give at least two methods, one seed and two rows"
        )
