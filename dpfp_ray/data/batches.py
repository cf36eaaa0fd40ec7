"""Splitting a step's rows into parts that fit in memory and waste little on padding.

The gradient is a sum over rows, so the split changes nothing but speed. Rows are taken in order of
length; one more part has a fixed cost and saves the padding of the shorter rows.

Rows side by side in a few long sequences, in place of one padded sequence a row.

Of a step of 32 sentences of SST-2 a third is padding even where like lengths are padded together,
since every part has a cost of its own; packed, 2.3% is (benchmarks/RESULTS.md, by counting).
Attention must be told which tokens belong together (`ROW`). Its cost grows with the
length of a sequence, that of all else with the number of tokens; hence several sequences.
"""

import heapq
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.data.tokens import TokenTable

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]
# Fixed cost of one more part, in tokens' worth of work. On a GPU a part is launched for less than
# it takes to fill the device, so rows are split there only for memory.
PART_COST = {"cpu": 160, "cuda": 8192}


def split_rows(
    lengths: NDArray[np.int64],
    max_rows: int,
    part_cost: int = PART_COST["cpu"],
    owners: NDArray[np.int64] | None = None,
    max_tokens: int | None = None,
) -> list[NDArray[np.int64]]:
    """Row positions of each part: together every row once, none longer than `max_rows` rows, or
    `max_tokens` tokens, padding included.

    With `owners` (whose each row is) all rows of one are in one part, even if they are more; and a
    row that has more than `max_tokens` tokens is a part of its own.

    Minimises the sum over parts of (rows × longest row + `part_cost`) by dynamic programming over
    the places that can be worth a split: where the sorted length changes, and whole parts of
    the most rows after such a place. (Moving a split to the right past rows of equal length never
    costs more, until the part before it is full.)
    """
    if len(lengths) == 0:
        return []
    if owners is None:
        order = np.argsort(lengths, kind="stable")
        before = np.arange(len(lengths) + 1)
        return _parts_of(order, lengths[order], before, max_rows, part_cost, max_tokens)
    _, unit, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    longest = np.zeros(len(sizes), np.int64)
    np.maximum.at(longest, unit, lengths)
    in_order = np.argsort(longest, kind="stable")
    place = np.empty_like(in_order)
    place[in_order] = np.arange(len(in_order))
    before = np.concatenate([[0], np.cumsum(sizes[in_order])])
    order = np.argsort(place[unit], kind="stable")
    return _parts_of(order, longest[in_order], before, max_rows, part_cost, max_tokens)


def _parts_of(
    order: NDArray[np.int64],
    ordered: NDArray[np.int64],
    before: NDArray[np.int64],
    max_rows: int,
    part_cost: int,
    max_tokens: int | None,
) -> list[NDArray[np.int64]]:
    """`order` in parts. Unit i, of length `ordered[i]`, has the rows from `before[i]` on."""
    units = len(ordered)
    here = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    found = here
    while len(here):  # the end of a full part that begins here; of one unit, if that is larger
        full = np.searchsorted(before, before[here] + max_rows, side="right") - 1
        if max_tokens is not None:
            full = np.minimum(full, [fullest(before, ordered, i, max_tokens) for i in here])
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
        if max_tokens is not None and (padded > max_tokens).any():
            keep = padded <= max_tokens
            keep[-1] = True
            starts, padded = starts[keep], padded[keep]
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


def parts_in_order(lengths: Ints, max_rows: int, max_tokens: int | None = None) -> list[Ints]:
    """`split_rows` for rows that are packed, where padding is no matter: as they come."""
    ends, parts, start = np.cumsum(lengths), [], 0
    while start < len(lengths):
        stop = start + max_rows
        if max_tokens is not None:
            room = max_tokens + (ends[start - 1] if start else 0)
            stop = max(start + 1, min(stop, int(np.searchsorted(ends, room, side="right"))))
        parts.append(np.arange(start, min(stop, len(lengths))))
        start = stop
    return parts


def fullest(before: Ints, ordered: Ints, start: int, max_tokens: int) -> int:
    """The end of the longest part from unit `start` on that has at most `max_tokens` tokens."""

    def tokens(end: int) -> int:
        return int((before[end] - before[start]) * ordered[end - 1])

    return bisect_right(range(start + 1, len(before)), max_tokens, key=tokens) + start


