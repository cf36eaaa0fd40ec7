"""Splitting a step's rows into parts that fit in memory and waste little on padding.

The gradient is a sum over rows, so the split changes nothing but speed. Rows are taken in order of
length; one more part has a fixed cost and saves the padding of the shorter rows.
"""

import numpy as np
from numpy.typing import NDArray

# Fixed cost of one more part, in tokens' worth of work. On a GPU a part is launched for less than
# it takes to fill the device, so rows are split there only for memory.
PART_COST = {"cpu": 160, "cuda": 8192}


def split_rows(
    lengths: NDArray[np.int64], max_rows: int, part_cost: int = PART_COST["cpu"]
) -> list[NDArray[np.int64]]:
    """Row positions of each part: together every row once, none longer than `max_rows` rows.

    Minimises the sum over parts of (rows × longest row + `part_cost`) by dynamic programming over
    the places that can be worth a split: where the sorted length changes, and whole parts of
    `max_rows` after such a place. (Moving a split to the right past rows of equal length never
    costs more, until the part before it is full.)
    """
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    rows = len(ordered)
    if rows == 0:
        return []
    changes = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    places = (changes[:, None] + np.arange(0, rows, max_rows)).ravel()
    places = np.append(np.unique(places[places < rows]), rows)
    cheapest = np.zeros(len(places))
    came_from = np.zeros(len(places), dtype=np.int64)
    for end in range(1, len(places)):
        first = np.searchsorted(places, places[end] - max_rows)
        starts = np.arange(first, end)
        padded = (places[end] - places[starts]) * ordered[places[end] - 1]
        costs = cheapest[starts] + padded + part_cost
        best = int(np.argmin(costs))
        cheapest[end], came_from[end] = costs[best], starts[best]
    parts = []
    end = len(places) - 1
    while end > 0:
        start = int(came_from[end])
        parts.append(order[places[start] : places[end]])
        end = start
    return parts[::-1]
