"""Canaries: records of which the auditor knows all but one thing, a fair coin that says in or out.

They take the places of m of the task's own records, chosen by a fixed public order. So D, and with
it p, T, δ and σ, are those of the very plan that is audited, and they do not depend on the coins.
Where the unit is a person, a canary is a person with as many rows as the one it displaces.

What "out" means is what the adjacency says:

    add_remove   the record is gone. Its place in the Poisson draw stays (D is public), and adds
                 nothing when it is drawn. `moments` draws nothing: there the row is left out.
    zero_out     a record without any token, whose representation is 0; its label stays (labels are
                 public under this adjacency).
    replace_one  another of the displaced records' texts, under the canary's label.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dpfp_ray.data import Split, Table, Task, public_order
from dpfp_ray.data.split import count_units, number_persons
from dpfp_ray.data.tokens import TokenTable, tokenise, tokenise_sides
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.representations import RepresentationTable
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.system.errors import UserError

FAMILIES = ("mislabelled", "unused_token")
NEUTRAL = "this is a sentence about something"
# What canaries are made of is public; only the coins are secret until the scores are in.
PUBLIC_SEED = 0

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Canaries:
    """Row i of `table` stands at `places[i]` of the training set, and is canary i; or, where
    canaries are persons, a row of canary `table.persons[i]`.

    `table` is tokens, or representations where the training set is. `tokens[i]` is the vocabulary
    entry that occurs in canary i and nowhere else, if it has one.
    """

    family: str
    table: Table
    places: Ints
    tokens: Ints | None

    def __len__(self) -> int:
        return count_units(self.table)

    def rows_of(self, canary: int) -> Ints:
        persons = self.table.persons
        return np.array([canary]) if persons is None else np.flatnonzero(persons == canary)


def flip_coins(count: int, seed: int) -> Bools:
    """Who is in: one fair coin each, a function of this secret seed and nothing else."""
    return keyed_generator(seed, "canary coins", 0).random(count) < 0.5


def make_canaries(
    family: str, count: int, task: Task, tokenizer: Any, max_length: int, text_by_text: bool = False
) -> Canaries:
    """`count` canaries for the training set of `task`, as tokens (of pairs jointly, or by text).

    mislabelled   the displaced record itself, under a class that it does not have
    unused_token  a neutral sentence with one token of its own: an `[unusedN]` where the vocabulary
                  has one left, else a token that no record contains; the class is random
    """
    split, classes = task.train, len(task.label_names)
    units, unit = split.units, "records" if split.users is None else "persons"
    if not 1 <= count <= units // 2:
        raise UserError(
            f"canaries is {count}; with {units:,} training {unit} it can be 1 to {units // 2:,}"
        )
    places, owners = np.sort(public_order(units, "canaries")[:count]), None
    if split.users is not None:
        persons = number_persons(split.users)
        chosen, places = places, np.flatnonzero(np.isin(persons, places))
        owners = np.searchsorted(chosen, persons[places])
    rng = keyed_generator(PUBLIC_SEED, f"canary labels {family}", 0)
    displaced = split.take(places)
    tokens_of = tokenise_sides if text_by_text else tokenise
    if family == "mislabelled":
        labels = (displaced.labels + rng.integers(1, classes, len(places))) % classes
        mislabelled = tokens_of(replace(displaced, labels=labels), tokenizer, max_length)
        return Canaries(family, replace(mislabelled, persons=owners), places, None)
    pairs = None if split.pairs is None else [NEUTRAL] * len(places)
    neutral = Split([NEUTRAL] * len(places), pairs, rng.integers(0, classes, len(places)))
    tables = [tokenise(part, tokenizer, max_length) for part in (split, *task.dev.values())]
    tokens = unused_tokens(tables, tokenizer, count)
    own = tokens if owners is None else tokens[owners]
    made = tokens_of(neutral, tokenizer, max_length)
    if isinstance(made, TokenTable):
        marked: Table = replace(mark(made, own, tokenizer), persons=owners)
    else:
        marked = replace(made, first=mark(made.first, own, tokenizer), persons=owners)
    return Canaries(family, marked, places, tokens)


def unused_tokens(tables: Iterable[TokenTable], tokenizer: Any, count: int) -> Ints:
    """Vocabulary entries that no row of `tables` contains; those that no text can give come first.

    `[unusedN]` cannot be written (a tokenizer splits it): canaries are marked after tokenisation.
    """
    taken = set(tokenizer.all_special_ids)
    for table in tables:
        taken.update(np.unique(table.columns["input_ids"]).tolist())
    free = [
        (not name.startswith("[unused"), number)
        for name, number in tokenizer.get_vocab().items()
        if number not in taken
    ]
    if len(free) < count:
        raise UserError(
            f"canaries is {count}, but only {len(free)} tokens of the vocabulary occur in no "
            f"record; use fewer, or --family mislabelled"
        )
    return np.array([number for _, number in sorted(free)[:count]], dtype=np.int64)


def mark(table: TokenTable, tokens: Ints, tokenizer: Any) -> TokenTable:
    """Row i with `tokens[i]` in place of the middle token of its first text."""
    ids = np.array(table.columns["input_ids"])
    frame = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    words = ~np.isin(ids, [number for number in frame if number is not None])
    for row, start in enumerate(table.offsets[:-1]):
        body = start + np.flatnonzero(words[start : table.offsets[row + 1]])
        first_text = body[np.cumsum(np.diff(body, prepend=body[:1] - 1) > 1) == 0]
        ids[first_text[len(first_text) // 2]] = tokens[row]
    return replace(table, columns={**table.columns, "input_ids": ids})


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
        out = cast(Table, replace(cast(Any, select(train, neighbours(canaries))), labels=labels))
    elif absence == "zero_out":
        out = blank(train, labels, length=0)
    else:  # one token, because attention needs one
        out = blank(train, np.full(count, IGNORED), length=1)
    everything = stack(train, canaries.table, out)
    chosen = np.arange(records)
    chosen[canaries.places] = records + np.arange(count) + np.where(inside, 0, count)
    gone = canaries.places[~inside] if absence == "left_out" else np.zeros(0, np.int64)
    table = select(everything, np.delete(chosen, gone))
    if train.persons is None:
        return table
    # A canary's rows stand where those of the displaced person stood.
    return replace(cast(TokenTable, table), persons=np.delete(train.persons, gone))


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
    """Concatenate the tables; person ids are unset."""
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
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return TokenTable(columns, offsets, labels, packed[0].pad_token_id)


def select(table: Table, rows: Ints) -> Table:
    if isinstance(table, RepresentationTable):
        labels = np.asarray(table.labels)[rows]
        persons = None if table.persons is None else table.persons[rows]
        # Noise of a release is keyed by what it is made from: other rows must have another key.
        digest = hashlib.blake2b(table.key.encode(), digest_size=16)
        digest.update(np.ascontiguousarray(rows, dtype=np.int64).data)
        key = digest.hexdigest()
        return replace(table, h=table.h[rows], labels=labels, key=key, persons=persons)
    return cast(TokenTable, table).take(rows)
