"""Choices among rows: which are held out for dev, and which make up a smaller training set.

A row's place follows from its own text alone, by a fixed public hash: not from its number, from the
other rows, or from a run's secret seed. So one record more or less in the file is one record more
or less in what is trained on, which is what a guarantee for one record needs. (With places by row
number, one removed line would exchange a fifth of all training records.)
"""

import hashlib

import numpy as np
import numpy.typing as npt

from dpfp_ray.data import Split

Places = npt.NDArray[np.uint64]


def places(split: Split, purpose: str) -> Places:
    """A uniform 64-bit number for each row; equal texts have equal ones. Fixed for ever."""
    key = hashlib.blake2b(purpose.encode(), digest_size=16).digest()
    pairs = split.pairs if split.pairs is not None else [""] * len(split)
    digests = b"".join(
        hashlib.blake2b(f"{text.strip()}\0{pair.strip()}".encode(), digest_size=8, key=key).digest()
        for text, pair in zip(split.texts, pairs, strict=True)
    )
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def subset(split: Split, limit: int | None) -> Split:
    """The `limit` rows with the lowest places, in their old order.

    Smaller subsets are inside larger ones. Whoever leaves is replaced by the next in line: one
    record changes. Of equal texts, earlier rows come first.
    """
    if limit is None or limit >= len(split):
        return split
    order = np.argsort(places(split, "subset"), kind="stable")
    return split.take(np.sort(order[:limit]))


def hold_out(split: Split, share: float) -> tuple[Split, Split]:
    """(train, dev): the rows whose place is in the lowest `share` of all places are dev.

    Equal texts are on the same side, so no record is in both. A row's side does not depend on the
    other rows; the one exception are sets so small that dev would be empty, or train without a
    class: then the nearest texts change sides until neither is so.
    """
    place = places(split, "hold out")
    in_dev = place < np.uint64(min(share * 2.0**64, 2.0**64 - 2**11))
    if len(split) and not in_dev.any():
        in_dev = place == place.min()
    for label in np.unique(split.labels):
        own = split.labels == label
        if in_dev[own].all():
            in_dev &= place != place[own].max()
    return split.take(np.flatnonzero(~in_dev)), split.take(np.flatnonzero(in_dev))
