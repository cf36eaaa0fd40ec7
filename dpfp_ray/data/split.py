"""Whose rows these are, and choices among them: which are held out for dev, and which make up a
smaller training set.

Without a user column every row is a unit of its own. With one, a unit is a person with all of their
rows, drawn and bounded as one.

A row's place follows from its own text alone, or from its person's name where the unit is a person,
by a fixed public hash: not from its number, from the other rows, or from a run's secret seed. So
one record (or person) more or less in the file is one more or less in what is trained on, which is
what a guarantee needs. (With places by row number, one removed line would exchange a fifth of all
training records.)
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np
import numpy.typing as npt

from dpfp_ray.data import Split, Table
from dpfp_ray.data.texts import distinct, hashes

Ints = npt.NDArray[np.int64]


def number_persons(users: Iterable[str]) -> Ints:
    """0 … P−1 for each row's person, in the order of their first rows."""
    return distinct(users)[0]


def count_units(table: Table) -> int:
    """D: rows, or persons."""
    return len(table) if table.persons is None else len(np.unique(table.persons))


class Units:
    """The rows of every unit of a table.

    >>> Units(table).expand(np.array([7, 2]))   # persons 7 and 2
    (array([ 3, 12, 40,  5]), array([0, 0, 0, 1]))
    """

    def __init__(self, table: Table) -> None:
        self.grouped = table.persons is not None
        if table.persons is not None:
            self.order = np.argsort(table.persons, kind="stable")
            self.counts = np.bincount(table.persons)
            self.starts = np.cumsum(self.counts) - self.counts

    def expand(self, drawn: Ints) -> tuple[Ints, Ints | None]:
        """The rows of `drawn`, one unit after the other, and for each the place of its unit in
        `drawn`; None where units are rows. A unit that is drawn twice is two."""
        if not self.grouped:
            return drawn, None
        counts = self.counts[drawn]
        owners = np.repeat(np.arange(len(drawn)), counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.order[self.starts[drawn][owners] + within], owners


def by_size(owners: Ints) -> Iterator[tuple[Ints, Ints]]:
    """(owners, rows) for every number m of rows that an owner has; `rows` has m columns.

    So all of the owners with equally many rows can be computed with at once: as many turns as there
    are different m, however many owners.
    """
    _, numbers, counts = np.unique(owners, return_inverse=True, return_counts=True)
    order = np.argsort(numbers, kind="stable")
    starts = np.cumsum(counts) - counts
    for size in np.unique(counts):
        chosen = np.flatnonzero(counts == size)
        yield chosen, order[starts[chosen][:, None] + np.arange(size)]


Places = npt.NDArray[np.uint64]


def places(split: Split, purpose: str) -> Places:
    """A uniform 64-bit number for each row; equal texts have equal ones. Fixed for ever."""
    pairs = split.pairs if split.pairs is not None else repeat("", len(split))
    rows = zip(split.texts, pairs, strict=True)
    return _hashes((f"{text.strip()}\0{pair.strip()}" for text, pair in rows), purpose)


def unit_places(split: Split, purpose: str) -> Places:
    """The place of each row's unit: the same for all rows of a person."""
    if split.users is None:
        return places(split, purpose)
    return _hashes(split.users, f"{purpose} person")


def _hashes(words: Iterable[str], purpose: str) -> Places:
    key = hashlib.blake2b(purpose.encode(), digest_size=16).digest()
    return hashes(words, key=key)[:, 0]


def at_most(split: Split, limit: int | None) -> Split:
    """At most `limit` records of each person: those with the lowest places, in their old order.

    Which of a person's records stay follows from that person's records alone. Of equal texts,
    earlier rows come first.
    """
    if split.users is None or limit is None:
        return split
    persons = number_persons(split.users)
    order = np.lexsort((places(split, "records of a person"), persons))
    counts = np.bincount(persons)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return split.take(np.sort(order[rank < limit]))


def subset(split: Split, limit: int | None) -> Split:
    """The `limit` rows with the lowest places, in their old order; of persons, all of their rows.

    Smaller subsets are inside larger ones. Whoever leaves is replaced by the next in line: one
    record, or person, changes. Of equal texts, earlier rows come first.
    """
    if limit is None or limit >= len(split):
        return split
    if split.users is not None:
        lowest = np.unique(own := unit_places(split, "subset"))[:limit]
        return split.take(np.flatnonzero(np.isin(own, lowest)))
    order = np.argsort(places(split, "subset"), kind="stable")
    return split.take(np.sort(order[:limit]))


def hold_out(split: Split, share: float) -> tuple[Split, Split]:
    """(train, dev): the rows whose place is in the lowest `share` of all places are dev.

    Equal texts are on the same side, so no record is in both; of a person, all rows are. A row's
    side does not depend on the other rows; the one exception are sets so small that dev would be
    empty, or train without a class: then the nearest change sides until neither is so.
    """
    place = unit_places(split, "hold out")
    in_dev = place < np.uint64(min(share * 2.0**64, 2.0**64 - 2**11))
    if len(split) and not in_dev.any():
        in_dev = place == place.min()
    for label in np.unique(split.labels):
        own = split.labels == label
        if in_dev[own].all():
            in_dev &= place != place[own].max()
    return split.take(np.flatnonzero(~in_dev)), split.take(np.flatnonzero(in_dev))