# Tokens of a sequence: attention and ghost norms cost less in short ones; but where one holds fewer
# rows than that, much of it stays empty. Longer than that only where a row is.
SEQUENCE, ROWS, LONGEST = 64, 5, 128
# In a packed batch: the number of each token's row, −1 for padding; its place in that row; and of
# each row, where its first token is among all tokens.
ROW, PLACE, FIRST = "packed_row", "packed_place", "packed_first"


def arrange(lengths: Ints, tokens: int = SEQUENCE) -> tuple[Ints, Ints, int, int]:
    """The sequence that each row goes to, and its start there; how many there are, of what length.

    The longest row first, each to the sequence that is shortest so far: all end up nearly equal,
    because the last rows to be placed are the shortest.
    """
    wanted = max(tokens, min(ROWS * float(lengths.mean()), LONGEST), int(lengths.max()))
    count = max(1, round(int(lengths.sum()) / wanted))
    filled = [(0, number) for number in range(count)]
    sequence, start = np.empty_like(lengths), np.empty_like(lengths)
    for row in np.argsort(-lengths, kind="stable").tolist():
        used, number = filled[0]
        sequence[row], start[row] = number, used
        heapq.heapreplace(filled, (used + int(lengths[row]), number))
    return sequence, start, count, max(used for used, _ in filled)


def packed(table: TokenTable, rows: Ints) -> "dict[str, Tensor]":
    """The given rows of `table`, at least one, as a packed batch."""
    import torch

    lengths = table.offsets[rows + 1] - table.offsets[rows]
    sequence, start, count, longest = arrange(lengths)
    ends = np.cumsum(lengths)
    # The row of every token of these rows, one after the other, and its place in that row.
    row = np.repeat(np.arange(len(rows)), lengths)
    place = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    where = (sequence * longest + start)[row] + place
    source = table.offsets[rows][row] + place

    def spread(values: NDArray[np.integer], empty: int = 0) -> "Tensor":
        spread_values = np.full(count * longest, empty, np.int64)
        spread_values[where] = values
        return torch.from_numpy(spread_values.reshape(count, longest))

    batch = {name: spread(column[source]) for name, column in table.columns.items()}
    batch["input_ids"] = spread(table.columns["input_ids"][source], table.pad_token_id)
    first = torch.from_numpy(sequence * longest + start)
    return {**batch, ROW: spread(row, -1), PLACE: spread(place), FIRST: first}


def first_tokens(batch: "Mapping[str, Tensor]") -> "Tensor":
    """Of a packed batch. They are looked for only if it does not say: a GPU makes its host wait."""
    if FIRST in batch:
        return batch[FIRST]
    row = batch[ROW].flatten()
    found = ((row >= 0) & (batch[PLACE].flatten() == 0)).nonzero()[:, 0]
    return found[row[found].argsort()]


def spans(row: "Tensor") -> list[slice]:
    """Where each row's tokens are among all of a packed batch, one sequence after the other.

    They lie side by side, so a slice of what a layer holds for all tokens is the row's own.
    """
    where = (row.flatten() >= 0).nonzero()[:, 0]
    numbers = row.flatten()[where]
    counts = numbers.bincount()
    starts = where[numbers.argsort(stable=True)[counts.cumsum(0) - counts]]
    return [
        slice(start, start + count)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]


def unpacked(batch: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """A packed batch as a padded one, row by row."""
    import torch

    real = batch[ROW] >= 0
    row, place = batch[ROW][real], batch[PLACE][real]
    shape = int(row.max()) + 1, int(place.max()) + 1
    columns = {}
    for name, values in batch.items():
        if name not in (ROW, PLACE, FIRST):
            # Any id serves as padding where the mask hides it.
            columns[name] = torch.zeros(shape, dtype=values.dtype, device=values.device)
            columns[name][row, place] = values[real]
    mask = torch.zeros(shape, dtype=torch.int64, device=row.device)
    mask[row, place] = 1
    return {**columns, "attention_mask": mask}
