"""Choices among rows: which are held out for dev, and which make up a smaller training set.

A row's place follows from its own text alone, or from its person's name where the unit is a person,
by a fixed public hash: not from its number, from the other rows, or from a run's secret seed. So
one record (or person) more or less in the file is one more or less in what is trained on, which is
what a guarantee needs. (With places by row number, one removed line would exchange a fifth of all
training records.)
"""

import hashlib
from collections.abc import Iterable
from itertools import repeat

import numpy as np
import numpy.typing as npt

from dpfp_ray.data import Split
from dpfp_ray.data.persons import number_persons
from dpfp_ray.data.texts import hashes

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
