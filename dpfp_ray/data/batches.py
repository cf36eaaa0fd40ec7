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
    lengths: NDArray[np.int64],
    max_rows: int,
    part_cost: int = PART_COST["cpu"],
    owners: NDArray[np.int64] | None = None,
) -> list[NDArray[np.int64]]:
    """Row positions of each part: together every row once, none longer than `max_rows` rows.

    With `owners` (whose each row is) all rows of one are in one part, even if they are more.

    Minimises the sum over parts of (rows × longest row + `part_cost`) by dynamic programming over
    the places that can be worth a split: where the sorted length changes, and whole parts of
    `max_rows` after such a place. (Moving a split to the right past rows of equal length never
    costs more, until the part before it is full.)
    """
    if len(lengths) == 0:
        return []
    if owners is None:
        order = np.argsort(lengths, kind="stable")
        return _parts_of(order, lengths[order], np.arange(len(lengths) + 1), max_rows, part_cost)
    _, unit, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    longest = np.zeros(len(sizes), np.int64)
    np.maximum.at(longest, unit, lengths)
    in_order = np.argsort(longest, kind="stable")
    place = np.empty_like(in_order)
    place[in_order] = np.arange(len(in_order))
    before = np.concatenate([[0], np.cumsum(sizes[in_order])])
    order = np.argsort(place[unit], kind="stable")
    return _parts_of(order, longest[in_order], before, max_rows, part_cost)


def _parts_of(
    order: NDArray[np.int64],
    ordered: NDArray[np.int64],
    before: NDArray[np.int64],
    max_rows: int,
    part_cost: int,
) -> list[NDArray[np.int64]]:
    """`order` in parts. Unit i, of length `ordered[i]`, has the rows from `before[i]` on."""
    units = len(ordered)
    here = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    found = here
    while len(here):  # the end of a full part that begins here; of one unit, if that is larger
        full = np.searchsorted(before, before[here] + max_rows, side="right") - 1
        here = np.maximum(full, here + 1)
        here = here[here < units]
        found = np.concatenate([found, here])
    places = np.append(np.unique(found), units)
    rows = before[places]
    cheapest = np.zeros(len(places))
    came_from = np.zeros(len(places), dtype=np.int64)
    for end in range(1, len(places)):
        first = min(int(np.searchsorted(rows, rows[end] - max_rows)), end - 1)
        starts = np.arange(first, end)
        padded = (rows[end] - rows[starts]) * ordered[places[end] - 1]
        costs = cheapest[starts] + padded + part_cost
        best = int(np.argmin(costs))
        cheapest[end], came_from[end] = costs[best], starts[best]
    parts = []
    end = len(places) - 1
    while end > 0:
        start = int(came_from[end])
        parts.append(order[rows[start] : rows[end]])
        end = start
    return parts[::-1]
