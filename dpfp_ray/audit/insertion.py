"""How canaries get into a training set, and what "out" means: what the adjacency says.

    add_remove   the record is gone. Its place in the Poisson draw stays (D is public), and adds
                 nothing when it is drawn. `moments` draws nothing: there the row is left out.
    zero_out     a record without any token, whose representation is 0; its label stays (labels are
                 public under this adjacency).
    replace_one  another of the displaced records' texts, under the canary's label.

The same for tables of tokens and of representations.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dpfp_ray.audit.canaries import Bools, Canaries, Ints
from dpfp_ray.data import Table
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.representations import RepresentationTable

# torch's cross entropy leaves a row with this label out: loss and gradient are 0, exactly.
IGNORED = -100


def insert(train: Table, canaries: Canaries, members: Bools, absence: str) -> Table:
    """The training set with each canary in or out of its place, as `members` says.

    `absence` is an adjacency, or "left_out" for methods that draw no samples.
    """
    records, count = len(train), len(canaries.places)
    owners = canaries.table.persons
    inside = members if owners is None else members[owners]
    labels = canaries.table.labels
    if absence == "replace_one":
        out = relabel(select(train, neighbours(canaries)), labels)
    elif absence == "zero_out":
        out = blank(train, labels, length=0)
    else:  # one token, because attention needs one
        out = blank(train, np.full(count, IGNORED), length=1)
    everything = stack(train, canaries.table, out)
    chosen = np.arange(records)
    chosen[canaries.places] = records + np.arange(count) + np.where(inside, 0, count)
    gone = canaries.places[~inside] if absence == "left_out" else np.zeros(0, np.int64)
    found = select(everything, np.delete(chosen, gone))
    if train.persons is None:
        return found
    # A canary's rows stand where those of the displaced person stood.
    return replace(cast(TokenTable, found), persons=np.delete(train.persons, gone))


def neighbours(canaries: Canaries) -> Ints:
    """The record whose text stands in for each canary under `replace_one`; never its own."""
    return np.roll(canaries.places, 1)


def hide_empty(model: Classifier) -> Classifier:
    """From now on a row without tokens has the representation 0, whatever `model` makes of padding.

    Attention over nothing is undefined; such rows look at their padding and the result is dropped.
    """
    plain = model.represent

    def represent(batch: Mapping[str, Tensor]) -> Tensor:
        mask = batch.get("attention_mask")
        if mask is None:  # representations that are already computed
            return plain(batch)
        there = mask.any(1, keepdim=True)
        seen = {**batch, "attention_mask": mask.masked_fill(~there, 1)}
        return plain(seen).masked_fill(~there, 0.0)

    model.represent = represent  # type: ignore[method-assign]
    return model


# Tables of rows from other tables ---------------------------------------------------------------


def relabel(table: Table, labels: Ints) -> Table:
    if isinstance(table, RepresentationTable):
        return replace(table, labels=labels)
    return replace(cast(TokenTable, table), labels=labels)


def blank(like: Table, labels: Ints, length: int) -> Table:
    """Rows of `length` padding tokens; zero rows of representations."""
    rows = len(labels)
    if isinstance(like, RepresentationTable):
        h = np.zeros((rows, like.width), like.h.dtype)
        return replace(like, h=h, labels=labels, key="zero", persons=None)
    like = cast(TokenTable, like)
    columns = {
        name: np.full(rows * length, like.pad_token_id if name == "input_ids" else 0, column.dtype)
        for name, column in like.columns.items()
    }
    return TokenTable(columns, np.arange(rows + 1) * length, labels, like.pad_token_id)


def stack(*tables: Table) -> Table:
    """All rows of all tables, one table after the other; nobody's, until it is said whose."""
    labels = np.concatenate([table.labels for table in tables])
    if isinstance(tables[0], RepresentationTable):
        parts = cast(tuple[RepresentationTable, ...], tables)
        key = " ".join(f"{part.key}*{len(part)}" for part in parts)
        h = np.concatenate([part.h for part in parts])
        return replace(parts[0], h=h, labels=labels, key=key, persons=None)
    packed = cast(tuple[TokenTable, ...], tables)
    columns = {
        name: np.concatenate([table.columns[name] for table in packed])
        for name in packed[0].columns
    }
    lengths = np.concatenate([table.lengths for table in packed])
    return TokenTable(columns, offsets(lengths), labels, packed[0].pad_token_id)


def select(table: Table, rows: Ints) -> Table:
    """The given rows in the given order."""
    if isinstance(table, RepresentationTable):
        labels = np.asarray(table.labels)[rows]
        persons = None if table.persons is None else table.persons[rows]
        # Noise of a release is keyed by what it is made from: other rows must have another key.
        digest = hashlib.blake2b(table.key.encode(), digest_size=16)
        digest.update(np.ascontiguousarray(rows, dtype=np.int64).data)
        key = digest.hexdigest()
        return replace(table, h=table.h[rows], labels=labels, key=key, persons=persons)
    return cast(TokenTable, table).take(rows)


def offsets(lengths: npt.NDArray[np.int64]) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
