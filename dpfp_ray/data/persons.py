"""Whose rows these are: the units that are drawn and bounded as one.

Without a user column every row is a unit of its own. With one, a unit is a person with all of their
rows, and everything before this that chooses among rows looks at one person's own rows only
(`split`): one person more or less in the file is one unit more or less in what is trained on.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from dpfp_ray.data import Table
from dpfp_ray.data.texts import distinct

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
