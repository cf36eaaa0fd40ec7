"""Who is faster, by how much, and how well that is known: contestants take turns.

In every round each contestant does the same piece of work once, in an order that turns round by
round; what else the machine does so meets all of them. Only ratios within a round are compared.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

# Does the work of round n; one that leaves a part of it out of the time gives its own seconds.
Turn = Callable[[int], float | None]
PRECISION = 0.03  # a ratio is known if its 95% interval is within ± this share of it


@dataclass(frozen=True)
class Limits:
    """When a race ends: once all its ratios are known, or at the latest after so much."""

    rounds: int = 60
    seconds: float = 90.0
    least: int = 6  # order statistics give no 95% interval of a median of fewer
    warm_up: bool = True  # a round before the first is not counted


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, with its 95% interval and the spread of single rounds."""

    value: float
    low: float
    high: float
    spread: tuple[float, float]  # the quantiles 10% and 90% of single rounds
    rounds: int

    @property
    def known(self) -> bool:
        """To ±3%."""
        return self.high / self.value - 1 <= PRECISION and 1 - self.low / self.value <= PRECISION


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Of paired numbers, `above` over `below`.

    From six pairs on, the interval is between two order statistics (no assumption but independent
    rounds); of fewer it is Student's, of the logarithms.
    """
    found = np.sort(np.asarray(above, float) / np.asarray(below, float))
    count, value = len(found), float(np.median(found))
    if count == 1:
        low, high = 0.0, math.inf
    elif count < 6:
        logs = np.log(found)
        half = float(stats.t.ppf(0.975, count - 1) * logs.std(ddof=1) / math.sqrt(count))
        value = float(np.exp(logs.mean()))
        low, high = value * math.exp(-half), value * math.exp(half)
    else:
        # The median is between the k-th smallest and the k-th largest with 1 − 2 P[Bin < k].
        k = max(1, int(stats.binom.ppf(0.025, count, 0.5)))
        low, high = float(found[k - 1]), float(found[-k])
    few, many = np.quantile(found, [0.1, 0.9])
    return Ratio(value, low, high, (float(few), float(many)), count)


def race(
    turns: Mapping[str, Turn], pairs: Sequence[tuple[str, str]], limits: Limits
) -> dict[str, list[float]]:
    """Seconds of every turn, by contestant. `pairs` are the ratios that shall be known."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    began = time.perf_counter()
    for number in range(0 if limits.warm_up else 1, limits.rounds + 1):
        order = list(turns) if number % 2 else list(turns)[::-1]
        for name in order:
            started = time.perf_counter()
            own = turns[name](number)
            seconds[name].append(time.perf_counter() - started if own is None else own)
        if number == 0:
            seconds = {name: [] for name in turns}
            continue
        if number >= limits.least and all(
            ratio_of(seconds[one], seconds[other]).known for one, other in pairs
        ):
            break
        spent = time.perf_counter() - began
        if number >= 2 and spent * (1 + 1 / number) > limits.seconds:
            break
    return seconds
